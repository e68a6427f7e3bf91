"""What a slot knows of its own prefix."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Chain:
    """The committed full blocks of one slot, head first: digest and index entry of each.

    The entry names the block in the index with this content, which is the slot's own block or another request's twin.
    root: digest that the first block's digest continues. is_tainted: nothing of this slot may enter the index.
    """

    salt: str
    root: bytes
    digests: list[bytes] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    is_tainted: bool = False

    def __len__(self) -> int:
        return len(self.digests)

    def append(self, digest: bytes, entry: int) -> None:
        """One more committed block."""
        self.digests.append(digest)
        self.entries.append(entry)

    def truncate(self, num_blocks: int) -> None:
        """Forget all but the first blocks."""
        del self.digests[num_blocks:], self.entries[num_blocks:]

    def fork(self, num_blocks: int) -> "Chain":
        """The chain of a child that shares the first blocks."""
        return Chain(
            salt=self.salt,
            root=self.root,
            digests=self.digests[:num_blocks],
            entries=self.entries[:num_blocks],
            is_tainted=self.is_tainted,
        )
