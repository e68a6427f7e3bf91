"""One process of a service on some host of a Ray cluster: an actor in a placement group with what it needs."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from octavo.cli.serve.children import OnLine
from octavo.cli.serve.launch import ProcessPlan, passed_on
from octavo.cli.serve.parent import EXIT_NO_PLACE, EXIT_PLACE_LOST
from octavo.cli.serve.placement import GatewayAddress, GatewayDirectory, Need
from octavo.cli.serve.process_actor import ProcessActor, version_here
from octavo.cli.serve.service import Notice
from octavo.cli.settings.addresses import join_address
from octavo.cli.settings.model_names import model_ports
from octavo.wire.endpoints import is_address, is_wildcard

PLACE_S = 30.0  # limit on finding the first place of a process; later there is no limit
PATIENCE_S = 10.0  # before users are told that a process is waiting
ANEW_S = 30.0  # before a reservation that is not granted is made again: a cluster may lose one when a host dies
ANSWER_S = 120.0  # for an actor to start and answer; if it does not, the process is placed again
APART_S = 3.0  # that a gateway waits for a host without another gateway
AGAIN_S = 0.5
NODE_LABEL = "ray.io/node-id"
LOOK_S = 2.0  # between two checks of files that others may change


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    """What all processes of a service on a cluster have in common. ray: the library, connected. label: unique to the
    service within the cluster. own_node: the supervisor's; empty if it has none. towards: the supervisor's address.
    placing: held while a gateway gets its place and ports."""

    ray: Any
    label: str
    directory: GatewayDirectory
    own_node: str
    towards: str
    placing: asyncio.Lock


class Placed:
    """A worker. Keeps its place across restarts while its host is there. files(): the current content of each file that
    a setting names, by setting."""

    def __init__(
        self,
        context: ClusterContext,
        plan: ProcessPlan,
        settings: Mapping[str, Any],
        files: Callable[[], Mapping[str, str]],
        need: Need,
        on_line: OnLine,
        notice: Notice,
    ) -> None:
        self.name = plan.name
        self._context = context
        self._ray = context.ray
        self._role = plan.role
        self._settings = settings
        self._files = files
        self._files_told: Mapping[str, str] = {}
        self._num_told = 0
        self._num_written = 0
        self._told = ""
        self._looked_s = 0.0
        self._need = need
        self._on_line = on_line
        self._notice = notice
        self._group: Any = None
        self._actor: Any = None
        self._run_number = 0
        self._num_groups = 0
        self._was_placed = False
        self._is_leaving = False
        self._living: asyncio.Task[int] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def is_running(self) -> bool:
        """Whether it has a place or is waiting for one."""
        return self._living is not None and not self._living.done()

    async def run(self) -> int:
        """Run the process once. Returns its exit code, EXIT_PLACE_LOST or EXIT_NO_PLACE."""
        self._living = asyncio.create_task(self._live(), name=self.name)
        self._context.directory.listeners.add(self._tell)
        try:
            return await self._living
        except asyncio.CancelledError:
            if self._living.cancelled() and self._is_leaving:
                return 0  # cancelled by `kill`, or by `terminate` while it had no place
            raise
        finally:
            self._context.directory.listeners.discard(self._tell)
            self._living.cancel()
            for task in self._telling:
                task.cancel()
            if self._is_leaving:
                self._leave()

    def terminate(self) -> None:
        """Send SIGTERM to the process; without a place it ends at once."""
        self._is_leaving = True
        if self._actor is not None and self.is_running:
            self._actor.terminate.remote()
        elif self.is_running and self._living is not None:
            self._living.cancel()
        else:
            self._leave()

    def kill(self) -> None:
        """Kill the actor, and the process with it."""
        self._is_leaving = True
        if self._living is not None:
            self._living.cancel()
        self._leave()

    async def _live(self) -> int:
        errors = self._ray.exceptions
        self._run_number += 1
        try:
            if not await self._settle():
                return EXIT_NO_PLACE
            given = (self._settings_of_run(), self._files_of_now(), passed_on(), version_here())
            async with asyncio.timeout(ANSWER_S):
                host = await self._ask("start", self._run_number, self._role.value, self.name, *given)
            if not self._was_placed:
                self._notice(f"{self.name} is placed on {host}{self._reached()}")
            self._was_placed = True
            num_seen, code = 0, None
            while code is None:
                lines, code = await self._ask("follow", num_seen)
                num_seen += len(lines)
                for line in lines:
                    self._on_line(self.name, line)
                if time.monotonic() - self._looked_s > LOOK_S:
                    self._looked_s = time.monotonic()
                    self._tell()  # a file of this host may have changed
            return int(code)
        except errors.RayActorError as error:
            self._leave()
            if getattr(error, "actor_init_failed", False):
                self._notice(f"{self.name}: its host cannot run octavo: {first_line(error)}")
                return 1
            self._was_placed = False
            return EXIT_PLACE_LOST
        except errors.RayTaskError as error:
            self._leave()
            self._notice(f"{self.name}: {first_line(error.cause or error)}")
            return 1
        except (errors.RayError, TimeoutError) as error:  # for example, an answer lost with its host
            self._leave()
            self._notice(f"{self.name}: its actor does not answer: {first_line(error)}")
            self._was_placed = False
            return EXIT_PLACE_LOST

    def _settings_of_run(self) -> dict[str, Any]:
        """The settings for this run, including those that depend on its place."""
        return dict(self._settings)

    def _reached(self) -> str:
        """For people: how callers reach it; appended to the notice of its place."""
        return ""

    async def _settle(self) -> bool:
        """Get a place unless it has one. Returns whether it has one now."""
        return self._actor is not None or await self._place()

    def _files_of_now(self) -> tuple[int, Mapping[str, str]]:
        """The current files, with a number that grows when they change."""
        files = self._files()
        if files != self._files_told:
            self._num_told += 1
            self._files_told = files
        return self._num_told, files

    def _tell(self) -> None:
        """Send its files to its host if they have changed."""
        number, files = self._files_of_now()
        if self._actor is not None and number > max(self._num_written, 1):  # the first ones are sent with the start
            self._num_written = number
            task = asyncio.create_task(self._write(number, files), name=f"files of {self.name}")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _write(self, number: int, files: Mapping[str, str]) -> None:
        errors = self._ray.exceptions
        # `_live` notices an actor that is gone; after `_leave` there is none.
        with contextlib.suppress(errors.RayError, AttributeError):
            try:
                await self._ask("write", number, files)
            except errors.RayTaskError as error:  # its disk may be full
                self._num_written = 0  # the next `_tell` tries again
                if (why := first_line(error.cause or error)) != self._told:
                    self._told = why
                    self._notice(f"{self.name} does not learn what has changed, and it is tried again: {why}")

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """The actor's answer. Asks again while the actor is unreachable but not known to be gone."""
        while True:
            try:
                reference = getattr(self._actor, method).remote(*arguments)
                return await asyncio.wrap_future(reference.future())
            except self._ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)

    async def _place(self) -> bool:
        """Get a place. The first time, gives up after PLACE_S and returns False; later waits as long as it takes."""
        limits = (PATIENCE_S, PLACE_S - PATIENCE_S) if self._run_number == 1 else chain([PATIENCE_S], repeat(ANEW_S))
        is_told = False
        for limit_s in limits:
            if await self._reserve(limit_s, not_at=self._never_at):
                return True
            if not is_told:
                self._notice(f"{self.name} waits for a host of the cluster with {self._need} free")
            is_told = True
            self._give_back()
        return False

    @property
    def _never_at(self) -> Sequence[str]:
        """Ids of nodes that it must not be placed on."""
        return ()

    async def _reserve(self, limit_s: float, *, not_at: Sequence[str]) -> bool:
        """Reserve a place and start its actor. Returns whether that succeeded in limit_s. not_at: nodes to avoid."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._need.resources
        self._num_groups += 1
        asked = {"bundle_label_selector": [{NODE_LABEL: f"!in({','.join(not_at)})"}]} if not_at else {}
        name = f"{self._context.label}-{self.name}-{self._num_groups}"
        self._group = placement_group([resources], strategy="STRICT_PACK", name=name, **asked)
        ready = asyncio.wrap_future(self._group.ready().future())
        await asyncio.wait([ready], timeout=limit_s)
        if not ready.done():
            ready.add_done_callback(lambda late: late.cancelled() or late.exception())  # or asyncio would log it
            return False
        ready.result()
        self._actor = (
            self._ray.remote(ProcessActor)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0),
                max_restarts=0,
            )
            .remote()
        )
        return True

    def _leave(self) -> None:
        """Kill the actor and give the place back. Errors are ignored: the cluster may be gone."""
        actor, self._actor = self._actor, None
        with contextlib.suppress(Exception):
            if actor is not None:
                self._ray.kill(actor)
        self._give_back()

    def _give_back(self) -> None:
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        with contextlib.suppress(Exception):
            if group is not None:
                remove_placement_group(group)


class PlacedGateway(Placed):
    """A gateway. Its address and ports are chosen on its host, and stay in the directory while it keeps its place."""

    _address: GatewayAddress | None = None

    async def _settle(self) -> bool:
        if self._actor is not None:  # the directory has its host and ports: no need to wait for others being placed
            await self._choose_ports()
            return True
        async with self._context.placing:  # else two could choose the same host, or the same ports there
            if not await self._place():
                return False
            await self._choose_ports()
        return True

    async def _place(self) -> bool:
        """Prefers a host without another gateway if one is free within APART_S; never the supervisor's."""
        apart = [*self._never_at, *sorted(self._context.directory.nodes(self.name))]
        if apart != self._never_at:
            if await self._reserve(APART_S, not_at=apart):
                return True
            self._give_back()
        return await super()._place()

    @property
    def _never_at(self) -> Sequence[str]:
        return [self._context.own_node] if self._context.own_node else []

    async def _choose_ports(self) -> None:
        from ray.util.placement_group import placement_group_table

        given, directory, former = self._settings, self._context.directory, self._address
        models = model_ports(given["model_port"])
        of_models = [port for _, port in models]
        port, workers, control, metrics, *of_models = (
            former.ports if former else (given["port"], 0, 0, given["metrics_port"], *of_models)
        )
        wanted = [("", port), ("", workers), ("", control), (given["metrics_host"], metrics)]
        wanted += [("", each) for each in of_models]
        taken = directory.ports(besides=self.name)
        async with asyncio.timeout(ANSWER_S):
            host, ports = await self._ask("choose_ports", self._context.towards, wanted, taken, version_here())
        node = placement_group_table(self._group)["bundles_to_node_id"].get(0, "")  # missing if the host is gone by now
        port, workers, control, metrics, *of_models = ports
        self._address = GatewayAddress(
            host=host,
            port=port,
            worker_port=workers,
            control=control,
            metrics=metrics,
            models=tuple(zip((name for name, _ in models), of_models, strict=True)),
            node=node,
        )
        directory.put(self.name, self._address)

    def _settings_of_run(self) -> dict[str, Any]:
        given, address = self._settings, self._address
        assert address is not None
        is_everywhere = is_address(given["host"]) and is_wildcard(given["host"])
        return dict(given) | {
            "host": given["host"] if is_everywhere else address.host,
            "port": address.port,
            "metrics_port": address.metrics,
            "model_port": [f"{name}={port}" for name, port in address.models],
            "worker_endpoint": [f"tcp://{join_address(address.host, address.worker_port)}"],
            "control_endpoint": f"tcp://{join_address(address.host, address.control)}",
        }

    def _reached(self) -> str:
        if self._address is None:
            return ""
        of_models = [f", {name} at {join_address(self._address.host, port)}" for name, port in self._address.models]
        return f"; callers reach it at {join_address(self._address.host, self._address.port)}{''.join(of_models)}"

    def _leave(self) -> None:
        self._address = None
        self._context.directory.drop(self.name)
        super()._leave()


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or its type's name if that is empty."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
