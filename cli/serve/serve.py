"""`octavo serve`: one host's service, from settings to the last process."""

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from octavo.cli.errors import CliError
from octavo.cli.serve.children import Child
from octavo.cli.serve.launch import (
    READY_FILE,
    ProcessPlan,
    choose_gateways,
    command_line,
    environment,
    metrics_ports,
    plan_processes,
    run_folder,
    usable_cores,
    write_settings,
)
from octavo.cli.serve.ports import free_port, held_port, require_free
from octavo.cli.serve.preflight import (
    check_front,
    check_peers,
    check_traces,
    check_workers,
    serves_on_gpu,
    warn_of_variables,
)
from octavo.cli.serve.readiness import model_summaries, service_summary, wait_until_ready
from octavo.cli.serve.record import record_of, recorded
from octavo.cli.serve.service import Notice, Service, Stage, keep
from octavo.cli.serve.startup import LineStyle, StartupView
from octavo.cli.serve.summary import ServiceSummary, boxed, plain
from octavo.cli.serve.supervisor import RestartPolicy
from octavo.cli.settings.gateway_config import check_access, join_address, reachable
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.settings.model_names import model_ports


def serve(settings: ServeSettings) -> int:
    """Serve until a signal ends it. Exit code 0, or 1 where the service could not start or go on.

    Raises CliError, AccessFileError, CheckpointError, CardError for what is wrong before anything was started.
    """
    warn_of_variables()
    check_front(settings)
    check_access(settings)
    check_peers(settings)
    check_workers(settings)
    check_traces()
    gateways_why = ""
    if settings.gateways is None and not settings.control_endpoint:  # those of other hosts name each of ours
        settings, gateways_why = with_gateways(settings, usable_cores(), on_gpu=serves_on_gpu(settings))
    if not settings.registration_token:  # only workers that were started here may register
        settings = settings.model_copy(update={"registration_token": secrets.token_hex(32)})
    if settings.guards_its_door and not settings.prefix_salt_secret:  # one for all gateways
        settings = settings.model_copy(update={"prefix_salt_secret": secrets.token_hex(32)})
    with ExitStack() as stack:
        run_dir = stack.enter_context(run_folder(settings.run_dir))
        ports = choose_ports(settings)
        others = {
            *ports,
            settings.admin_port or 0,
            settings.openai or 0,
            *(of_model for _, of_model in model_ports(settings)),
        }
        port = settings.port or free_port(settings.host, others)
        if settings.num_gateways > 1:
            stack.enter_context(held_port(settings.host, port))
        openai_port = settings.openai or (None if settings.openai is None else free_port(settings.openai_host, others))
        plans = plan_processes(settings, run_dir=run_dir, port=port, ports=ports, openai_port=openai_port)
        address = join_address(reachable(settings.host), port)
        stack.enter_context(recorded(record_of(address, run_dir, plans, metrics_host=settings.metrics_host)))
        return asyncio.run(_serve(settings, plans, run_dir, port, gateways_why))


def with_gateways(settings: ServeSettings, num_cores: int, *, on_gpu: bool) -> tuple[ServeSettings, str]:
    """The settings with a number of gateways, and what the summary says of it."""
    number = choose_gateways(num_cores, num_workers=settings.workers * len(settings.model), on_gpu=on_gpu)
    where = f"beside a GPU with {num_cores} cores" if on_gpu else f"since the model computes on the {num_cores} cores"
    return settings.model_copy(update={"gateways": number}), f"{number}, {where} (--gateways)"


async def _serve(
    settings: ServeSettings, plans: Sequence[ProcessPlan], run_dir: Path, port: int, gateways_why: str
) -> int:
    started_s = time.monotonic()
    console = Console(stderr=True)
    view = StartupView(plans, console=console, level=settings.log_level, style=_line_style(settings, console))
    notice = view.notice
    service = _make_service(settings, plans, run_dir, view, notice)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, service, notice)
    announcer = asyncio.create_task(_announce(settings, plans, run_dir, port, started_s, service, view, gateways_why))
    announcer.add_done_callback(lambda task: _on_announced(task, view.notice))
    try:
        code = await service.run()
    finally:
        announcer.cancel()
        await asyncio.gather(announcer, return_exceptions=True)
        view.close()
    if service.failure:
        raise CliError("the service could not go on", service.failure, "the lines above say why")
    return code


