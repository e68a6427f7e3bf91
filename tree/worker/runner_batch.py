"""From a plan to the arrays of one forward pass, without a loop over requests.

Decodes come first, then the chunks, as in ``plan.sampled_slots``. A decode is a sequence with one new token.

Legend: T tokens in this step · A sequences in this step · S those that a token is sampled for · M table width.
Must not know: the model, the sampler.
"""

from dataclasses import dataclass

import numpy as np
import torch

from model.attention import AttentionInputs
from worker.plan import StepPlan
from worker.runner_rows import RunnerRows


class MissingBlock(RuntimeError):
    """A plan writes where the slot has no block. Nothing was computed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step's inputs on the device, and which rows of its output are sampled.

    ids_T, positions_T: int64. last_S: int64, rows of the hidden states to sample after; None for all of them, in order.
    slots_S: int32. lengths_S: int64, tokens of each sampled sequence, its newest one included.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    inputs: AttentionInputs
    last_S: torch.Tensor | None
    slots_S: np.ndarray
    lengths_S: np.ndarray


def build_batch(plan: StepPlan, rows: RunnerRows, *, block_size: int, device: torch.device) -> Batch:
    """The plan's tokens, looked up in the rows. Raises MissingBlock."""
    slots_A, starts_A, lens_A, source_S = _sequences(plan)
    cu_A1 = np.zeros(len(slots_A) + 1, np.int64)
    np.cumsum(lens_A, out=cu_A1[1:])
    slot_T = np.repeat(slots_A, lens_A)
    positions_T = np.arange(cu_A1[-1]) + np.repeat(starts_A - cu_A1[:-1], lens_A)
    contexts_A = starts_A + lens_A

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    inputs = AttentionInputs(
        slot_mapping_T=put(_slot_mapping(slot_T, positions_T, rows, block_size)),
        table_SM=put(rows.table_RM[slots_A, : -(-int(contexts_A.max()) // block_size)]),
        cu_query_lens_S1=put(cu_A1.astype(np.int32)),
        context_lens_S=put(contexts_A.astype(np.int32)),
        max_query_len=int(lens_A.max()),
        max_context_len=int(contexts_A.max()),
    )
    return Batch(
        ids_T=put(rows.history.tokens_RT[slot_T, positions_T].astype(np.int64)),
        positions_T=put(positions_T),
        inputs=inputs,
        last_S=None if not plan.prefill else put(cu_A1[1:][source_S] - 1),
        slots_S=plan.sampled_slots,
        lengths_S=contexts_A[source_S],
    )


def _sequences(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slot (int32), first position and number of new tokens (int64) of each sequence; and the sequence (int64) after
    which each sampled slot's token comes: forks have none of their own yet."""
    num_decodes = len(plan.decode_slots_S)
    chunks = np.asarray([(c.slot, c.start, c.num_tokens) for c in plan.prefill], np.int64).reshape(-1, 3)
    num_tokens = [(1 + len(c.forks)) * c.is_last for c in plan.prefill]
    return (
        np.concatenate([plan.decode_slots_S, chunks[:, 0].astype(np.int32)]),
        np.concatenate([plan.decode_positions_S.astype(np.int64), chunks[:, 1]]),
        np.concatenate([np.ones(num_decodes, np.int64), chunks[:, 2]]),
        np.concatenate([np.arange(num_decodes), num_decodes + np.repeat(np.arange(len(chunks)), num_tokens)]),
    )


def _slot_mapping(slot_T: np.ndarray, positions_T: np.ndarray, rows: RunnerRows, block_size: int) -> np.ndarray:
    """int64: where each token's key and value go. A slot without a block there is a mistake of the plan, which must
    not become a hole in the cache."""
    blocks_T = rows.table_RM[slot_T, positions_T // block_size].astype(np.int64)
    if blocks_T.min() < 0:
        bad = int(np.flatnonzero(blocks_T < 0)[0])
        raise MissingBlock(f"slot {slot_T[bad]} has no block for position {positions_T[bad]}")
    return blocks_T * block_size + positions_T % block_size
