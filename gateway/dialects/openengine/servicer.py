"""openengine.v1: Inference and Control, one class each. As the contract requires, an error is a status before a request
is accepted and one EngineError afterwards. A request is accepted once a worker has it."""

import asyncio
import contextlib
import time

import structlog

from octavo.gateway.auth.authenticator import Scope
from octavo.gateway.dialects.openengine import RELEASE, REVISION, info
from octavo.gateway.dialects.openengine.messages import Events, engine_error, kv_batch, worst
from octavo.gateway.dialects.openengine.translate import (
    check_abort,
    check_known,
    check_ranks,
    in_callers_names,
    read_metadata,
    translate,
)
from octavo.gateway.dialects.unserved import tell_silent
from octavo.gateway.errors import (
    DeadlinePassed,
    InvalidRequest,
    NamesFields,
    NotEnabled,
    PermissionDenied,
    RequestAborted,
    RequestError,
    RequestNotFound,
    SlowConsumer,
    row_of,
)
from octavo.gateway.peers.control import Control
from octavo.gateway.requests.input_processor import share_of
from octavo.gateway.requests.submit import Collaborators, Submitter
from octavo.gateway.requests.tracker import TrackedRequest
from octavo.gateway.rpc.connections import Context
from octavo.gateway.rpc.interceptor import current_rpc
from octavo.gateway.rpc.status import is_expected
from octavo.gateway.streams.stream import OutputStreams
from octavo.gateway.workers.errors import FeedCut, FeedEnded
from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import ModelCard

log = structlog.get_logger("gateway.request")
PROBE_TIMEOUT_S = 10.0
MAX_ENDED = 4096  # how many ended requests are remembered


class EndedRequests:
    """Keys of the requests that this gateway answered last, so that Abort can tell a request that has ended from one
    that never existed. Bounded: the oldest is forgotten first."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def add(self, key: str) -> None:
        """Remember a request that has ended."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > MAX_ENDED:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, key: str) -> bool:
        return key in self._keys


class OpenEngineInference(openengine_pb2_grpc.InferenceServicer):
    """Generate. Methods raise errors, which the interceptor turns into a status."""

    def __init__(self, collaborators: Collaborators, *, submitter: Submitter, ended: EndedRequests) -> None:
        self._ended = ended
        self._tracker, self._text = collaborators.tracker, collaborators.text
        self._models, self._pool = collaborators.models, collaborators.pool
        self._submitter = submitter

    async def Generate(self, request: oe.GenerateRequest, context: Context) -> None:
        """Sends PromptOutput if asked for, TokenOutputs, and a GenerationFinished per output; or one EngineError."""
        scope = current_rpc.get()
        scope.adopt_request_id(request.request_id)
        metadata = read_metadata(context.invocation_metadata() or ())
        translated = await self._text.run_by_size(
            lambda: translate(request, metadata), num_bytes=request.ByteSize(), share=share_of(scope)
        )
        card = self._models.card_of(request.model or scope.model, self._pool)
        bytes_by_id = self._models.token_texts(card)
        try:
            if not bytes_by_id:
                translated.output.format = pb.OUTPUT_FORMAT_TOKEN_IDS
                if translated.stop.strings:
                    raise InvalidRequest.of("stop.strings[0]", "needs text, and this model gives ids alone")
            tracked = await self._submitter.submit(translated, scope, prefix="", timeout_s=scope.wire_timeout_s)
        except NamesFields as error:
            raise in_callers_names(error, request) from None
        with self._tracker.closing(tracked):
            await context.send_initial_metadata(())
            events = Events(tracked, bytes_by_id, includes_stop=request.stopping.include_stop_in_output)
            try:
                await self._stream(tracked, events, context)
            except (SlowConsumer, DeadlinePassed):
                raise  # the caller can read no more events
            except RequestError as error:
                scope.reason = row_of(error).reason
                await tracked.write(context, events.error(error))
            finally:
                self._ended.add(scope.key)

    async def _stream(self, tracked: TrackedRequest, events: Events, context: Context) -> None:
        """Send the events. On Abort, every open output gets what came before the Abort, and an end."""
        open_outputs = dict.fromkeys(range(len(tracked.outputs)))
        with contextlib.suppress(RequestAborted):
            streams = OutputStreams(tracked.streams)
            while (news := await streams.next()) is not None:
                index, piece = news
                if piece is None:
                    del open_outputs[index]
                    await self._end(tracked, events, index, context)
                    continue
                now_s, messages = time.monotonic(), events.of(piece, index)
                for message in messages:
                    await tracked.write(context, message)
                tracked.scope.tokens_delivered += piece.num_tokens
                if messages:
                    tracked.count_piece(piece, now_s, index)
        for index in open_outputs:
            await self._end(tracked, events, index, context)

    async def _end(self, tracked: TrackedRequest, events: Events, index: int, context: Context) -> None:
        message = events.end(index)
        reason = oe.FinishReason.Name(message.finished.reason).removeprefix("FINISH_REASON_").lower()
        tracked.scope.log_fields["finish_reason"] = reason
        if message.finished.reason != oe.FINISH_REASON_CANCELLED:
            tracked.count_finished(reason, index)
        await tracked.write(context, message)


