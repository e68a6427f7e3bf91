"""Who owns which KV block: pool, prefix index, block tables, events, audit. Pure Python and numpy."""

from blockmgr.audit import BlockAudit
from blockmgr.config import BlockManagerConfig
from blockmgr.errors import OutOfBlocks, OutOfSlots
from blockmgr.events import BlockEvent, EventKind
from blockmgr.ids import BlockId, PrefixCache, SlotId
from blockmgr.manager import Admission, BlockManager

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
