"""A small block manager, made to measure."""

from collections.abc import Callable

import pytest

from octavo.blockmgr import BlockManager, BlockManagerConfig, PrefixCache
from octavo.blockmgr.prefix_index import HashBlock, hash_block

MakeManager = Callable[..., BlockManager]


@pytest.fixture
def make_manager() -> MakeManager:
    """Blocks of 4 tokens, 8 of them, 4 slots of 6 blocks, unless told otherwise."""

    def make(*, hash_function: HashBlock = hash_block, **changes: object) -> BlockManager:
        settings = {
            "num_blocks": 8,
            "block_size": 4,
            "max_slots": 4,
            "max_blocks_per_slot": 6,
            "fingerprint": b"model",
            "prefix_cache": PrefixCache.ON,
            "secret": b"secret",
        } | changes
        return BlockManager(BlockManagerConfig(**settings), hash_block=hash_function)  # type: ignore[arg-type]

    return make
