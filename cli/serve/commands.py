"""The commands that run the service: serve, gateway, worker, and openai, which serve starts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.serve.parent import EXIT_DRAINED, die_with_supervisor, has_supervisor, told_to_supervisor
from octavo.cli.settings.groups import ALL_KEYS, FrontSettings, GatewaySettings, ServeSettings, WorkerSettings
from octavo.cli.settings.resolve import Resolved, resolve
from octavo.cli.settings.setting import Settings

if TYPE_CHECKING:
    import typer

PANEL = "Run a service"


def register(app: "typer.Typer") -> None:
    """Add the commands."""
    from octavo.cli.help import PlainCommand
    from octavo.cli.settings.options import with_settings

    app.command("serve", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(ServeSettings, ALL_KEYS)(serve))
    app.command("gateway", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(GatewaySettings, ALL_KEYS)(gateway))
    app.command("openai", cls=PlainCommand, hidden=True)(with_settings(FrontSettings, ALL_KEYS)(openai))
    app.command("worker", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(WorkerSettings, ALL_KEYS)(worker))


def serve(resolved: Resolved[ServeSettings]) -> int:
    """Serve on this host, or with --cluster on several: starts gateways and workers, restarts what dies.

    The first Ctrl-C or SIGTERM drains (requests in flight finish), the second stops.
    """
    die_with_supervisor()
    from octavo.cli.serve.serve import serve as run

    return run(resolved.settings)


@told_to_supervisor
def gateway(resolved: Resolved[GatewaySettings]) -> int:
    """One gateway process: gRPC in front, workers behind. For containers and several hosts; else use serve."""
    drained_code = EXIT_DRAINED if has_supervisor() else 0
    # Before numpy is imported, which would start a thread for each core; a gateway multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _begin()
    from octavo.cli.serve.launch import THREADS_OF_PROCESS
    from octavo.cli.serve.ports import require_threads
    from octavo.cli.serve.preflight import warn_of_variables
    from octavo.cli.settings.addresses import make_folders_of_sockets
    from octavo.cli.settings.gateway_config import check_access, gateway_config
    from octavo.cli.settings.key_files import require_keys, require_public_keys
    from octavo.gateway.main import main

    settings = resolved.settings
    warn_of_variables()
    check_access(settings)
    require_threads(THREADS_OF_PROCESS)
    config = gateway_config(settings)
    require_keys("--gateway-key-file", [settings.gateway_key_file] if settings.gateway_key_file else [])
    require_public_keys("--allowed-worker-keys", config.workers.allowed_key_files)
    make_folders_of_sockets("--worker-endpoint", settings.worker_endpoint)
    make_folders_of_sockets("--control-endpoint", [settings.control_endpoint] if settings.control_endpoint else [])
    return main(config, drained_code=drained_code)


@told_to_supervisor
def openai(resolved: Resolved[FrontSettings]) -> int:
    """OpenAI's HTTP interface in front of gateways of this host."""
    _begin()
    from octavo.gateway.config import TlsConfig
    from octavo.gateway.front.main import FrontConfig, main

    settings = resolved.settings
    cert, key = settings.tls_cert_file, settings.tls_key_file
    return main(
        FrontConfig(
            targets=settings.front_target,
            host=settings.openai_host,
            port=settings.openai or 0,
            tls=TlsConfig(cert_file=cert, key_file=key) if cert and key else None,
            max_body_bytes=settings.max_message_bytes,
            drain_grace_s=settings.drain_grace_s,
            log_format=settings.log_format,
            log_level=settings.log_level,
        )
    )


@told_to_supervisor
def worker(resolved: Resolved[WorkerSettings]) -> int:
    """One worker process: a model on a device, connected to gateways. For containers and several hosts."""
    _begin()
    from octavo.cli.serve.launch import threads_of_worker
    from octavo.cli.serve.ports import require_address, require_free, require_threads
    from octavo.cli.serve.preflight import (
        check_device_here,
        check_isa,
        check_model,
        check_numbers,
        check_ranks_have_a_model,
        serves_on_gpu,
        warn_of_variables,
    )
    from octavo.cli.settings.key_files import require_keys, require_public_keys
    from octavo.cli.settings.model_names import check_revision
    from octavo.cli.settings.setting import variable_of
    from octavo.cli.settings.worker_config import only_model, worker_config
    from octavo.worker.main import main

    warn_of_variables()
    check_ranks_have_a_model(resolved.settings)
    require_threads(threads_of_worker(resolved.settings, on_gpu=serves_on_gpu(resolved.settings)))
    if resolved.settings.runner == "torch":
        # Set before the first look at a checkpoint, which hides instructions from torch in this process and its
        # children.
        os.environ[variable_of("cpu_isa")] = resolved.settings.cpu_isa
        check_isa(resolved.settings.cpu_isa)
        check_device_here(resolved.settings.device)
        check_numbers(resolved.settings)
        check_revision(resolved.settings.model, resolved.settings.revision)
        check_model(only_model(resolved.settings), resolved.settings)
    config = worker_config(resolved.settings)
    if config.curve is not None:
        require_keys("--worker-key-file", [config.curve.secret_key_file])
        require_public_keys("--gateway-public-key-file", [config.curve.gateway_public_key_file])
    # Before the model is loaded, which may take minutes.
    require_address(resolved.settings.metrics_host, "metrics_host")
    if resolved.settings.worker_metrics_port:
        require_free(resolved.settings.metrics_host, resolved.settings.worker_metrics_port, "worker_metrics_port")
    return main(config)


def _begin() -> None:
    """What each process of a service does first."""
    die_with_supervisor()
    import octavo.wire.logs  # noqa: F401  (before all else that imports structlog, with which rich would come)


PROCESSES: dict[str, tuple[type[Settings], Callable[[Resolved[Any]], int]]] = {
    "gateway": (GatewaySettings, gateway),
    "openai": (FrontSettings, openai),
    "worker": (WorkerSettings, worker),
}


def run_process(name: str, config: Path) -> int:
    """`octavo NAME --config FILE`, as a supervisor starts it: without an option there is nothing to parse, and making
    the options of every command takes a third of a process's start."""
    group, command = PROCESSES[name]
    return command(resolve(group, {}, file=config, known_keys=ALL_KEYS))
