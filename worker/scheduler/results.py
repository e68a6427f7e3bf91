"""What a step's result does to the requests that were in it.

Rows of requests that have left their slot meanwhile are dropped; what is left gets its token, ends, or ends by error.
Knows no budget and no queue order.

Shapes: N rows that a token was sampled for
"""

import numpy as np

from octavo.wire.messages import TokenLogprobs, WireFinishReason
from octavo.worker.scheduler.in_flight import Flight
from octavo.worker.scheduler.plan import StepResult
from octavo.worker.scheduler.request import Ending, Request, failure
from octavo.worker.scheduler.request_table import Roster, find_ends


class Landing:
    """Applies results to the roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._rows = roster.rows

    def succeed(self, flight: Flight, result: StepResult, now_s: float) -> None:
        """One token for each row whose request is still there and whose logits were finite."""
        rows = self._rows
        slots_N, num_computed_N = flight.slots_A[: flight.num_sampled], flight.num_computed_A[: flight.num_sampled]
        self._put_prompt_logprobs(flight, result)
        tokens_N, is_good_N = result.tokens_S, self._judge(flight, result, now_s)
        if result.embeddings:
            is_good_N = self._put_embeddings(flight, result, is_good_N, now_s)
        if rows.has_grammar_S[slots_N].any():
            is_good_N = self._accept(slots_N, tokens_N, is_good_N, now_s)
        if not is_good_N.all():
            slots_N, num_computed_N, tokens_N = slots_N[is_good_N], num_computed_N[is_good_N], tokens_N[is_good_N]
        rows.append(slots_N, tokens_N, num_computed_N, now_s)
        self._put_tokens(slots_N, tokens_N, result, is_good_N)
        self._put_logprobs(flight, result, is_good_N)
        self._note_prefilled(flight, is_good_N, now_s)
        self._end_finished(slots_N, tokens_N, now_s)

    def fail(self, flight: Flight, detail: str, now_s: float) -> None:
        """Every request of the step ends, and nobody reuses its blocks."""
        for request in self._spoiled_requests(flight):
            self._roster.end_tainted(request, failure("ENGINE_ERROR", detail), now_s)

    def run_out_of_memory(self, flight: Flight, detail: str, now_s: float) -> None:
        """The largest prefill ends, or the longest request where there is no prefill; the others wait again. One
        ends in any case, so this cannot go on for ever."""
        requests = self._spoiled_requests(flight)
        if not requests:
            return
        culprit = max(requests, key=lambda request: self._size(flight, request))
        for request in requests:
            if request is not culprit:
                self._roster.preempt(request, now_s)
        self._roster.end_tainted(culprit, failure("OUT_OF_MEMORY", detail), now_s)

    def _size(self, flight: Flight, request: Request) -> tuple[int, int]:
        num_tokens = [chunk.num_tokens for chunk in flight.plan.prefill if chunk.slot == request.slot]
        return sum(num_tokens), int(self._rows.num_known_S[request.held_slot])

    def _live_requests(self, flight: Flight) -> list[Request]:
        return [self._roster.in_slot(slot) for slot in flight.slots_A[flight.is_live_A(self._rows)].tolist()]

    def _spoiled_requests(self, flight: Flight) -> list[Request]:
        """Those of a failed step, and those that a later plan has forked off what it should have computed."""
        requests = self._live_requests(flight)
        return requests + [
            other for other in self._roster.running if other.origin in requests and other not in requests
        ]

    def _judge(self, flight: Flight, result: StepResult, now_s: float) -> np.ndarray:
        """bool [N]: the rows whose token counts. Rows of requests that have ended meanwhile are dropped; requests
        whose logits are not finite end here."""
        is_live_N = flight.is_live_A(self._rows)[: flight.num_sampled]
        is_good_N: np.ndarray = is_live_N & result.is_finite_S
        if not is_good_N.all():
            self._roster.counters.num_dropped_tokens += int((~is_live_N).sum())
            self._end_non_finite(flight.slots_A[: flight.num_sampled][is_live_N & ~result.is_finite_S], now_s)
        if result.is_exhausted_S is not None and result.is_exhausted_S.any():
            self._end_exhausted(flight.slots_A[: flight.num_sampled][is_good_N & result.is_exhausted_S], now_s)
            is_good_N = is_good_N & ~result.is_exhausted_S
        return is_good_N

    def _end_exhausted(self, slots_N: np.ndarray, now_s: float) -> None:
        """What the caller forbids leaves no token: the output ends as it is."""
        for slot in slots_N.tolist():
            request = self._roster.in_slot(slot)
            self._roster.commit(request)
            ending = Ending(WireFinishReason.STOP)
            if request.matcher is not None:
                ending = failure("CONSTRAINT", "constraint: what else the request forbids leaves no token")
            self._roster.end(request, ending, now_s)

    def _accept(self, slots_N: np.ndarray, tokens_N: np.ndarray, is_good_N: np.ndarray, now_s: float) -> np.ndarray:
        """Matchers go on by the new tokens. bool [N]: as before, less the rows whose grammar does not take theirs."""
        is_good_N = is_good_N.copy()
        for index in (is_good_N & self._rows.has_grammar_S[slots_N]).nonzero()[0].tolist():
            request = self._roster.in_slot(int(slots_N[index]))
            assert request.matcher is not None
            if not request.matcher.accept(int(tokens_N[index])):
                is_good_N[index] = False
                self._roster.end(request, failure("CONSTRAINT", f"constraint: {request.matcher.error}"), now_s)
        return is_good_N

    def _end_non_finite(self, slots_N: np.ndarray, now_s: float) -> None:
        for slot in slots_N.tolist():
            position = int(self._rows.num_known_S[slot])
            ending = failure("NUMERICAL", f"the model gave no finite logits for position {position}")
            self._roster.end_tainted(self._roster.in_slot(slot), ending, now_s)

    def _put_embeddings(self, flight: Flight, result: StepResult, is_good_N: np.ndarray, now_s: float) -> np.ndarray:
        """bool [N]: the rows whose token counts, without those whose embedding is not finite, which end here."""
        is_good_N = is_good_N.copy()
        for index, embedding_D in result.embeddings.items():
            if not is_good_N[index]:
                continue
            request = self._roster.in_slot(int(flight.slots_A[index]))
            if np.isfinite(embedding_D).all():
                self._roster.outputs.put_embedding(request.asked.key, embedding_D)
                continue
            is_good_N[index] = False
            self._roster.end_tainted(request, failure("NUMERICAL", "the embedding is not finite"), now_s)
        return is_good_N

    def _put_tokens(self, slots_N: np.ndarray, tokens_N: np.ndarray, result: StepResult, is_good_N: np.ndarray) -> None:
        """slots_N, tokens_N: of the good rows. The token after an embedding's prompt is nobody's."""
        if result.embeddings:
            is_told_N = np.ones(len(is_good_N), np.bool_)
            is_told_N[list(result.embeddings)] = False
            is_told_N = is_told_N[is_good_N]
            slots_N, tokens_N = slots_N[is_told_N], tokens_N[is_told_N]
        self._roster.counters.num_generated_tokens += len(slots_N)
        self._roster.outputs.put_tokens(self._rows.gateway_S[slots_N], self._rows.handle_S[slots_N], tokens_N)

    def _put_logprobs(self, flight: Flight, result: StepResult, is_good_N: np.ndarray) -> None:
        for index, logprobs in result.logprobs.items():
            if is_good_N[index]:
                request = self._roster.in_slot(int(flight.slots_A[index]))
                told = TokenLogprobs(logprobs.logprob, logprobs.top_ids, logprobs.top_logprobs)
                self._roster.outputs.put_logprobs(request.asked.key, told)

    def _put_prompt_logprobs(self, flight: Flight, result: StepResult) -> None:
        """Chunks that are computed again after a preemption are told once."""
        if not result.prompt_logprobs:
            return
        live = set(flight.slots_A[flight.is_live_A(self._rows)].tolist())
        for index, found in result.prompt_logprobs.items():
            chunk = flight.plan.prefill[index]
            if chunk.slot not in live:
                continue
            request = self._roster.in_slot(chunk.slot)
            news = found[max(0, request.num_told_prompt_logprobs - chunk.start) :]
            request.num_told_prompt_logprobs += len(news)
            told = [TokenLogprobs(each.logprob, each.top_ids, each.top_logprobs) for each in news]
            self._roster.outputs.put_prompt_logprobs(request.asked.key, told)

    def _note_prefilled(self, flight: Flight, is_good_N: np.ndarray, now_s: float) -> None:
        """Rows that ended their prefill in this step, which come after the decodes: others may reuse their blocks."""
        for index in range(len(flight.plan.decode_slots_S), flight.num_sampled):
            if is_good_N[index]:
                request = self._roster.in_slot(int(flight.slots_A[index]))
                request.origin = None
                request.first_token_s = now_s if request.first_token_s is None else request.first_token_s
                self._roster.commit(request)
                self._roster.promote_follower(request, now_s)

    def _end_finished(self, slots_N: np.ndarray, tokens_N: np.ndarray, now_s: float) -> None:
        is_stop_N, is_end_N = find_ends(self._rows, slots_N, tokens_N)
        is_complete_N = self._find_complete(slots_N)
        for index in (is_end_N | is_complete_N).nonzero()[0].tolist():
            request = self._roster.in_slot(int(slots_N[index]))
            if is_complete_N[index] and not is_stop_N[index]:
                is_by_token = request.matcher is not None and request.matcher.ended_by_token
                ending = Ending(WireFinishReason.STOP, stop_token_id=int(tokens_N[index]) if is_by_token else None)
            elif is_stop_N[index]:
                ending = Ending(WireFinishReason.STOP, stop_token_id=int(tokens_N[index]))
            else:
                ending = Ending(WireFinishReason.LENGTH)
            self._roster.end(request, ending, now_s)

    def _find_complete(self, slots_N: np.ndarray) -> np.ndarray:
        """bool [N]: the output's grammar lets nothing follow."""
        is_complete_N = np.zeros(len(slots_N), np.bool_)
        for index in self._rows.has_grammar_S[slots_N].nonzero()[0].tolist():
            matcher = self._roster.in_slot(int(slots_N[index])).matcher
            is_complete_N[index] = matcher is not None and matcher.is_complete
        return is_complete_N
