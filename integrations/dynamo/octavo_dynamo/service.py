"""The Octavo service behind the backend: its limits, cache and load, over gRPC. Imports no Dynamo."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc

from octavo.client.errors import NotFound, OctavoError, Unauthorized, Unavailable, error_from
from octavo.client.options import call_metadata, open_aio_channel
from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc, load_pb2, load_pb2_grpc, model_pb2, model_pb2_grpc

CALL_TIMEOUT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0

logger = logging.getLogger("octavo_dynamo")


class StartError(Exception):
    """The service cannot be used; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of all the model's workers together. context_length, block_size and max_batched_tokens are in tokens;
    max_batched_tokens is None if unknown. ends: tokens that end the model's outputs."""

    model: str
    context_length: int
    block_size: int
    total_blocks: int
    max_num_seqs: int
    max_batched_tokens: int | None
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Blocks that requests hold, and all blocks."""

    used_blocks: int
    total_blocks: int


class OctavoService:
    """One connection, re-established when it is lost. Create it inside the event loop that uses it."""

    def __init__(
        self, target: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str | None = None
    ) -> None:
        self.target = target
        self._metadata = call_metadata(api_key)
        self._channel = open_aio_channel(target, credentials)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._load = load_pb2_grpc.LoadServiceStub(self._channel)
        self._control = openengine_pb2_grpc.ControlStub(self._channel)

    def generate(
        self, request: pb.GenerateRequest
    ) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
        """The call of a request; its `cancel()` ends the request."""
        call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] = self._inference.Generate(
            request, metadata=self._metadata
        )
        return call

    async def limits(self, model: str, *, timeout_s: float) -> Limits:
        """The limits of a model ("": the only one), as soon as a worker serves it. Raises StartError."""
        deadline_s, wait_s = time.monotonic() + timeout_s, FIRST_WAIT_S
        while True:
            try:
                return await self._limits(model)
            except (Unavailable, NotFound) as error:
                if time.monotonic() + wait_s > deadline_s:
                    message = f"no Octavo service with {model or 'one model'} at {self.target} within {timeout_s:g} s"
                    raise StartError(f"{message}: {error}") from None
                logger.warning("waiting for the Octavo service at %s: %s", self.target, error)
            except Unauthorized as error:
                message = "its key needs the scopes generate, models and admin"
                raise StartError(f"the Octavo service at {self.target} refuses: {message} ({error})") from None
            except OctavoError as error:
                raise StartError(f"the Octavo service at {self.target} refuses: {error}") from None
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _limits(self, model: str) -> Limits:
        try:
            info = (await self._models.GetModel(model_pb2.GetModelRequest(model=model), **self._options())).model
            snapshot = await self._first_snapshot()
            capacity = await self._max_batched_tokens()
        except grpc.RpcError as error:
            raise error_from(error) from None
        workers = _workers(snapshot, info.name)
        if not workers:
            raise Unavailable(f"no worker of {info.name} is ready", code=grpc.StatusCode.UNAVAILABLE)
        sizes = sorted({each.block_size for each in workers})
        if len(sizes) > 1:
            raise StartError(
                f"workers of {info.name} at {self.target} have blocks of {sizes} tokens: one size is needed"
            )
        return Limits(
            model=info.name,
            context_length=info.max_model_len,
            block_size=sizes[0],
            total_blocks=sum(each.blocks.num_blocks for each in workers),
            max_num_seqs=sum(each.max_num_seqs for each in workers),
            max_batched_tokens=capacity,
            ends=tuple(info.eos_token_ids),
        )

    async def _first_snapshot(self) -> load_pb2.WatchLoadResponse:
        call = self._load.WatchLoad(load_pb2.WatchLoadRequest(), **self._options())
        try:
            async for snapshot in call:
                first: load_pb2.WatchLoadResponse = snapshot
                return first
        finally:
            call.cancel()
        raise Unavailable("the service told no load", code=grpc.StatusCode.UNAVAILABLE)

    async def _max_batched_tokens(self) -> int | None:
        """None if the service does not say, or does not serve openengine.v1."""
        try:
            info = await self._control.GetServerInfo(oe.GetServerInfoRequest(), **self._options())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise
        return info.capacity.max_batched_tokens if info.capacity.HasField("max_batched_tokens") else None

    async def follow_cache(self, model: str, take: Callable[[oe.KvEventBatch | None], None]) -> None:
        """Pass on which blocks of the model are cached, until cancelled; None each time that this becomes unknown."""
        metadata = (*(self._metadata or ()), ("x-model", model))

        async def follow() -> AsyncIterator[None]:
            call = self._control.SubscribeKvEvents(
                oe.SubscribeKvEventsRequest(include_snapshot=True), metadata=metadata
            )
            try:
                async for response in call:
                    if response.HasField("error"):
                        raise Unavailable(response.error.message, code=grpc.StatusCode.UNAVAILABLE)
                    take(response.batch)
                    yield
            finally:
                call.cancel()

        await self._again_and_again("KV events", follow, lost=lambda: take(None))

    async def follow_load(self, model: str, interval_s: float, take: Callable[[Load | None], None]) -> None:
        """Pass on the load of the model's workers, until cancelled; None each time that the service takes no requests
        for it."""
        request = load_pb2.WatchLoadRequest(interval_s=interval_s)

        async def follow() -> AsyncIterator[None]:
            call = self._load.WatchLoad(request, metadata=self._metadata)
            try:
                async for snapshot in call:
                    take(_load(snapshot, model))
                    yield
            finally:
                call.cancel()

        await self._again_and_again("load", follow, lost=lambda: take(None))

    async def _again_and_again(
        self, what: str, follow: Callable[[], AsyncIterator[None]], *, lost: Callable[[], None]
    ) -> None:
        """Repeat `follow`, with pauses that grow while nothing comes. Returns if the service will never answer."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                async for _ in follow():
                    wait_s = FIRST_WAIT_S
                reason = "the stream ended"
            except grpc.aio.AioRpcError as error:
                failure = error_from(error)
                if isinstance(failure, Unauthorized | NotFound) and failure.reason != "MODEL_NOT_FOUND":
                    lost()
                    logger.error("the Octavo service at %s tells no %s: %s", self.target, what, failure)
                    return
                reason = str(failure)
            except OctavoError as error:
                reason = str(error)
            lost()
            logger.warning("%s of the Octavo service at %s: %s; again in %g s", what, self.target, reason, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _options(self) -> dict[str, object]:
        return {"timeout": CALL_TIMEOUT_S, "metadata": self._metadata}

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._channel.close()


def _workers(snapshot: load_pb2.WatchLoadResponse, model: str) -> Sequence[load_pb2.WorkerSnapshot]:
    """The model's workers that take requests."""
    ready = load_pb2.WORKER_CONDITION_READY
    return [each for each in snapshot.workers if each.model == model and each.condition == ready]


def _load(snapshot: load_pb2.WatchLoadResponse, model: str) -> Load | None:
    workers = _workers(snapshot, model)
    if snapshot.is_draining or not workers:
        return None
    return Load(
        used_blocks=sum(each.blocks.num_active for each in workers),
        total_blocks=sum(each.blocks.num_blocks for each in workers),
    )
