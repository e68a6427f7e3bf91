"""Applies a step's result to the requests that were in it.

Rows of requests that have left their slot meanwhile are dropped; the others get their token, end, or end with an error.
Knows no budget and no queue order.

Shapes: N rows for which a token was sampled · A all rows of the step · U updates of tables · C copies · D hidden size
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.wire.messages import Run, TokenLogprobs, WireFinishReason
from octavo.worker.scheduler.plan import GatewayIndex, RequestKey, StepResult
from octavo.worker.scheduler.request import Ending, Matcher, Phase, Request, failure
from octavo.worker.scheduler.request_table import RequestTable
from octavo.worker.scheduler.slot_state import InFlightStep, find_ends


class Results:
    """Applies results to the table."""

    def __init__(self, table: RequestTable) -> None:
        self._requests = table
        self._slots = table.slots
        self._unindexed: list[Request] = []  # requests whose prompt was completed by the last result

    def finish(self) -> None:
        """Give back the blocks of requests that the last result ended, and enter the prompts that it completed into the
        prefix index. Idempotent."""
        self._requests.give_back()
        for request in self._unindexed:
            if request.slot is not None:  # leaving the slot has done this already
                self._requests.commit(request)
        self._unindexed.clear()

    def succeed(self, step: InFlightStep, result: StepResult, now_s: float) -> None:
        """Append one token to each row whose request is still there and whose logits were finite."""
        slots = self._slots
        slots_N, num_computed_N = (
            step.slots_A[: step.num_sampled],
            step.num_computed_A[: step.num_sampled],
        )
        self._put_prompt_logprobs(step, result)
        tokens_N, is_good_N = result.tokens_S, self._judge(step, result, now_s)
        if result.embeddings:
            is_good_N = self._put_embeddings(step, result, is_good_N, now_s)
        if slots.has_grammar_S[slots_N].any():
            is_good_N = self._accept(slots_N, tokens_N, is_good_N, now_s)
        if not is_good_N.all():
            slots_N, num_computed_N, tokens_N = slots_N[is_good_N], num_computed_N[is_good_N], tokens_N[is_good_N]
        slots.append(slots_N, tokens_N, num_computed_N, now_s)
        self._put_tokens(slots_N, tokens_N, result, is_good_N)
        self._put_logprobs(step, result, is_good_N)
        self._note_prefilled(step, is_good_N, now_s)
        self._end_finished(slots_N, tokens_N, now_s)

    def fail(self, step: InFlightStep, detail: str, now_s: float) -> None:
        """Every request of the step ends, and what it computed is not reused."""
        for request in self._spoiled_requests(step):
            self._requests.end_tainted(request, failure("ENGINE_ERROR", detail), now_s)

    def run_out_of_memory(self, step: InFlightStep, detail: str, now_s: float) -> None:
        """End the request with the largest prefill, or the longest one that decoded if there is no prefill; the others
        are queued again. One ends each time, so this cannot go on forever."""
        requests = self._spoiled_requests(step)
        if not requests:
            return
        culprit = max(requests, key=lambda request: self._size(step, request))
        for request in requests:
            if request is not culprit:
                self._requests.start_over(request, now_s)
        self._requests.end_tainted(culprit, failure("OUT_OF_MEMORY", detail), now_s)

    def _size(self, step: InFlightStep, request: Request) -> tuple[int, bool, int]:
        slot = request.held_slot
        num_tokens = sum(chunk.num_tokens for chunk in step.plan.prefill if chunk.slot == slot)
        return num_tokens, slot in step.plan.decode_slots_S, int(self._slots.num_known_S[slot])

    def _live_requests(self, step: InFlightStep) -> list[Request]:
        return [self._requests.in_slot(slot) for slot in step.slots_A[step.is_live_A(self._slots)].tolist()]

    def _spoiled_requests(self, step: InFlightStep) -> list[Request]:
        """Requests that a failed step affects: those that were in it; those that hold blocks that it should have
        brought back from the host; paused ones whose table rows it updated (they got blocks for a plan that was then
        not made); and those that a later plan has forked from any of these."""
        requests = self._live_requests(step)
        plan = step.plan
        holders = self._requests.blocks.invalidate_copies(plan.copies_out_C2, plan.copies_in_C2)
        holders += self._requests.paused.keys() & set(plan.block_updates_U3[:, 0].tolist())
        requests += [other for slot in holders if (other := self._requests.in_slot(slot)) not in requests]
        return requests + [
            other for other in self._requests.running if other.origin in requests and other not in requests
        ]

    def _judge(self, step: InFlightStep, result: StepResult, now_s: float) -> np.ndarray:
        """bool [N]: rows whose token counts. Rows of requests that have left their slot meanwhile are dropped; requests
        whose logits are not finite, or whose masks forbid every token, end here."""
        is_live_N = step.is_live_A(self._slots)[: step.num_sampled]
        is_good_N: np.ndarray = is_live_N & result.is_finite_S
        if not is_good_N.all():
            self._requests.counters.num_dropped_tokens += int((~is_live_N).sum())
            self._end_non_finite(step.slots_A[: step.num_sampled][is_live_N & ~result.is_finite_S], now_s)
        if result.is_exhausted_S is not None and result.is_exhausted_S.any():
            self._end_exhausted(step.slots_A[: step.num_sampled][is_good_N & result.is_exhausted_S], now_s)
            is_good_N = is_good_N & ~result.is_exhausted_S
        return is_good_N

    def _end_exhausted(self, slots_N: np.ndarray, now_s: float) -> None:
        """The masks forbid every token: these outputs end as they are, or with an error if they have a grammar."""
        for slot in slots_N.tolist():
            request = self._requests.in_slot(slot)
            self._requests.commit(request)
            ending = Ending(WireFinishReason.STOP)
            if request.matcher is not None:
                ending = failure("CONSTRAINT", "constraint: what else the request forbids leaves no token")
            self._requests.end(request, ending, now_s)

    def _accept(self, slots_N: np.ndarray, tokens_N: np.ndarray, is_good_N: np.ndarray, now_s: float) -> np.ndarray:
        """Advance matchers by the new tokens. bool [N]: is_good_N without the rows whose grammar refuses its token,
        which end here."""
        is_good_N = is_good_N.copy()
        for index in (is_good_N & self._slots.has_grammar_S[slots_N]).nonzero()[0].tolist():
            request = self._requests.in_slot(int(slots_N[index]))
            assert request.matcher is not None
            if not request.matcher.accept(int(tokens_N[index])):
                is_good_N[index] = False
                self._requests.end(request, failure("CONSTRAINT", f"constraint: {request.matcher.error}"), now_s)
        return is_good_N

    def _end_non_finite(self, slots_N: np.ndarray, now_s: float) -> None:
        for slot in slots_N.tolist():
            position = int(self._slots.num_known_S[slot])
            ending = failure("NUMERICAL", f"the model gave no finite logits for position {position}")
            self._requests.end_tainted(self._requests.in_slot(slot), ending, now_s)

    def _put_embeddings(
        self, step: InFlightStep, result: StepResult, is_good_N: np.ndarray, now_s: float
    ) -> np.ndarray:
        """bool [N]: is_good_N without the rows whose embedding is not finite, which end here."""
        is_good_N = is_good_N.copy()
        for index, embedding_D in result.embeddings.items():
            if not is_good_N[index]:
                continue
            request = self._requests.in_slot(int(step.slots_A[index]))
            if np.isfinite(embedding_D).all():
                self._requests.outputs.put_embedding(request.key, embedding_D)
                continue
            is_good_N[index] = False
            self._requests.end_tainted(request, failure("NUMERICAL", "the embedding is not finite"), now_s)
        return is_good_N

    def _put_tokens(self, slots_N: np.ndarray, tokens_N: np.ndarray, result: StepResult, is_good_N: np.ndarray) -> None:
        """slots_N, tokens_N: of good rows only. The token after an embedding's prompt is not sent."""
        if result.embeddings:
            is_sent_N = np.ones(len(is_good_N), np.bool_)
            is_sent_N[list(result.embeddings)] = False
            is_sent_N = is_sent_N[is_good_N]
            slots_N, tokens_N = slots_N[is_sent_N], tokens_N[is_sent_N]
        self._requests.counters.num_generated_tokens += len(slots_N)
        self._requests.outputs.put_tokens(self._slots.gateway_S[slots_N], self._slots.handle_S[slots_N], tokens_N)

    def _put_logprobs(self, step: InFlightStep, result: StepResult, is_good_N: np.ndarray) -> None:
        for index, logprobs in result.logprobs.items():
            if is_good_N[index]:
                request = self._requests.in_slot(int(step.slots_A[index]))
                sent = TokenLogprobs(logprobs.logprob, logprobs.top_ids, logprobs.top_logprobs)
                self._requests.outputs.put_logprobs(request.key, sent)

    def _put_prompt_logprobs(self, step: InFlightStep, result: StepResult) -> None:
        """Log-probabilities of each position are sent once, even if it is computed again after a preemption."""
        if not result.prompt_logprobs:
            return
        live = set(step.slots_A[step.is_live_A(self._slots)].tolist())
        for index, found in result.prompt_logprobs.items():
            chunk = step.plan.prefill[index]
            if chunk.slot not in live:
                continue
            request = self._requests.in_slot(chunk.slot)
            news = found[max(0, request.num_sent_prompt_logprobs - chunk.start) :]
            request.num_sent_prompt_logprobs += len(news)
            sent = [TokenLogprobs(each.logprob, each.top_ids, each.top_logprobs) for each in news]
            self._requests.outputs.put_prompt_logprobs(request.key, sent)

    def _note_prefilled(self, step: InFlightStep, is_good_N: np.ndarray, now_s: float) -> None:
        """Note the rows whose prefill ended in this step; they come after the decodes."""
        for index in range(len(step.plan.decode_slots_S), step.num_sampled):
            if is_good_N[index]:
                request = self._requests.in_slot(int(step.slots_A[index]))
                request.origin = None
                request.first_token_s = now_s if request.first_token_s is None else request.first_token_s
                self._unindexed.append(request)
                self._requests.promote_follower(request, now_s)

    def _end_finished(self, slots_N: np.ndarray, tokens_N: np.ndarray, now_s: float) -> None:
        is_stop_N, is_end_N = find_ends(self._slots, slots_N, tokens_N)
        is_complete_N = self._find_complete(slots_N)
        for index in (is_end_N | is_complete_N).nonzero()[0].tolist():
            request = self._requests.in_slot(int(slots_N[index]))
            if is_complete_N[index] and not is_stop_N[index]:
                is_by_token = request.matcher is not None and request.matcher.ended_by_token
                ending = Ending(WireFinishReason.STOP, stop_token_id=int(tokens_N[index]) if is_by_token else None)
            elif is_stop_N[index]:
                ending = Ending(WireFinishReason.STOP, stop_token_id=int(tokens_N[index]))
            else:
                ending = Ending(WireFinishReason.LENGTH)
            self._requests.end(request, ending, now_s, keeps_blocks=True)

    def _find_complete(self, slots_N: np.ndarray) -> np.ndarray:
        """bool [N]: whether the output's grammar is complete."""
        is_complete_N = np.zeros(len(slots_N), np.bool_)
        for index in self._slots.has_grammar_S[slots_N].nonzero()[0].tolist():
            matcher = self._requests.in_slot(int(slots_N[index])).matcher
            is_complete_N[index] = matcher is not None and matcher.is_complete
        return is_complete_N


