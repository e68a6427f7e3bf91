"""What a step's result does to the requests that were in it.

Rows of requests that have left their slot meanwhile are dropped; what is left gets its token, ends, or ends by error.
Knows no budget and no queue order.

Shapes: N rows that a token was sampled for
"""

import numpy as np

from wire.messages import TokenLogprobs, WireFinishReason
from worker.flights import Flight
from worker.plan import StepResult
from worker.request import Ending, Request, failure
from worker.roster import Roster
from worker.stops import find_ends


class Landing:
    """Applies results to the roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._rows = roster.rows

    def succeed(self, flight: Flight, result: StepResult, now_s: float) -> None:
        """One token for each row whose request is still there and whose logits were finite."""
        rows = self._rows
        slots_N, num_computed_N = flight.slots_A[: flight.num_sampled], flight.num_computed_A[: flight.num_sampled]
        tokens_N, is_good_N = result.tokens_S, self._judge(flight, result, now_s)
        if result.embeddings:
            is_good_N = self._put_embeddings(flight, result, is_good_N, now_s)
        if not is_good_N.all():
            slots_N, num_computed_N, tokens_N = slots_N[is_good_N], num_computed_N[is_good_N], tokens_N[is_good_N]
        rows.append(slots_N, tokens_N, num_computed_N, now_s)
        self._put_tokens(slots_N, tokens_N, result, is_good_N)
        self._put_logprobs(flight, result, is_good_N)
        self._note_prefilled(flight, is_good_N, now_s)
        self._end_finished(slots_N, tokens_N, now_s)

    def fail(self, flight: Flight, detail: str, now_s: float) -> None:
        """Every request of the step ends, and nobody reuses its blocks."""
        for request in self._live_requests(flight):
            self._roster.end_tainted(request, failure("ENGINE_ERROR", detail), now_s)

    def run_out_of_memory(self, flight: Flight, detail: str, now_s: float) -> None:
        """The largest prefill ends, or the longest request where there is no prefill; the others wait again. One
        ends in any case, so this cannot go on for ever."""
        requests = self._live_requests(flight)
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

    def _judge(self, flight: Flight, result: StepResult, now_s: float) -> np.ndarray:
        """bool [N]: the rows whose token counts. Rows of requests that have ended meanwhile are dropped; requests
        whose logits are not finite end here."""
        is_live_N = flight.is_live_A(self._rows)[: flight.num_sampled]
        is_good_N: np.ndarray = is_live_N & result.is_finite_S
        if not is_good_N.all():
            self._roster.counters.num_dropped_tokens += int((~is_live_N).sum())
            self._end_non_finite(flight.slots_A[: flight.num_sampled][is_live_N & ~result.is_finite_S], now_s)
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

    def _note_prefilled(self, flight: Flight, is_good_N: np.ndarray, now_s: float) -> None:
        """Rows that ended their prefill in this step, which come after the decodes: others may reuse their blocks."""
        for index in range(len(flight.plan.decode_slots_S), flight.num_sampled):
            if is_good_N[index]:
                request = self._roster.in_slot(int(flight.slots_A[index]))
                request.first_token_s = now_s if request.first_token_s is None else request.first_token_s
                self._roster.commit(request)

    def _end_finished(self, slots_N: np.ndarray, tokens_N: np.ndarray, now_s: float) -> None:
        is_stop_N, is_end_N = find_ends(self._rows, slots_N, tokens_N)
        for index in is_end_N.nonzero()[0].tolist():
            request = self._roster.in_slot(int(slots_N[index]))
            if is_stop_N[index]:
                ending = Ending(WireFinishReason.STOP, stop_token_id=int(tokens_N[index]))
            else:
                ending = Ending(WireFinishReason.LENGTH)
            self._roster.end(request, ending, now_s)
