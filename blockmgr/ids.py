"""Names of the things that the block manager counts."""

from enum import Enum
from typing import NewType

BlockId = NewType("BlockId", int)
"""A block of the device's pool, 0 to num_blocks - 1, or behind those one of the host's. There is no null block: every
id is usable."""

SlotId = NewType("SlotId", int)
"""A row of the block table, 0 to max_slots - 1: one per request that holds blocks."""


class Tier(Enum):
    """Where a block is."""

    DEVICE = "device"
    HOST = "host"


class PrefixLookup(Enum):
    """Whether a prompt may begin with blocks that are cached."""

    LONGEST = "longest"
    NONE = "none"  # all of it is computed


class PrefixCache(Enum):
    """Whether full blocks are kept for later requests with the same beginning."""

    ON = "on"
    OFF = "off"
