"""The gateway's side of the wire: which workers there are, which one gets a request, and where its output goes."""

from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.gateway.workers.errors import NoWorker, PoolError, WorkerBusy, WorkerGone
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import LostReason, OutputSink, WorkerState, WorkerView

__all__ = [
    "LostReason",
    "NoWorker",
    "OutputSink",
    "PoolError",
    "WorkerBusy",
    "WorkerGone",
    "WorkerPool",
    "WorkerPoolConfig",
    "WorkerState",
    "WorkerView",
]
