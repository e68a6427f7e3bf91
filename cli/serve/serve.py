"""`octavo serve`: a service, from settings until the last process has ended."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from octavo.cli.errors import CliError
from octavo.cli.serve.children import Child, ManagedProcess, OnLine
from octavo.cli.serve.launch import (
    READY_FILE,
    GatewayLinks,
    ProcessPlan,
    Role,
    choose_gateways,
    command_line,
    environment,
    local_links,
    plan_placed_gateway,
    plan_processes,
    plan_worker,
    run_folder,
    shares_port,
    supervisor_socket,
    threads_of_service,
    with_threads,
    write_settings,
)
from octavo.cli.serve.placement import GatewayDirectory
from octavo.cli.serve.ports import choose_ports, free_port, held_port, require_free, require_threads
from octavo.cli.serve.preflight import (
    check_connections,
    check_front,
    check_group_devices,
    check_peers,
    check_traces,
    check_workers_elsewhere,
    check_workers_here,
    serves_on_gpu,
    warn_of_variables,
)
from octavo.cli.serve.record import Listing, record_of
from octavo.cli.serve.service import Notice, Service, Stage, SupervisedProcess, supervised
from octavo.cli.serve.startup import LineStyle, StartupView, stderr_in_a_thread
from octavo.cli.serve.summary import show_summary
from octavo.cli.serve.supervisor import RestartPolicy
from octavo.cli.settings.addresses import join_address, reachable
from octavo.cli.settings.gateway_config import check_access, check_exposed
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.settings.model_names import check_model_ports, model_ports
from octavo.cli.whole_file import write_whole
from octavo.wire.host import ending_signals, usable_cores

if TYPE_CHECKING:
    from octavo.cli.serve.autoscale import AutoscalePolicy
    from octavo.cli.serve.fleet import Fleet

TURNS_TO_BEGIN = 2
"""Iterations of the event loop until every process is being started: one for the service's task, one for each
process's own."""


def serve(settings: ServeSettings) -> int:
    """Serve until a signal ends it. Returns 0.

    Raises CliError, AccessFileError, CpuIsaError, CheckpointError, CardError, KeyFileError, TooFewDescriptors if
    something is wrong before anything was started; CliError if the service could not start or go on; OSError if a
    process could not be started.
    """
    warn_of_variables()
    check_front(settings)
    check_exposed(settings)
    check_access(settings)
    check_connections(settings)
    check_peers(settings)
    if settings.cluster:
        check_workers_elsewhere(settings)
    else:
        check_workers_here(settings)
    check_traces()
    if (policy := _policy(settings)) is not None:
        settings = settings.model_copy(update={"workers": max(settings.workers, policy.floor)})
    gateways_why, on_gpu = "", bool(settings.cluster) or serves_on_gpu(settings)
    # With a control endpoint, gateways on other hosts list each of ours.
    if settings.gateways is None and not settings.cluster and not settings.control_endpoint:
        settings, gateways_why = with_gateways(settings, usable_cores(), on_gpu=on_gpu)
    if divides_threads := not on_gpu and settings.num_threads is None and "OMP_NUM_THREADS" not in os.environ:
        settings = with_threads(settings, usable_cores())
    require_threads(threads_of_service(settings, on_gpu=on_gpu))
    if not settings.registration_token:  # draw one, so that only workers of this service can register
        check_model_ports(settings.model_port, settings.model)
        settings = settings.model_copy(update={"registration_token": secrets.token_hex(32)})
    if settings.authenticates_callers and not settings.prefix_salt_secret:  # the same for all gateways
        settings = settings.model_copy(update={"prefix_salt_secret": secrets.token_hex(32)})
    with ExitStack() as stack:
        layout = _lay_out(settings, stack, gateways_why=gateways_why, divides_threads=divides_threads)
        return asyncio.run(_serve(layout, stack.enter_context(stderr_in_a_thread())))


def _lay_out(settings: ServeSettings, stack: ExitStack, *, gateways_why: str, divides_threads: bool) -> "_Layout":
    """Choose where each process is reached. The stack keeps the run directory, the cluster and shared ports."""
    run_dir = stack.enter_context(run_folder(settings.run_dir))
    site = stack.enter_context(_site(settings, run_dir))
    ports = choose_ports(settings)
    of_models = [number for _, number in model_ports(settings.model_port)]
    others = {*ports, settings.admin_port or 0, settings.openai or 0, *of_models}
    port = settings.port or free_port(settings.host, others)
    if shares_port(settings):
        for number in (port, *of_models):
            stack.enter_context(held_port(settings.host, number))
    openai_port = settings.openai or (None if settings.openai is None else free_port(settings.openai_host, others))
    return _Layout(
        settings=settings,
        plans=plan_processes(
            settings, run_dir=run_dir, port=port, ports=ports, openai_port=openai_port, links=site.links
        ),
        run_dir=run_dir,
        port=port,
        address=join_address(reachable(settings.host), port),
        site=site,
        gateways_why=gateways_why,
        divides_threads=divides_threads,
    )


