"""The KV store of the oracle: token ids and their positions in blocks, read and written through block tables.

What a request reads back is one number, the sum of a hash over all of it: a leaked, doubly used or stale block, or a
table that missed an update, changes it. Knows no requests, no plans and no block manager: only arrays.

Shapes: P blocks · B block size · M table width · S slots · T tokens · U updates · C copies
"""

import numpy as np

from worker.oracle_model import MASK_64, POSITION_FACTOR, TOKEN_FACTOR

EMPTY = -1  # never written, or poisoned after it was freed
NOT_A_NUMBER = -2  # written by a row whose activations were NaN: whoever reads it is NaN too
_TOKEN_FACTOR, _POSITION_FACTOR = np.uint64(TOKEN_FACTOR), np.uint64(POSITION_FACTOR)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_THIRTY, _TWENTY_SEVEN, _THIRTY_ONE = np.uint64(30), np.uint64(27), np.uint64(31)


class OracleViolation(AssertionError):
    """A plan asked for what no correct scheduler asks for."""


class OracleStore:
    """tokens_PB, positions_PB: int32."""

    def __init__(self, *, num_blocks: int, block_size: int, max_slots: int, max_blocks_per_slot: int) -> None:
        self.tokens_PB = np.full((num_blocks, block_size), EMPTY, np.int32)
        self.positions_PB = np.full((num_blocks, block_size), EMPTY, np.int32)
        self._block_size = block_size
        self._table_SM = np.full((max_slots, max_blocks_per_slot), -1, np.int32)

    def empty_table(self, slot: int) -> None:
        """Somebody else has the slot: it leads to no block."""
        self._table_SM[slot] = -1

    def update(self, block_updates_U3: np.ndarray, block_copies_C2: np.ndarray) -> None:
        """Tables first, then the blocks that are copied. As `worker.plan.StepPlan` has them."""
        for slot, column, block in block_updates_U3.tolist():
            self._table_SM[slot, column] = block
        for source, target in block_copies_C2.tolist():
            self.tokens_PB[target] = self.tokens_PB[source]
            self.positions_PB[target] = self.positions_PB[source]

    def poison(self, block_ids: np.ndarray) -> None:
        """Forget what these blocks hold."""
        self.tokens_PB[block_ids] = EMPTY

    def write_token(self, slot: int, position: int, token: int) -> None:
        """`write` for one token, where simulations spend their time. Raises OracleViolation."""
        block, offset = int(self._table_SM[slot, position // self._block_size]), position % self._block_size
        if block < 0:
            raise OracleViolation(f"slot {slot} writes {[position]} without a block")
        self.tokens_PB[block, offset] = token
        self.positions_PB[block, offset] = position

    def write(self, slot: int, start: int, tokens_T: np.ndarray) -> None:
        """From position `start` on. Raises OracleViolation where the table leads to no block."""
        positions_T = np.arange(start, start + len(tokens_T))
        blocks_T = self._table_SM[slot, positions_T // self._block_size]
        if blocks_T.min() < 0:
            raise OracleViolation(f"slot {slot} writes {positions_T.tolist()} without a block")
        offsets_T = positions_T % self._block_size
        self.tokens_PB[blocks_T, offsets_T] = tokens_T
        self.positions_PB[blocks_T, offsets_T] = positions_T

    def read(self, slot: int, num_tokens: int) -> int | None:
        """The state after so many tokens: the sum over everything that the table leads to; None where a NaN is among
        it. Raises OracleViolation."""
        blocks = self._table_SM[slot, : -(-num_tokens // self._block_size)]
        if blocks.min() < 0:
            raise OracleViolation(f"slot {slot} reads {num_tokens} tokens through {blocks.tolist()}")
        tokens_T = self.tokens_PB[blocks].reshape(-1)[:num_tokens]
        positions_T = self.positions_PB[blocks].reshape(-1)[:num_tokens]
        if tokens_T.min() == NOT_A_NUMBER:  # nothing is below it
            return None
        return int(mix_tokens(tokens_T, positions_T).sum(dtype=np.uint64)) & MASK_64


def mix_tokens(tokens_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
    """`worker.oracle_model.mix_token` on arrays: uint64 wraps around by itself."""
    values = tokens_T.astype(np.int64).view(np.uint64) * _TOKEN_FACTOR
    values += positions_T.astype(np.int64).view(np.uint64) * _POSITION_FACTOR
    values ^= values >> _THIRTY
    values *= _FIRST_FACTOR
    values ^= values >> _TWENTY_SEVEN
    values *= _SECOND_FACTOR
    values ^= values >> _THIRTY_ONE
    return values
