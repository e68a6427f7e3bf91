"""How many workers each model of a running service has, and how many gateways run on other hosts: set by operators over
a socket in the run directory, or, the workers alone, by the load (--autoscale).

Gateways forward these calls from their AdminService; this user, who alone may open the socket, can also call it
directly.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from octavo.cli.errors import nearest
from octavo.cli.serve.autoscale import AutoscalePolicy, AutoscaleState, demand_of, next_state, refused
from octavo.cli.serve.launch import ProcessPlan, Role, with_threads, write_settings
from octavo.cli.serve.service import Notice, Service, Stage, SupervisedProcess
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.settings.model_names import name_of_model
from octavo.client.options import NO_PROXY
from octavo.gateway.errors import InvalidRequest
from octavo.gateway.validation.fields import check
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc, load_pb2, load_pb2_grpc
from octavo.wire.host import usable_cores

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
SHUTDOWN_S = 0.5
LOOK_S = 1.0  # between two snapshots of the load
SILENT_S = 10.0  # after which a gateway counts as hung


NO_GATEWAYS = "it has no gateways on other hosts, whose number could change: start it with --cluster-gateways"


class CannotScale(Exception):
    """The number stays as it is; the message says why, in one sentence."""


class NoSuchModel(CannotScale):
    """The service has no model of that name."""


Divide: TypeAlias = Callable[[ProcessPlan, int], bool]


def dividing(settings: ServeSettings) -> Divide:
    """For workers of a model that share this host's cores: a function that sets a worker's share of threads for that
    many workers, in the settings file that it reads at its next start. It returns whether the share has changed."""

    def divide(plan: ProcessPlan, num_workers: int) -> bool:
        number = with_threads(settings.model_copy(update={"workers": num_workers}), usable_cores()).num_threads
        if plan.settings["num_threads"] == number:
            return False
        plan.settings["num_threads"] = number
        write_settings(plan.settings, Path(plan.settings["run_dir"]) / f"{plan.name}.toml")
        return True

    return divide


class Fleet:
    """The workers of one service, and its gateways on other hosts. make(number, model as --model names it): makes a
    worker. divide: see `dividing`; None if a worker's settings do not depend on how many there are.
    make_gateway(number): makes a gateway on another host; None if the service has none. room(workers in total, gateways
    on other hosts): why there is no room for that many, or None; called in a thread, since it may count GPUs or ask a
    cluster. reserved: why only the service itself may choose the number of workers; None if operators may."""

    def __init__(
        self,
        service: Service,
        *,
        make: Callable[[int, str], SupervisedProcess],
        divide: Divide | None = None,
        make_gateway: Callable[[int], SupervisedProcess] | None = None,
        room: Callable[[int, int], str | None] = lambda num_workers, num_gateways: None,
        reserved: str | None = None,
        notice: Notice,
    ) -> None:
        self._service = service
        self._make = make
        self._divide = divide
        self._make_gateway = make_gateway
        self._room = room
        self._reserved = reserved
        self._changing = asyncio.Lock()
        self._notice = notice
        self.is_ready = False

    def sizes(self) -> dict[str, int]:
        """The target number of workers of each model, by the model's name."""
        return dict(Counter(name_of_model(each.plan.model) for each in self._workers()))

    async def ask(self, model: str, num_workers: int) -> tuple[str, int]:
        """Scale a model for an operator. Returns its name and the previous target. model: as callers name it; empty:
        the only one. Raises CannotScale."""
        if self._reserved is not None:
            raise CannotScale(self._reserved)
        return await self.scale(model, num_workers)

    async def scale(
        self, model: str, num_workers: int, *, because: str = "an operator asked for it"
    ) -> tuple[str, int]:
        """`ask`, for any caller."""
        async with self._changing:  # else two concurrent calls would be given the same room
            self._check_stage()
            name = self._named(model, self.sizes())
            in_all = len(self._workers()) + num_workers - self.sizes()[name]
            if in_all > len(self._workers()):
                await self._check_room(in_all, len(self._gateways()))
            self._check_stage()  # again: things may have changed meanwhile
            name = self._named(name, self.sizes())
            own = [each for each in self._workers() if name_of_model(each.plan.model) == name]
            before, model = len(own), own[0].plan.model
            self._tell(name, "workers", before, num_workers, because)
            self._change(own, num_workers, "worker", lambda number: self._made(number, model, num_workers))
            if self._share_out(own[:num_workers], num_workers):
                self._notice(f"{name}: workers that run keep their threads; one that is started anew has its new share")
            return name, before

    def _made(self, number: int, model: str, num_workers: int) -> SupervisedProcess:
        kept = self._make(number, model)
        self._share_out([kept], num_workers)
        return kept

    def _share_out(self, workers: Sequence[SupervisedProcess], num_workers: int) -> bool:
        """Set the workers' shares of threads; returns whether any of them has changed."""
        if self._divide is None:
            return False
        return sum(self._divide(each.plan, num_workers) for each in workers) > 0

    async def ask_gateways(self, num_gateways: int) -> int:
        """Scale the gateways on other hosts for an operator. Returns the previous target. Raises CannotScale."""
        if self._make_gateway is None:
            raise CannotScale(NO_GATEWAYS)
        async with self._changing:
            self._check_stage()
            if num_gateways > len(self._gateways()):
                await self._check_room(len(self._workers()), num_gateways)
            self._check_stage()
            own = self._gateways()
            self._tell("on other hosts", "gateways", len(own), num_gateways, "an operator asked for it")
            self._change(own, num_gateways, "gateway", self._make_gateway)
            return len(own)

    async def _check_room(self, num_workers: int, num_gateways: int) -> None:
        if (why := await asyncio.to_thread(self._room, num_workers, num_gateways)) is not None:
            raise CannotScale(why)

    def _check_stage(self) -> None:
        if self._service.stage is not Stage.RUNNING:
            raise CannotScale("the service is shutting down")
        if not self.is_ready:
            raise CannotScale("the service is still starting: ask again once it is ready")

    def _tell(self, whose: str, what: str, before: int, number: int, because: str) -> None:
        if before != number:
            self._notice(f"{whose}: from {before} to {number} {what}, since {because}")

    def _change(
        self, own: list[SupervisedProcess], number: int, kind: str, make: Callable[[int], SupervisedProcess]
    ) -> None:
        """Start or retire processes until there are `number`. own: the current ones; the last ones are retired
        first."""
        try:
            for kept in own[number:][::-1]:
                self._service.retire(kept)
            for _ in range(number - len(own)):
                self._service.add(make(self._free_number(kind)))
        except OSError as error:
            raise CannotScale(f"the settings of a {kind} cannot be written: {error}") from None

    def _named(self, model: str, sizes: dict[str, int]) -> str:
        if not model and len(sizes) == 1:
            return next(iter(sizes))
        if not model:
            raise NoSuchModel(f"several models are served: name one of {', '.join(sizes)}")
        if model not in sizes:
            meant = nearest(model, sizes)
            raise NoSuchModel(
                f"no model {model!r} is served here"
                + (f": did you mean {meant}?" if meant else f", but {', '.join(sizes)}")
            )
        return model

    def _workers(self) -> list[SupervisedProcess]:
        """All workers that are not leaving."""
        return [each for each in self._service.processes if each.plan.role is Role.WORKER and not each.is_leaving]

    def _gateways(self) -> list[SupervisedProcess]:
        """All gateways on other hosts that are not leaving."""
        placed = [each for each in self._service.processes if each.plan.role is Role.GATEWAY and each.plan.is_placed]
        return [each for each in placed if not each.is_leaving]

    def _free_number(self, kind: str) -> int:
        """The lowest number that no process has; one that is still leaving keeps its own."""
        taken = {each.plan.name for each in self._service.processes}
        return next(n for n in range(len(taken) + 1) if f"{kind}-{n}" not in taken)


