"""What one engine step does: the plan that the scheduler makes and the result that the runner gives back.

Plain data between the pure scheduler and whatever executes it. Rows are **slots**: stable small integers, one per
request that holds blocks, also the row of its block table. A plan is self-contained: a runner that applies every
plan in order (new requests, table updates, copies, then the tokens) needs nothing else, in particular not the block
manager.

    tokens of a request   |--- computed (in the KV cache) ---|--- chunk of this step ---|--- not yet ---|
    positions             0                               start                start + num_tokens
"""

from dataclasses import dataclass, field
from typing import NewType

import numpy as np

from octavo.wire.messages import Pooling, Sampling

Slot = NewType("Slot", int)


def _no_rows(width: int) -> np.ndarray:
    return np.empty((0, width), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewRequest:
    """A request enters a slot (again, after a preemption). The runner forgets whatever the slot held before.

    token_ids_T: int32, prompt followed by tokens generated before a preemption.
    num_prompt_tokens: where the output starts in it.
    pooling: the result of its last chunk's step has its embedding; None: none.
    """

    slot: Slot
    request_id: str
    token_ids_T: np.ndarray
    num_prompt_tokens: int
    sampling: Sampling
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prompt (or re-computed) tokens of one request, positions [start, start + num_tokens).

    is_last: the chunk ends at the last known token, so a token is sampled after it.
    forks: slots of further outputs of the same prompt, which join in this plan: each gets a token from the logits after
        the last chunk too, by its own sampling, and its table leads to the same blocks.
    """

    slot: Slot
    start: int
    num_tokens: int
    is_last: bool
    forks: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One step. Order of execution: new_requests, block_updates, block_copies, then all tokens in one forward pass.

    block_updates_U3: int32 rows (slot, column of the slot's table row, block id), in order.
    block_copies_C2: int32 rows (source block, destination block): copy-on-write, before any write of this step.
    prefill: chunks.
    decode_slots_S / decode_positions_S: int32; each feeds the slot's last token (which the runner knows: sampled by the
        former step, or still being sampled by it) at that position.
    A token is sampled for every slot of ``sampled_slots``, in that order.
    """

    step: int
    new_requests: tuple[NewRequest, ...] = ()
    block_updates_U3: np.ndarray = field(default_factory=lambda: _no_rows(3))
    block_copies_C2: np.ndarray = field(default_factory=lambda: _no_rows(2))
    prefill: tuple[Chunk, ...] = ()
    decode_slots_S: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    decode_positions_S: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.decode_slots_S) + sum(chunk.num_tokens for chunk in self.prefill)

    @property
    def sampled_slots(self) -> np.ndarray:
        """int32: decode slots first, then the slots of last chunks, each followed by its forks."""
        ends = [slot for chunk in self.prefill if chunk.is_last for slot in (chunk.slot, *chunk.forks)]
        return np.concatenate([self.decode_slots_S, np.asarray(ends, np.int32)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotLogprobs:
    """Natural-logarithm probabilities for one sampled row, or position of a prompt, that asked for them."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step gave, aligned with ``plan.sampled_slots``.

    tokens_S: int32. is_finite_S: bool; False where the logits had NaN or no finite entry: that token means nothing.
    logprobs: by index into tokens_S, for rows whose sampling asks for them.
    embeddings: by index into tokens_S, for rows that joined with a pooling; float32 [hidden size]. Their tokens mean
        nothing.
    is_exhausted_S: bool; True where the row's masks forbid every token: its output ends without one. None: nowhere.
    prompt_logprobs: by index into plan.prefill, of the prompt's tokens from position start + 1 on, for rows whose
        sampling asks for them.
    """

    step: int
    tokens_S: np.ndarray
    is_finite_S: np.ndarray
    logprobs: dict[int, SlotLogprobs] = field(default_factory=dict)
    embeddings: dict[int, np.ndarray] = field(default_factory=dict)
    is_exhausted_S: np.ndarray | None = None
    prompt_logprobs: dict[int, list[SlotLogprobs]] = field(default_factory=dict)