class OpenEngineControl(openengine_pb2_grpc.ControlServicer):
    """What routers and operators call."""

    def __init__(
        self, collaborators: Collaborators, *, submitter: Submitter, control: Control, ended: EndedRequests
    ) -> None:
        self._ended = ended
        self._tracker, self._prefix_salt = collaborators.tracker, collaborators.prefix_salt
        self._models, self._pool = collaborators.models, collaborators.pool
        self._submitter = submitter
        self._control = control

    async def GetServerInfo(self, request: oe.GetServerInfoRequest, context: Context) -> oe.ServerInfo:
        """All workers behind this gateway, reported as one rank."""
        check_known(request)
        return info.server_info(
            self._pool.workers(), instance_id=self._control.peers.gateway_id, revision=REVISION, release=RELEASE
        )

    async def GetModelInfo(self, request: oe.GetModelInfoRequest, context: Context) -> oe.ModelInfo:
        """What the named model supports. Raises InvalidRequest without a name."""
        check_known(request)
        if not request.model:
            raise InvalidRequest.of("model", "must be set")
        card = self._models.card_of(request.model, self._pool)
        workers = [each for each in self._pool.workers() if each.card.name == card.name]
        return info.model_info(card, workers, has_text=bool(self._models.token_texts(card)))

    async def GetLoad(self, request: oe.GetLoadRequest, context: Context) -> oe.LoadInfo:
        """The load, as of the workers' last heartbeats."""
        check_known(request)
        return info.load(
            self._pool.workers(),
            instance_id=self._control.peers.gateway_id,
            tells_ranks=request.include_per_rank,
        )

    async def Health(self, request: oe.HealthRequest, context: Context) -> oe.HealthResponse:
        """The worst state of all checks. A probe is a request by the caller, so it needs the scope to make one."""
        check_known(request)
        if request.include_inference_probe and Scope.GENERATE not in current_rpc.get().caller.scopes:
            raise PermissionDenied("an inference probe needs the scope generate")
        is_draining = self._tracker.is_draining
        checks = [
            oe.HealthCheck(name="grpc", state=oe.HEALTH_STATE_READY),
            oe.HealthCheck(name="scheduler", state=oe.HEALTH_STATE_DRAINING if is_draining else oe.HEALTH_STATE_READY),
            *info.model_checks(self._models, self._pool.cards(), request.model),
            info.role_check(request.role),
        ]
        if request.include_inference_probe:
            checks.append(await self._probe(request.model))
        return oe.HealthResponse(state=worst(check.state for check in checks), checks=checks)

    async def _probe(self, model: str) -> oe.HealthCheck:
        """Generate one token from a one-token prompt."""
        check = oe.HealthCheck(name="inference_probe", state=oe.HEALTH_STATE_NOT_READY)
        scope = current_rpc.get()
        try:
            card = self._models.card_of(model or scope.model, self._pool)
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                tracked = await self._submitter.submit(_probe_of(card), scope, prefix="", timeout_s=PROBE_TIMEOUT_S)
                with self._tracker.closing(tracked):
                    streams = OutputStreams(tracked.streams)
                    while await streams.next() is not None:
                        pass
            check.state = oe.HEALTH_STATE_READY
        except TimeoutError:
            check.message = f"no token within {PROBE_TIMEOUT_S:g} s"
        except Exception as error:
            check.message = engine_error(error).message
            if not is_expected(error):
                log.error("defect", method=scope.method, request_id=scope.request_id, exc_info=error)
        return check

    async def Abort(self, request: oe.AbortRequest, context: Context) -> oe.AbortResponse:
        """End one or all of the caller's own requests, at whichever gateway they are."""
        check_abort(request)
        caller = current_rpc.get().caller
        match request.WhichOneof("target"):
            case "request_id":
                outcome = await self._control.cancel(request.request_id, caller)
            case "all_requests":
                outcome = await self._control.cancel_every(caller)
                tell_silent(context, outcome.silent)
                message = f"{outcome.num_ended} requests"
                return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED, message=message)
            case _:
                raise RequestNotFound("no cache comes from another engine here")
        tell_silent(context, outcome.silent)
        if not outcome.num_ended:
            if caller.key_of(request.request_id) in self._ended:
                return oe.AbortResponse(status=oe.ABORT_STATUS_ALREADY_FINISHED)
            num = len(outcome.silent)
            where = f"; {num} gateway{'s' * (num > 1)} did not answer" if num else ""
            raise RequestNotFound(f"no such request is in flight{where}")
        return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)

    async def LoadLora(self, request: oe.LoadLoraRequest, context: Context) -> oe.LoadLoraResponse:
        """Not offered."""
        raise _without_adapters("LoadLora")

    async def UnloadLora(self, request: oe.UnloadLoraRequest, context: Context) -> oe.UnloadLoraResponse:
        """Not offered."""
        raise _without_adapters("UnloadLora")

    async def ListLoras(self, request: oe.ListLorasRequest, context: Context) -> oe.ListLorasResponse:
        """Not offered."""
        raise _without_adapters("ListLoras")

    async def GetKvEventSources(
        self, request: oe.GetKvEventSourcesRequest, context: Context
    ) -> oe.GetKvEventSourcesResponse:
        """Returns no sources: events come from SubscribeKvEvents."""
        check_known(request)
        check_ranks(request.data_parallel_ranks)
        return oe.GetKvEventSourcesResponse()

    async def SubscribeKvEvents(self, request: oe.SubscribeKvEventsRequest, context: Context) -> None:
        """The caller's own prefixes that the workers hold, if a snapshot is wanted; then every change."""
        check_known(request)
        check_ranks(request.data_parallel_ranks)
        if request.start_sequence_number and not request.include_snapshot:
            raise InvalidRequest.of("start_sequence_number", "past events are not kept: set include_snapshot")
        scope = current_rpc.get()
        card = self._models.card_of(scope.model, self._pool, path="x-model")
        self._tracker.check_open()
        subscription = self._pool.follow_blocks(card.name, self._prefix_salt.of(scope.caller, ""))
        try:
            await context.send_initial_metadata(())
            while True:
                batch = await subscription.next()
                if batch.chunk is None or request.include_snapshot:
                    await self._tracker.write(context, oe.SubscribeKvEventsResponse(batch=kv_batch(batch)))
        except (FeedCut, FeedEnded) as error:
            scope.reason = row_of(error).reason
            await self._tracker.write(context, oe.SubscribeKvEventsResponse(error=engine_error(error)))
        finally:
            subscription.leave()


def _probe_of(card: ModelCard) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=card.eos_token_ids[:1] or (0,)),
        model=card.name,
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(max_tokens=1),
        output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS),
        priority=100,
    )


def _without_adapters(method: str) -> NotEnabled:
    """The error that the contract requires of a server without adapters."""
    return NotEnabled(f"{method} is not offered here: there are no adapters")