def _policy(settings: ServeSettings) -> "AutoscalePolicy | None":
    if not settings.autoscale:
        return None
    from octavo.cli.serve.autoscale import policy_of  # imports messages of the load, which nothing else here needs

    return policy_of(settings)


def with_gateways(settings: ServeSettings, num_cores: int, *, on_gpu: bool) -> tuple[ServeSettings, str]:
    """The settings with a number of gateways, and its explanation for the summary."""
    number = choose_gateways(num_cores, num_workers=settings.workers * len(settings.model), on_gpu=on_gpu)
    where = f"beside a GPU with {num_cores} cores" if on_gpu else f"since the model computes on the {num_cores} cores"
    return settings.model_copy(update={"gateways": number}), f"{number}, {where} (--gateways)"


class Site(Protocol):
    """Where workers run. links: where they connect to the gateways. directory: where gateways on other hosts are."""

    @property
    def links(self) -> GatewayLinks: ...

    @property
    def directory(self) -> GatewayDirectory: ...

    def child(self, plan: ProcessPlan, on_line: OnLine, notice: Notice) -> ManagedProcess:
        """The process of a worker, or of a gateway whose host the cluster chooses."""

    def room(self, num_workers: int, num_gateways: int) -> str | None:
        """Why there is no room for that many workers in total and gateways on other hosts; None if there is, or may
        be."""


@dataclass(frozen=True, slots=True)
class _Here:
    """This host."""

    links: GatewayLinks
    settings: ServeSettings
    directory: GatewayDirectory = field(default_factory=lambda: GatewayDirectory({}))

    def child(self, plan: ProcessPlan, on_line: OnLine, notice: Notice) -> ManagedProcess:
        return local_child(plan, on_line)

    def room(self, num_workers: int, num_gateways: int) -> str | None:
        one_model = {"workers": num_workers, "model": self.settings.model[:1]}
        try:
            check_group_devices(self.settings.model_copy(update=one_model))
        except CliError as error:
            return error.numbers
        return None


