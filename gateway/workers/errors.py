"""Why the pool could not take a request. Mapped to gRPC statuses elsewhere; knows nothing of gRPC."""


class PoolError(Exception):
    """Base of the errors that the pool raises to its callers."""


class NoWorker(PoolError):
    """No ready worker serves the model (reason NO_WORKER)."""

    def __init__(self, model: str, detail: str = "") -> None:
        whose = f"no worker that serves model {model!r} is ready" if model else "no worker is ready yet"
        super().__init__(detail or whose)
        self.model = model


class WorkerBusy(PoolError):
    """The worker's queue, or the socket's queue towards it, is full (reason QUEUE_FULL); nothing was sent."""

    def __init__(self, worker_id: str, detail: str) -> None:
        super().__init__(f"worker {worker_id} is full: {detail}")
        self.worker_id = worker_id


class WorkerGone(PoolError):
    """The worker left between the choice and the send (reason WORKER_LOST); nothing was sent: choose again."""

    def __init__(self, worker_id: str, detail: str = "no longer connected") -> None:
        super().__init__(f"worker {worker_id} is gone: {detail}")
        self.worker_id = worker_id


class FeedFull(PoolError):
    """Too many subscribers follow the prefix cache (reason QUEUE_FULL)."""


class FeedCut(PoolError):
    """A subscriber of the prefix cache is too slow (reason SLOW_CONSUMER)."""


class FeedEnded(PoolError):
    """The gateway is shutting down; subscriptions to the prefix cache end (reason DRAINING)."""
