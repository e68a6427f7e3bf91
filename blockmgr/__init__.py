"""Tracks who owns which KV block: pool, prefix index, block tables, events, audit. Pure Python and numpy."""

from octavo.blockmgr.audit import BlockAudit
from octavo.blockmgr.changes import BlockEvent, EventKind
from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.errors import OutOfBlocks, OutOfSlots
from octavo.blockmgr.ids import BlockId, PrefixCache, SlotId
from octavo.blockmgr.manager import Admission, BlockManager

__all__ = [
    "Admission",
    "BlockAudit",
    "BlockEvent",
    "BlockId",
    "BlockManager",
    "BlockManagerConfig",
    "EventKind",
    "OutOfBlocks",
    "OutOfSlots",
    "PrefixCache",
    "SlotId",
]
