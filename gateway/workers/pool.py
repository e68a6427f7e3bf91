"""The facade that the servicers use: choose a worker, open an output, cancel it.

Owns the sockets, the registry and the live streams; must not know gRPC or text.
"""

from collections.abc import Callable
from pathlib import Path  # noqa: F401  (keeps the signature commit importable)

import numpy as np

from gateway.workers.config import WorkerPoolConfig
from gateway.workers.stats import PoolStats
from gateway.workers.views import OutputSink, RunRequest, WorkerView
from wire.messages import AdminReply, ModelCard

OnModel = Callable[[ModelCard, dict[str, bytes]], None]


class WorkerPool:
    """One per gateway process; every method on its event loop."""

    stats: PoolStats
    gateway_id: str  # new at each start

    def __init__(self, config: WorkerPoolConfig, *, on_model: OnModel | None = None) -> None:
        """on_model(card, tokenizer files by name): a model became ready (again); called on the loop."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back (on the loop) whenever the set of ready models or workers changed."""

    async def start(self) -> None:
        """Bind. Raises wire.run_dir.RunDirError, wire.endpoints.EndpointError, wire.keys.KeyFileError, OSError."""

    async def close(self) -> None:
        """End every open output (on_lost DRAINING) and close the sockets. Idempotent."""

    def cards(self) -> dict[str, ModelCard]:
        """Models with at least one ready worker, by name."""
        raise NotImplementedError

    def workers(self) -> tuple[WorkerView, ...]:
        """Every registered worker."""
        raise NotImplementedError

    def choose(self, model: str, prompt_ids: np.ndarray, salt: str) -> WorkerView:
        """Longest cached prefix, then least load. Raises NoWorker."""
        raise NotImplementedError

    def open(self, worker: WorkerView, request: RunRequest, sink: OutputSink) -> int:
        """Send the request; its handle. Raises WorkerBusy, WorkerGone (nothing was sent, sink is not used)."""
        raise NotImplementedError

    def cancel(self, handle: int) -> None:
        """Ask the worker to end an output: no more tokens; on_finished(CANCELLED) or on_lost follows. Unknown and
        ended handles are ignored."""

    def drain(self, worker_id: str, *, grace_s: float) -> None:
        """Ask a worker to finish and leave. Raises WorkerGone."""

    async def query(
        self, *, audit: bool, flush: bool, timeout_s: float, model: str | None = None
    ) -> list[tuple[str, AdminReply]]:
        """Ask every worker (of a model) for its blocks; those that answer in time."""
        raise NotImplementedError
