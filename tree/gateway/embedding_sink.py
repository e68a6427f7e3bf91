"""One input of an Embed on its way: sent to a worker, its vector awaited.

Must not know requests, nor how answers travel.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gateway.errors import RequestError, from_reason
from gateway.stream import error_of
from wire.messages import Finished, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedded:
    """One vector, float32. worker_id: who computed it, after num_moves from worker to worker. sent_s, ended_s:
    monotonic."""

    vector_D: np.ndarray
    num_prompt_tokens: int
    worker_id: str
    num_moves: int
    figures: Finished
    sent_s: float
    ended_s: float


class VectorSink:
    """An EmbeddingSink. worker_id: who has the input. outcome: the vector, the figures, and when they came."""

    def __init__(self, worker_id: str, *, on_started: Callable[[], None]) -> None:
        self.worker_id = worker_id
        self.num_moves = 0
        self.on_started = on_started
        self.outcome: asyncio.Future[tuple[np.ndarray, Finished, float]] = asyncio.get_running_loop().create_future()
        self._vector_D: np.ndarray | None = None

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Never: the pool sees to that."""

    def on_embedding(self, embedding_D: np.ndarray) -> None:
        """Before the end."""
        self._vector_D = embedding_D

    def on_finished(self, finished: Finished) -> None:
        """A vector, or why there is none."""
        error = error_of(finished)
        if error is not None or self._vector_D is None:
            self._fail(error or from_reason("INTERNAL", ""))
        elif not self.outcome.done():
            self.outcome.set_result((self._vector_D, finished, time.monotonic()))

    def on_lost(self, reason: str, detail: str) -> None:
        """The worker is gone."""
        self._fail(from_reason(reason, detail))

    def on_moved(self, worker_id: str) -> None:
        """Another worker computes it, or the next life of its own."""
        self.worker_id = worker_id
        self.num_moves += 1

    def _fail(self, error: RequestError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentInput:
    """An input that a worker has. sent_s: monotonic."""

    handle: int
    sent_s: float
    num_prompt_tokens: int
    sink: VectorSink

    @property
    def is_running(self) -> bool:
        """Neither vector nor error has come."""
        return not self.sink.outcome.done()

    async def result(self) -> Embedded:
        """Raises the RequestError that ended it."""
        vector_D, figures, ended_s = await asyncio.shield(self.sink.outcome)
        return Embedded(
            vector_D=vector_D,
            num_prompt_tokens=self.num_prompt_tokens,
            worker_id=self.sink.worker_id,
            num_moves=self.sink.num_moves,
            figures=figures,
            sent_s=self.sent_s,
            ended_s=ended_s,
        )