@contextmanager
def _site(settings: ServeSettings, run_dir: Path) -> Iterator[Site]:
    if not settings.cluster:
        yield _Here(local_links(settings, run_dir), settings)
        return
    from octavo.cli.serve.cluster import joined  # imports Ray

    with joined(settings, run_dir) as site:
        yield site


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What is served, and where."""

    settings: ServeSettings
    plans: Sequence[ProcessPlan]
    run_dir: Path
    port: int
    address: str
    site: Site
    gateways_why: str
    divides_threads: bool


def local_child(plan: ProcessPlan, on_line: OnLine) -> Child:
    """A process on this host; writes its settings to a file in the run directory."""
    file = write_settings(plan.settings, Path(plan.settings["run_dir"]) / f"{plan.name}.toml")
    return Child(plan.name, command_line(plan.role.value, file), environment() | dict(plan.variables), on_line)


async def _serve(layout: _Layout, write: Callable[[str], object]) -> int:
    started_s = time.monotonic()
    settings, site = layout.settings, layout.site
    console = Console(stderr=True)
    style = LineStyle.of(settings.log_format, console)
    view = StartupView(layout.plans, console=console, level=settings.log_level, style=style, write=write)
    notice = view.notice

    def kept(plan: ProcessPlan) -> SupervisedProcess:
        is_there = plan.role is Role.WORKER or plan.is_placed
        child = site.child(plan, view.on_line, notice) if is_there else local_child(plan, view.on_line)
        return supervised(plan, child, RestartPolicy())

    def later_gateway(n: int) -> SupervisedProcess:
        return kept(plan_placed_gateway(settings, n, run_dir=layout.run_dir, port=layout.port))

    def on_change() -> None:
        """The set of processes, or their places, have changed."""
        host = settings.metrics_host
        listing.put(
            record_of(layout.address, layout.run_dir, service.processes, metrics_host=host, directory=site.directory)
        )

    listing = Listing(notice)
    service = Service(
        list(map(kept, layout.plans)), drain_grace_s=settings.drain_grace_s, notice=notice, on_change=on_change
    )
    on_change()
    site.directory.listeners.add(on_change)
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, _on_signal, service, notice)
    async with service.running() as running:
        for _ in range(TURNS_TO_BEGIN):
            await asyncio.sleep(0)
        from octavo.cli.serve.fleet import Fleet, dividing, listening  # meanwhile workers do their long imports

        policy = _policy(settings)
        fleet = Fleet(
            service,
            reserved=None if policy is None else f"--autoscale {settings.autoscale} chooses the number of workers",
            make=lambda n, model: kept(_later_worker(layout, n, model)),
            divide=dividing(settings) if layout.divides_threads else None,
            make_gateway=later_gateway if settings.cluster_gateways else None,
            room=site.room,
            notice=notice,
        )
        announcer = asyncio.create_task(_announce(layout, started_s, service, view, fleet))
        announcer.add_done_callback(lambda task: _on_announced(task, view.notice))
        tasks = [announcer, asyncio.create_task(listing.keep())]
        if policy is not None:
            tasks.append(asyncio.create_task(_autoscale(announcer, fleet, policy, _status_at(layout.plans), notice)))
        try:
            async with listening(fleet, supervisor_socket(layout.run_dir)):
                code = await running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listing.remove()
            view.close()
    if service.failure:
        raise _failure(service, view)
    return code


def _failure(service: Service, view: StartupView) -> CliError:
    """Why the service could not go on: what the process that failed reported, if it reported anything."""
    said = view.refused.get(service.failed)
    if said is None:
        return CliError("the service could not go on", str(service.failure), "the lines above say why")
    return replace(said, what=f"{service.failed} cannot start: {said.what}")


async def _autoscale(
    announcer: asyncio.Task[None], fleet: "Fleet", policy: "AutoscalePolicy", addresses: Sequence[str], notice: Notice
) -> None:
    """Follow the load once the service is ready."""
    from octavo.cli.serve.fleet import follow_load

    await asyncio.wait([announcer])
    try:
        await follow_load(fleet, policy, addresses, notice)
    except Exception as error:
        notice(f"the number of workers stays as it is from now on: {type(error).__name__}: {error}")
        raise


def _later_worker(layout: _Layout, n: int, model: str) -> ProcessPlan:
    """A worker that joins a running service. Its metrics are on the usual port for its number if that is free, else on
    another."""
    settings = layout.settings
    port = settings.worker_metrics_port and settings.worker_metrics_port + n
    if not settings.cluster:
        try:
            require_free(settings.metrics_host, port, "worker_metrics_port")
        except CliError:
            port = 0
        port = port or free_port(settings.metrics_host, set())
    return plan_worker(settings, n, model, run_dir=layout.run_dir, metrics_port=port, links=layout.site.links)


async def _announce(layout: _Layout, started_s: float, service: Service, view: StartupView, fleet: "Fleet") -> None:
    """Print the summary once the service answers; end the service if that takes too long."""
    from octavo.cli.serve.readiness import model_summaries, service_summary, wait_until_ready

    settings, plans, address = layout.settings, layout.plans, layout.address
    try:
        asked_at = next(iter(_status_at(plans)), address)
        waiting = wait_until_ready(asked_at, plans, metrics_host=reachable(settings.metrics_host))
        async with asyncio.timeout(settings.startup_timeout_s):
            served = await waiting
            await view.gateways_are_open(plans)
    except TimeoutError:
        service.failure = f"not ready after {settings.startup_timeout_s:g} s (--startup-timeout-s)"
        service.advance(Stage.STOPPING)
        return
    service.on_ready()
    view.on_ready()
    fleet.is_ready = True
    ready_after_s = time.monotonic() - started_s
    models = model_summaries(served, list(view.loaded.values()))
    with contextlib.suppress(OSError):  # nobody reads stdout
        summary = service_summary(settings, address, plans, models, page=view.page, ready_after_s=ready_after_s)
        show_summary(replace(summary, gateways=layout.gateways_why, elsewhere=layout.site.directory.rows()))
    ready = layout.run_dir / READY_FILE
    try:
        write_whole(ready, address + "\n")
    except OSError as error:
        view.notice(f"who waits for {ready} waits in vain, since it cannot be written: {error.strerror or error}")


def _status_at(plans: Sequence[ProcessPlan]) -> list[str]:
    """The status sockets of gateways; empty if their port answers without credentials and nothing scales with the
    load."""
    return [f"unix:{each.status_socket.absolute()}" for each in plans if each.status_socket is not None]


def _on_announced(announcer: asyncio.Task[None], notice: Notice) -> None:
    """Report it if the summary could not be made; the service goes on."""
    if not announcer.cancelled() and (error := announcer.exception()) is not None:
        notice(f"no summary: {type(error).__name__}: {error}")


def _on_signal(service: Service, notice: Notice) -> None:
    service.on_signal()
    if service.stage is Stage.DRAINING:
        notice("draining: requests in flight finish, new ones are refused; once more stops at once")
    else:
        notice("stopping")
