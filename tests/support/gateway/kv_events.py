"""Events of a worker's prefix cache with blocks of two tokens."""

from collections.abc import Sequence

import numpy as np

from octavo.wire.messages import KvEvent, KvEventKind

BLOCK = 2


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def stored(block_hash: bytes, parent: bytes, tokens: Sequence[int], salt: str = "") -> KvEvent:
    return KvEvent(
        kind=KvEventKind.STORED,
        block_hash=block_hash,
        parent_hash=parent,
        token_ids=ids(*tokens).tobytes(),
        salt=salt,
    )


def removed(block_hash: bytes) -> KvEvent:
    return KvEvent(kind=KvEventKind.REMOVED, block_hash=block_hash)
