"""Embeddings out of a step's hidden states: sums over the chunks of each prompt, kept until its last one.

A row that joins again (after a preemption) starts anew. Must not know: the model, the scheduler, the cache.

Legend: T tokens in this step · D model dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from wire.messages import Pooling
from worker.plan import Chunk, Join, StepPlan

HiddenOf = Callable[[slice], torch.Tensor]
"""Hidden states after the final norm of these tokens of the step, [tokens, D] in any dtype."""


@dataclass(slots=True, eq=False)
class _Row:
    pooling: Pooling
    sum_D: torch.Tensor | None = None  # float32
    num_tokens: int = 0


class Pooler:
    """What the rows with a pooling have gathered. Costs nothing where there are none."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    @property
    def is_used(self) -> bool:
        """Whether there are rows with a pooling, which may read more of a step than its sampled rows."""
        return bool(self._rows)

    def join(self, join: Join) -> None:
        """A request enters a slot; whatever the slot had gathered is forgotten."""
        if join.pooling is not None:
            self._rows[join.slot] = _Row(join.pooling)
        elif self._rows:
            self._rows.pop(join.slot, None)

    def take(self, plan: StepPlan, hidden_of: HiddenOf, *, first_token: int) -> dict[int, torch.Tensor]:
        """The embeddings (float32 [D], on the model's device) that this step completes, by index into its sampled
        rows. first_token: of the chunks, in the step as it was run."""
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