def _make_service(
    settings: ServeSettings, plans: Sequence[ProcessPlan], run_dir: Path, view: StartupView, notice: Notice
) -> Service:
    kept = []
    for plan in plans:
        command = command_line(plan.role.value, write_settings(plan.settings, run_dir / f"{plan.name}.toml"))
        child = Child(plan.name, command, environment() | dict(plan.variables), view.on_line)
        kept.append(keep(plan, child, RestartPolicy()))
    return Service(kept, drain_grace_s=settings.drain_grace_s, notice=notice)


async def _announce(
    settings: ServeSettings,
    plans: Sequence[ProcessPlan],
    run_dir: Path,
    port: int,
    started_s: float,
    service: Service,
    view: StartupView,
    gateways_why: str,
) -> None:
    """Print the summary once the service answers; end the service where that takes too long."""
    address = join_address(reachable(settings.host), port)
    try:
        waiting = wait_until_ready(_asked_at(plans) or address, plans, metrics_host=reachable(settings.metrics_host))
        async with asyncio.timeout(settings.startup_timeout_s):
            served = await waiting
    except TimeoutError:
        service.failure = f"not ready after {settings.startup_timeout_s:g} s (--startup-timeout-s)"
        service.advance(Stage.STOPPING)
        return
    service.on_ready()
    view.on_ready()
    ready_after_s = time.monotonic() - started_s
    models = model_summaries(served, list(view.loaded.values()))
    with contextlib.suppress(OSError):  # nobody reads stdout
        summary = service_summary(settings, address, plans, models, page=view.page, ready_after_s=ready_after_s)
        show_summary(replace(summary, gateways=gateways_why))
    (run_dir / READY_FILE).write_text(address + "\n")


def _asked_at(plans: Sequence[ProcessPlan]) -> str | None:
    """Where gateways that guard their door are asked whether they are ready; None where their port tells."""
    sockets = [each.status_socket for each in plans if each.status_socket is not None]
    return f"unix:{sockets[0].absolute()}" if sockets else None


def _on_announced(announcer: asyncio.Task[None], notice: Notice) -> None:
    """A summary that could not be made is told; the service goes on."""
    if not announcer.cancelled() and (error := announcer.exception()) is not None:
        notice(f"no summary: {type(error).__name__}: {error}")


def show_summary(summary: ServiceSummary) -> None:
    """To stdout: a box on a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        Console().print(boxed(summary))
    else:
        print(plain(summary), flush=True)  # noqa: T201


def choose_ports(settings: ServeSettings) -> list[int]:
    """A metrics port for each process; raises CliError naming the flag of one that is busy.

    The ports that were asked for come first: one that the system chooses is none of them.
    """
    chosen = [(settings.host, settings.port, "port"), (settings.host, settings.admin_port, "admin_port")]
    chosen += [(settings.openai_host, settings.openai, "openai")]
    chosen += [(settings.page_host, settings.page_port or 0, "page_port")] if settings.page != "off" else []
    chosen += [(settings.host, port, "model_port") for _, port in model_ports(settings)]
    chosen += [(settings.metrics_host, port, name) for name, port in metrics_ports(settings)]
    numbers = [port for _, port, _ in chosen if port]
    if len(set(numbers)) != len(numbers):
        raise CliError(
            "two listeners want one port",
            f"ports are {sorted(numbers)}",
            "change --port, --admin-port, --page-port, --model-port, --openai, --metrics-port or --worker-metrics-port",
        )
    for host, port, name in chosen:
        if port:
            require_free(host, port, name)
    taken = set(numbers)
    return [port or free_port(settings.metrics_host, taken) for _, port in metrics_ports(settings)]


def _on_signal(service: Service, notice: Notice) -> None:
    service.on_signal()
    if service.stage is Stage.DRAINING:
        notice("draining: requests in flight finish, new ones are refused; once more stops at once")
    else:
        notice("stopping")


def _line_style(settings: ServeSettings, console: Console) -> LineStyle:
    if settings.log_format == "auto":
        return LineStyle.PEOPLE if console.is_terminal else LineStyle.PROGRAMS
    return LineStyle.PROGRAMS if settings.log_format == "json" else LineStyle.PEOPLE