class ConstrainedRow(NamedTuple):
    """A row of a step that waits for its mask. position: in the plan's sampled slots. request: None if it has left its
    slot meanwhile. early: tokens to leave out of the mask if others remain, as they would end the output too soon."""

    position: int
    request: Request | None
    early: tuple[int, ...]


class Constraints:
    """Requests with a grammar: they wait outside the queue until it is compiled, and their rows wait for masks.

    in_flight: the scheduler's steps in flight, oldest first. Must not know the grammar library, nor how grammars are
    compiled.
    """

    def __init__(self, table: RequestTable, in_flight: Sequence[InFlightStep], eos_token_ids: tuple[int, ...]) -> None:
        self._requests = table
        self._in_flight = in_flight
        self._eos_token_ids = eos_token_ids

    def ready(self, gateway: GatewayIndex, run: Run, matcher: Matcher, *, now_s: float) -> None:
        """The grammar of a Run's outputs is compiled: each one that is still unfinished gets a matcher, and joins the
        queue if it waited for this."""
        requests = self._outputs(gateway, run)
        for request in requests:
            request.matcher = matcher.fork()
        for request in requests:
            if request.phase is Phase.COMPILING:
                self._requests.waiting.push(request, now_s)

    def failed(self, gateway: GatewayIndex, run: Run, ending: Ending, *, now_s: float) -> None:
        """The grammar cannot be compiled: all of the Run's outputs end."""
        for request in self._outputs(gateway, run):
            self._requests.end(request, ending, now_s)

    def awaits(self, gateway: GatewayIndex, run: Run) -> bool:
        """Whether outputs of this very Run were accepted and wait for its grammar. Pooled requests never do: their
        Run's sampling parameters are ignored."""
        return any(request.awaits_grammar for request in self._outputs(gateway, run))

    @property
    def any_in_newest(self) -> bool:
        """Whether a row of the newest step has a grammar."""
        step, has_grammar_S = self._in_flight[-1], self._requests.slots.has_grammar_S
        return bool(has_grammar_S[step.slots_A[: step.num_sampled]].any())

    def rows(self) -> list[ConstrainedRow]:
        """The constrained rows of the newest step. All tokens of earlier steps must be known."""
        step = self._in_flight[-1]
        slots_N = step.slots_A[: step.num_sampled]
        is_live_N = step.is_live_A(self._requests.slots)
        return [
            self._row(index, int(slots_N[index])) if is_live_N[index] else ConstrainedRow(index, None, ())
            for index in self._requests.slots.has_grammar_S[slots_N].nonzero()[0].tolist()
        ]

    def broken(self, request: Request, detail: str, *, now_s: float) -> None:
        """The grammar of a running output allows nothing more, or took too much work."""
        self._requests.end(request, failure("CONSTRAINT", f"constraint: {detail}"), now_s)

    def _row(self, index: int, slot: int) -> ConstrainedRow:
        request, sampling = self._requests.in_slot(slot), self._requests.in_slot(slot).sampling
        num_output = int(self._requests.slots.num_known_S[slot]) - request.num_prompt_tokens
        if num_output < sampling.min_tokens:
            return ConstrainedRow(index, request, (*sampling.stop_token_ids, *self._eos_token_ids))
        return ConstrainedRow(index, request, self._eos_token_ids if sampling.ignore_eos else ())

    def _outputs(self, gateway: GatewayIndex, run: Run) -> list[Request]:
        """The Run's unfinished outputs. Its handles may belong to another Run by now."""
        found = [self._requests.find(RequestKey(gateway, handle)) for handle in (run.handle, *run.fork_handles)]
        return [each for each in found if each is not None and each.run is run]
