"""What the runners that have a model share: how a request is sampled, and what a step gives besides its tokens.

Embeddings and log-probabilities are computed from the hidden states of a step. Must not know: the scheduler, the cache,
how tokens are chosen, on which device.

Legend: T tokens in this step · N of them at once · D model dim · V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from octavo.model.sampling.logprobs import Logprobs, RawLogprobs
from octavo.wire.messages import Pooling, SamplingParams
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.scheduler.plan import Chunk, NewRequest, SlotLogprobs, StepPlan, StepResult

HiddenOf = Callable[[slice], torch.Tensor]
"""Hidden states after the final norm of these tokens of the step, [N, D] in any dtype."""

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Float32 logits [N, V] of hidden states [N, D]."""

_POSITIONS_AT_ONCE = 32
_ALLOCATION_FAILURES = ("can't allocate memory", "not enough memory", "out of memory")


def sampler_params(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """A request's parameters as the sampler takes them: end tokens become stop ids unless ignored, and if there is a
    grammar, its masks enforce min_tokens."""
    ends = () if sampling.ignore_eos else eos_token_ids
    return msgspec.structs.replace(
        sampling,
        stop_token_ids=(*sampling.stop_token_ids, *ends),
        min_tokens=0 if sampling.grammar is not None else sampling.min_tokens,
    )


@dataclass(slots=True, eq=False)
class _Row:
    pooling: Pooling
    sum_D: torch.Tensor | None = None  # float32
    num_tokens: int = 0


class Pooler:
    """Embeddings: sums of hidden states over the chunks of each prompt, kept until the last chunk.

    A row that joins again (after a preemption) starts over. Costs nothing if no row has a pooling.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    @property
    def is_used(self) -> bool:
        """Whether any row has a pooling, and so may read more of a step than its sampled rows."""
        return bool(self._rows)

    def join(self, new: NewRequest) -> None:
        """A request enters a slot; what the slot had gathered is dropped."""
        if new.pooling is not None:
            self._rows[new.slot] = _Row(new.pooling)
        elif self._rows:
            self._rows.pop(new.slot, None)

    def take(self, plan: StepPlan, hidden_of: HiddenOf, *, first_token: int) -> dict[int, torch.Tensor]:
        """The embeddings (float32 [D], on the model's device) that this step completes, by index into its sampled rows.
        first_token: of the chunks, in the step as it was run."""
        if not self._rows:
            return {}
        done: dict[int, torch.Tensor] = {}
        start, index = first_token, len(plan.decode_slots_S)
        for chunk in plan.prefill:
            row = self._rows.get(chunk.slot)
            if row is not None:
                self._gather(row, chunk, start, hidden_of)
                if chunk.is_last:
                    assert row.sum_D is not None
                    done[index] = row.sum_D / row.num_tokens
                    del self._rows[chunk.slot]
            start += chunk.num_tokens
            index += chunk.is_last + len(chunk.forks)
        return done

    def _gather(self, row: _Row, chunk: Chunk, start: int, hidden_of: HiddenOf) -> None:
        end = start + chunk.num_tokens
        if row.pooling is Pooling.MEAN:
            sum_D = hidden_of(slice(start, end)).float().sum(dim=0)
            row.sum_D = sum_D if row.sum_D is None else row.sum_D + sum_D
            row.num_tokens += chunk.num_tokens
        elif chunk.is_last:
            row.sum_D, row.num_tokens = hidden_of(slice(end - 1, end))[0].float(), 1


class PromptScorer:
    """Log-probabilities of a prompt's own tokens, for the rows that ask for them. Costs nothing if none does.

    Logits are computed a few positions at a time, so that a prompt never has logits over its whole length in memory.
    """

    def __init__(self, logits_of: LogitsOf, *, vocab_size: int) -> None:
        self._logits_of = logits_of
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[np.ndarray, int]] = {}  # ids of the prompt, how many of the best are wanted

    @property
    def is_used(self) -> bool:
        """Whether any row asks for them, and so reads more of a step than its sampled rows."""
        return bool(self._rows)

    def join(self, new: NewRequest) -> None:
        """A request enters a slot; what the slot asked for before is dropped."""
        self._rows.pop(new.slot, None)
        if (num_top := new.sampling.num_prompt_logprobs) is not None:
            self._rows[new.slot] = new.token_ids_T[: new.num_prompt_tokens], num_top

    def take(self, plan: StepPlan, hidden_of: HiddenOf, *, first_token: int) -> dict[int, list[SlotLogprobs]]:
        """Log-probabilities by index of the chunk. first_token: of the chunks, in the step as it was run. Waits for the
        device."""
        found: dict[int, list[SlotLogprobs]] = {}
        if not self._rows:
            return found
        for index, chunk in enumerate(plan.prefill):
            if chunk.slot in self._rows:
                found[index] = self._score(chunk, first_token, hidden_of)
                if chunk.is_last:
                    del self._rows[chunk.slot]
            first_token += chunk.num_tokens
        return found

    def _score(self, chunk: Chunk, first_token: int, hidden_of: HiddenOf) -> list[SlotLogprobs]:
        prompt_ids_T, num_top = self._rows[chunk.slot]
        end, found = min(chunk.start + chunk.num_tokens, len(prompt_ids_T) - 1), list[SlotLogprobs]()
        for start in range(chunk.start, end, _POSITIONS_AT_ONCE):
            stop = min(start + _POSITIONS_AT_ONCE, end)
            at = first_token + start - chunk.start
            logits_NV = self._logits_of(hidden_of(slice(at, at + stop - start)))[:, : self._vocab_size]
            next_N = torch.from_numpy(prompt_ids_T[start + 1 : stop + 1].astype(np.int64)).to(logits_NV.device)
            raw = RawLogprobs(logits_NV, np.arange(stop - start), np.full(stop - start, num_top))
            found += slot_logprobs(raw.choose(next_N)).values()
        return found


def slot_logprobs(logprobs: Logprobs) -> dict[int, SlotLogprobs]:
    """By position in the batch, each with as many alternatives as its row asked for."""
    rows = zip(
        logprobs.index_N.tolist(),
        logprobs.count_N.tolist(),
        logprobs.chosen_N.tolist(),
        logprobs.top_ids_NK.tolist(),
        logprobs.top_NK.tolist(),
        strict=True,
    )
    return {
        index: SlotLogprobs(logprob=chosen, top_ids=tuple(ids[:count]), top_logprobs=tuple(top[:count]))
        for index, count, chosen, ids, top in rows
    }


def empty_result(step: int) -> StepResult:
    """The result of a step that samples nothing."""
    return StepResult(step=step, tokens_S=np.empty(0, np.int32), is_finite_S=np.empty(0, np.bool_))


def as_runner_error(error: Exception) -> RunnerError:
    """RunnerOutOfMemory if the message is an allocator's, else RunnerError."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    is_memory = is_memory or any(words in str(error) for words in _ALLOCATION_FAILURES)
    kind = RunnerOutOfMemory if is_memory else RunnerError
    wrapped = kind(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