class _AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService of the supervisor: Scale and ScaleGateways alone."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        """Start workers, or retire some."""
        async with _refusing(context):
            check(request)
            model, before = await self._fleet.ask(request.model, request.num_workers)
            return pb.ScaleResponse(model=model, num_workers_before=before)

    async def ScaleGateways(self, request: pb.ScaleGatewaysRequest, context: Context) -> pb.ScaleGatewaysResponse:
        """Place gateways on other hosts, or retire some."""
        async with _refusing(context):
            check(request)
            before = await self._fleet.ask_gateways(request.num_gateways)
            return pb.ScaleGatewaysResponse(num_gateways_before=before)


@asynccontextmanager
async def _refusing(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except InvalidRequest as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except NoSuchModel as error:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    except CannotScale as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


@asynccontextmanager
async def listening(fleet: Fleet, path: Path) -> AsyncIterator[None]:
    """Serve calls on a socket in the run directory."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(_AdminServicer(fleet), server)
    server.add_insecure_port(f"unix:{path.absolute()}")  # noqa: ASYNC240  (does no disk I/O)
    await server.start()
    try:
        yield
    finally:
        await server.stop(SHUTDOWN_S)


class _Autoscaler:
    """Scales each model with its load. A reason why a change was refused is reported once."""

    def __init__(self, fleet: Fleet, policy: AutoscalePolicy, notice: Notice) -> None:
        self._fleet, self._policy, self._notice = fleet, policy, notice
        self._states: dict[str, AutoscaleState] = {}
        self._refusals: dict[str, str] = {}

    async def follow(self, snapshot: load_pb2.WatchLoadResponse) -> None:
        """Scale the models for which this load asks for it."""
        for model, size in self._fleet.sizes().items():
            demand = demand_of(snapshot, model)
            before = self._states.get(model, AutoscaleState(wanted=size))
            state = self._states[model] = next_state(self._policy, before, demand, time.monotonic())
            if state.wanted == size:
                continue
            why = f"they are {demand.usage:.0%} full, requests wait {demand.queue_s:.1f} s"
            try:
                await self._fleet.scale(model, state.wanted, because=why)
            except CannotScale as error:
                self._states[model] = refused(before, state, size=size, now_s=time.monotonic())
                self._report(model, size, str(error))
            else:
                self._refusals.pop(model, None)

    def _report(self, model: str, size: int, refusal: str) -> None:
        if refusal != self._refusals.get(model):
            self._refusals[model] = refusal
            self._notice(f"{model} keeps {size} worker{'s' * (size != 1)}: {refusal}")


async def follow_load(fleet: Fleet, policy: AutoscalePolicy, addresses: Sequence[str], notice: Notice) -> None:
    """Scale each model with its load, forever. addresses: where gateways report the load without authentication; the
    next one is used when one is gone, drains or hangs. A reason why a change was refused is reported once."""
    autoscaler = _Autoscaler(fleet, policy, notice)
    for address in itertools.cycle(addresses):
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async for snapshot in _told_by(address):
                await autoscaler.follow(snapshot)
        await asyncio.sleep(LOOK_S)


async def _told_by(address: str) -> AsyncIterator[load_pb2.WatchLoadResponse]:
    """The gateway's snapshots of the load. Raises AioRpcError, and TimeoutError if none comes for SILENT_S."""
    async with grpc.aio.insecure_channel(address, options=[NO_PROXY]) as channel:
        watch = load_pb2_grpc.LoadServiceStub(channel).WatchLoad(load_pb2.WatchLoadRequest(interval_s=LOOK_S))
        while True:
            async with asyncio.timeout(SILENT_S):
                snapshot = await watch.read()
            if snapshot is grpc.aio.EOF:
                return
            yield snapshot
