"""How many workers each model of a running service has: told by operators, over a socket in the run directory.

What AdminService.Scale of a gateway takes is passed on to it; who may open the socket, which only this user may, needs
no gateway.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from octavo.cli.errors import nearest
from octavo.cli.serve.autoscale import AutoscalePolicy, Course, demand_of, steer
from octavo.cli.serve.launch import Role
from octavo.cli.serve.service import Kept, Notice, Service, Stage
from octavo.cli.settings.model_names import name_of_model
from octavo.gateway.errors import InvalidRequest
from octavo.gateway.validation.fields import check
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc, load_pb2, load_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
SHUTDOWN_S = 0.5
LOOK_S = 1.0  # between two looks at the load


class CannotScale(Exception):
    """The number of workers stays as it is; the message says why, in one sentence."""


class NoSuchModel(CannotScale):
    """The service has no model of that name."""


class Fleet:
    """The workers of one service. make(number, model as --model names it): a new one. room(workers in all): why
    there is none for so many, None where there is. reserved: why nobody but the service itself may choose the
    number, None where anybody may. room is asked in a thread: it may count GPUs, or ask a cluster."""

    def __init__(
        self,
        service: Service,
        *,
        make: Callable[[int, str], Kept],
        room: Callable[[int], str | None] = lambda num_workers: None,
        reserved: str | None = None,
        on_change: Callable[[], None] = lambda: None,
        notice: Notice,
    ) -> None:
        self._service = service
        self._make = make
        self._room = room
        self._reserved = reserved
        self._on_change = on_change
        self._changing = asyncio.Lock()
        self._notice = notice
        self.is_ready = False

    def sizes(self) -> dict[str, int]:
        """Workers that each model is to have, by the model's name."""
        return dict(Counter(name_of_model(each.plan.model) for each in self._workers()))

    async def ask(self, model: str, num_workers: int) -> tuple[str, int]:
        """What an operator asks for: the model's name, and how many workers it was to have before. model: as callers
        name it; empty: the only one. Raises CannotScale."""
        if self._reserved is not None:
            raise CannotScale(self._reserved)
        return await self.scale(model, num_workers)

    async def scale(
        self, model: str, num_workers: int, *, because: str = "an operator asked for it"
    ) -> tuple[str, int]:
        """The same, whoever asks."""
        async with self._changing:  # else two who ask at once would be given the same room
            self._check_stage()
            name = self._named(model, self.sizes())
            in_all = len(self._workers()) + num_workers - self.sizes()[name]
            if in_all > len(self._workers()) and (why := await asyncio.to_thread(self._room, in_all)) is not None:
                raise CannotScale(why)
            self._check_stage()  # all of it may be otherwise by now
            name = self._named(name, self.sizes())
            return name, self._change(name, num_workers, because)

    def _check_stage(self) -> None:
        if self._service.stage is not Stage.RUNNING:
            raise CannotScale("the service is shutting down")
        if not self.is_ready:
            raise CannotScale("the service is still starting: ask again once it is ready")

    def _change(self, name: str, num_workers: int, because: str) -> int:
        own = [each for each in self._workers() if name_of_model(each.plan.model) == name]
        before, more = len(own), num_workers - len(own)
        if more != 0:
            self._notice(f"{name}: from {before} to {num_workers} workers, since {because}")
        for kept in own[num_workers:][::-1]:
            self._service.retire(kept)
        for _ in range(more):
            self._service.add(self._make(self._free_number(), own[0].plan.model))
        if more != 0:
            self._on_change()
        return before

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

    def _workers(self) -> list[Kept]:
        """Those that are to be there: none that is leaving."""
        return [each for each in self._service.processes if each.plan.role is Role.WORKER and not each.is_leaving]

    def _free_number(self) -> int:
        """The lowest that no process has; one that is still leaving keeps its own."""
        taken = {each.plan.name for each in self._service.processes}
        return next(n for n in range(len(taken) + 1) if f"worker-{n}" not in taken)


class _Door(admin_pb2_grpc.AdminServiceServicer):
    """AdminService of the supervisor: Scale alone."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        """Start workers, or let some go."""
        try:
            check(request)
            model, before = await self._fleet.ask(request.model, request.num_workers)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except NoSuchModel as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except CannotScale as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.ScaleResponse(model=model, num_workers_before=before)


@asynccontextmanager
async def listening(fleet: Fleet, path: Path) -> AsyncIterator[None]:
    """Take calls at a socket in the run directory."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(_Door(fleet), server)
    server.add_insecure_port(f"unix:{path.absolute()}")  # noqa: ASYNC240  (it asks no disk)
    await server.start()
    try:
        yield
    finally:
        await server.stop(SHUTDOWN_S)


async def follow_load(fleet: Fleet, policy: AutoscalePolicy, address: str, notice: Notice) -> None:
    """Scale each model as its load asks for, for ever. address: where a gateway tells the load without asking who asks.
    A gateway that is away, or drains, is asked again; what cannot be is told once."""
    courses: dict[str, Course] = {}
    told = ""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with grpc.aio.insecure_channel(address) as channel:
                stub = load_pb2_grpc.LoadServiceStub(channel)
                async for snapshot in stub.WatchLoad(load_pb2.WatchLoadRequest(interval_s=LOOK_S)):
                    for model, size in fleet.sizes().items():
                        demand = demand_of(snapshot, model)
                        course = courses.get(model, Course(wanted=size))
                        courses[model] = steer(policy, course, demand, time.monotonic())
                        if courses[model].wanted != size:
                            why = f"they are {demand.usage:.0%} full, requests wait {demand.queue_s:.1f} s"
                            try:
                                await fleet.scale(model, courses[model].wanted, because=why)
                            except CannotScale as error:
                                courses[model] = Course(wanted=size, changed_s=time.monotonic())
                                if str(error) != told:
                                    told = str(error)
                                    notice(f"{model} keeps {size} workers: {told}")
        await asyncio.sleep(LOOK_S)
