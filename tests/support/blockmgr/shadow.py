"""What every block of the KV cache really holds, in tests: per position the whole prefix that its keys and values
were computed from. A leak, a double use, a stale hit or a wrong copy shows as a wrong prefix."""

import numpy as np

Content = tuple[str, tuple[int, ...]]
"""Salt and all tokens up to and with this position."""

GARBAGE: Content = ("garbage", ())


class KvShadow:
    """[num_blocks][block_size] contents, changed only by plans, in their order."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[Content]] = [[GARBAGE] * block_size for _ in range(num_blocks)]

    def __deepcopy__(self, memo: dict[int, object]) -> "KvShadow":
        """Contents are immutable: only the lists are copied."""
        clone = KvShadow(0, self.block_size)
        clone.blocks = [list(block) for block in self.blocks]
        return clone

    def spoil(self, blocks: list[int]) -> None:
        """The contents of these blocks must not be used any more."""
        for block in blocks:
            self.blocks[block] = [GARBAGE] * self.block_size

    def copy(self, copies_C2: np.ndarray) -> None:
        """Do the copies one by one, and check that doing them all at once gives the same result."""
        at_once = {dst: list(self.blocks[src]) for src, dst in copies_C2.tolist()}
        for src, dst in copies_C2.tolist():
            self.blocks[dst] = list(self.blocks[src])
        assert at_once == {dst: self.blocks[dst] for _, dst in copies_C2.tolist()}

    def write(self, row: list[int], salt: str, tokens: list[int], start: int, stop: int) -> None:
        """Compute positions [start, stop) of a sequence; correct only if all before them are."""
        for position in range(start, stop):
            self.blocks[row[position // self.block_size]][position % self.block_size] = (
                salt,
                tuple(tokens[: position + 1]),
            )

    def read(self, row: list[int], stop: int) -> list[Content]:
        """Contents of positions [0, stop) through a row."""
        return [self.blocks[row[p // self.block_size]][p % self.block_size] for p in range(stop)]


def expected(salt: str, tokens: list[int], stop: int) -> list[Content]:
    """What `read` must give for a sequence."""
    return [(salt, tuple(tokens[: p + 1])) for p in range(stop)]
