"""Settings of a block manager."""

from dataclasses import dataclass

from octavo.blockmgr.ids import PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockManagerConfig:
    """Raises ValueError that names an invalid field.

    num_blocks: usable blocks of the device, ids 0 to num_blocks - 1.
    num_host_blocks: blocks of the second tier, in host memory; 0: no second tier.
    max_copies_in: most blocks that one plan brings back from the host.
    block_size: tokens per block.
    max_slots: requests that can hold blocks at once (rows of the table).
    max_blocks_per_slot: width of a row: the longest request has max_blocks_per_slot * block_size tokens.
    fingerprint: of the model and everything else that affects a token's keys and values.
    secret: key of the hash chain's root; empty: a random one, so that hashes cannot be predicted.
    max_events: changes kept for `take_events`; if there are more, one snapshot replaces them.
    """

    num_blocks: int
    block_size: int
    max_slots: int
    max_blocks_per_slot: int
    fingerprint: bytes
    prefix_cache: PrefixCache
    secret: bytes = b""
    max_events: int = 65_536
    num_host_blocks: int = 0
    max_copies_in: int = 64

    def __post_init__(self) -> None:
        names = ("num_blocks", "block_size", "max_slots", "max_blocks_per_slot", "max_events", "max_copies_in")
        for name in names:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must not be negative, got {self.num_host_blocks}")
        if len(self.secret) > 64:
            raise ValueError(f"secret must be at most 64 bytes, got {len(self.secret)}")
