"""Ids and enums of the block manager."""

from enum import Enum
from typing import NewType

BlockId = NewType("BlockId", int)
"""A block of the device's pool, 0 to num_blocks - 1, or one of the host's, whose ids follow. There is no null block:
every id is usable."""

SlotId = NewType("SlotId", int)
"""A row of the block table, 0 to max_slots - 1: one per request that holds blocks."""


class Tier(Enum):
    """The memory that a block is in."""

    DEVICE = "device"
    HOST = "host"


class PrefixLookup(Enum):
    """Whether a prompt may use cached blocks."""

    LONGEST = "longest"  # the longest cached prefix
    NONE = "none"  # the whole prompt is computed


class PrefixCache(Enum):
    """Whether full blocks are kept for later requests with the same prefix."""

    ON = "on"
    OFF = "off"
