"""Step plans written by hand, for a runner without a scheduler. Blocks are handed out in the given order."""

from collections.abc import Sequence

import numpy as np

from octavo.wire.messages import SamplingParams
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepPlan


class PlanWriter:
    """Numbers the steps, and gives a slot a block of its own wherever a plan writes."""

    def __init__(self, blocks: Sequence[int], *, block_size: int) -> None:
        self.free = list(blocks)
        self.tables: dict[int, list[int]] = {}
        self.num_steps = 0
        self._block_size = block_size
        self._new_requests: list[NewRequest] = []
        self.updates: list[tuple[int, int, int]] = []

    def join(self, slot: int, tokens: list[int], sampling: SamplingParams, *, num_prompt: int | None = None) -> None:
        """Let a request enter the slot with the next plan. num_prompt: how many of the tokens are its prompt; None:
        all. Blocks of the slot's former request are not freed."""
        self.tables[slot] = []
        num_prompt_tokens = len(tokens) if num_prompt is None else num_prompt
        self._new_requests.append(
            NewRequest(
                slot=Slot(slot),
                request_id="r",
                token_ids_T=np.asarray(tokens, np.int32),
                num_prompt_tokens=num_prompt_tokens,
                sampling=sampling,
            )
        )

    def plan(self, *, decode: dict[int, int] | None = None, prefill: Sequence[Chunk] = (), **more: object) -> StepPlan:
        """The next step. decode: slot -> position. more: other fields of the plan."""
        decode = decode or {}
        for slot, position in [*decode.items(), *((each.slot, each.start + each.num_tokens - 1) for each in prefill)]:
            while len(self.tables[slot]) * self._block_size <= position:
                self.updates.append((slot, len(self.tables[slot]), self.free[0]))
                self.tables[slot].append(self.free.pop(0))
        self.num_steps += 1
        plan = StepPlan(
            step=self.num_steps,
            new_requests=tuple(self._new_requests),
            block_updates_U3=np.asarray(self.updates, np.int32).reshape(-1, 3),
            prefill=tuple(prefill),
            decode_slots_S=np.asarray(list(decode), np.int32),
            decode_positions_S=np.asarray(list(decode.values()), np.int32),
            **more,  # type: ignore[arg-type]
        )
        self._new_requests, self.updates = [], []
        return plan


def chunk(slot: int, start: int, num_tokens: int, *, last: bool = True) -> Chunk:
    """A chunk of the slot's prompt."""
    return Chunk(slot=Slot(slot), start=start, num_tokens=num_tokens, is_last=last)
