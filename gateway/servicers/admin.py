"""AdminService: for operators, on a listener of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from octavo.gateway.errors import ModelNotFound, ScaleRefused
from octavo.gateway.peers.control import Control
from octavo.gateway.rpc.connections import Context
from octavo.gateway.rpc.interceptor import current_rpc
from octavo.gateway.validation.fields import check
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import WorkerView
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc

QUERY_TIMEOUT_S = 2.0  # as the contract says
SCALE_TIMEOUT_S = 20.0  # it may look for GPUs, or ask a cluster


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """One per gateway."""

    def __init__(self, pool: WorkerPool, control: Control, supervisor_address: str | None = None) -> None:
        self._pool = pool
        self._control = control
        self._supervisor_address = supervisor_address

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a request that is in flight."""
        check(request)
        current_rpc.get().request_id = request.request_id
        outcome = await self._control.abort(request.request_id)
        return pb.AbortResponse(found=outcome.num_ended > 0, unreachable_gateways=outcome.silent)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """The load by the workers' last heartbeats and the answers of all gateways."""
        check(request)
        outcome = await self._control.load()
        return pb.GetLoadResponse(
            workers=[_load(worker) for worker in self._pool.workers()],
            gateways=[
                pb.GatewayLoad(
                    gateway=name,
                    num_in_flight=reply.num_in_flight,
                    num_preparing=reply.num_preparing,
                    tokens_per_s=reply.tokens_per_s,
                    is_draining=reply.is_draining,
                )
                for name, reply in outcome.replies.items()
            ],
            unreachable_gateways=outcome.silent,
        )

    async def AuditBlocks(self, request: pb.AuditBlocksRequest, context: Context) -> pb.AuditBlocksResponse:
        """Recount every block."""
        check(request)
        replies = await self._pool.query(audit=True, flush=False, timeout_s=QUERY_TIMEOUT_S)
        return pb.AuditBlocksResponse(
            audits=[
                pb.BlockAudit(
                    worker_id=worker_id,
                    violations=reply.violations,
                    num_blocks=reply.num_blocks,
                    num_free_blocks=reply.num_free_blocks,
                    num_cached_blocks=reply.num_cached_blocks,
                    num_active_blocks=reply.num_active_blocks,
                )
                for worker_id, reply in replies
            ]
        )

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        """Drop cached prefixes."""
        check(request)
        replies = await self._pool.query(audit=False, flush=True, timeout_s=QUERY_TIMEOUT_S)
        return pb.FlushPrefixCacheResponse(num_blocks=sum(reply.num_flushed_blocks for _, reply in replies))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Begin to shut down; does not wait until it is done."""
        check(request)
        outcome = await self._control.drain(request.grace_s if request.HasField("grace_s") else None)
        return pb.DrainResponse(num_in_flight=outcome.num_in_flight, unreachable_gateways=outcome.silent)

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        """Start workers, or stop some."""
        check(request)
        async with self._supervisor() as supervisor:
            answer: pb.ScaleResponse = await supervisor.Scale(request, timeout=SCALE_TIMEOUT_S)
        return answer

    async def ScaleGateways(self, request: pb.ScaleGatewaysRequest, context: Context) -> pb.ScaleGatewaysResponse:
        """Place gateways on other hosts, or stop some."""
        check(request)
        async with self._supervisor() as supervisor:
            answer: pb.ScaleGatewaysResponse = await supervisor.ScaleGateways(request, timeout=SCALE_TIMEOUT_S)
        return answer

    @asynccontextmanager
    async def _supervisor(self) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
        """A stub of the supervisor, which starts and ends processes. Its refusals are passed on."""
        if self._supervisor_address is None:
            alone = "which alone starts and ends workers and gateways"
            raise ScaleRefused(f"this gateway was not started by octavo serve, {alone}")
        async with grpc.aio.insecure_channel(self._supervisor_address) as channel:
            try:
                yield admin_pb2_grpc.AdminServiceStub(channel)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise ModelNotFound(error.details()) from None
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise ScaleRefused(error.details()) from None
                silent = "the supervisor does not answer: look whether the number has changed"
                raise ScaleRefused(silent) from None


def _load(worker: WorkerView) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        worker_id=worker.worker_id,
        model=worker.card.name,
        num_running=worker.num_running,
        num_waiting=worker.num_waiting,
        num_blocks=worker.capacity.num_blocks,
        num_free_blocks=worker.num_free_blocks,
        num_cached_blocks=worker.num_cached_blocks,
        num_steps=worker.num_steps,
        heartbeat_age_s=worker.heartbeat_age_s,
        epoch=worker.epoch,
    )
