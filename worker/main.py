"""The worker process: loads the model, assembles engine and links, and runs until it is asked to end.

The engine runs in the main thread; heartbeat, metrics endpoint and shutdown timer run beside it. Ready means
registered, and a worker registers only after loading and warm-up.
"""

import gc
import importlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import metadata

import structlog
from prometheus_client import CollectorRegistry

from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.wire.curve import CurveKeys
from octavo.wire.endpoints import require_proof
from octavo.wire.host import let_threads_sleep, pid_namespace, raise_descriptor_limit
from octavo.wire.keys import load_keys, load_public_key
from octavo.wire.logs import configure_logs
from octavo.wire.messages import Register
from octavo.worker.config import PrefixCacheMode, RunnerKind, WorkerConfig
from octavo.worker.engine.engine import Engine, EngineConfig
from octavo.worker.grammar.manager import EarlyVocabulary, make_grammar_manager
from octavo.worker.loading.loaded import Loaded, Meanwhile, load_oracle
from octavo.worker.loading.progress import LoggedProgress, OnProgress
from octavo.worker.metrics import (
    BusyLog,
    CacheInfo,
    InfoCollector,
    MetricsServer,
    RankCollector,
    SnapshotCollector,
    StepMetrics,
)
from octavo.worker.runners.group import EXIT_LOST, GroupLost
from octavo.worker.scheduler.scheduler import Scheduler
from octavo.worker.shutdown import Shutdown
from octavo.worker.transport.endpoints import GatewayEndpoints
from octavo.worker.transport.heartbeat import HeartbeatThread
from octavo.worker.transport.link import WorkerLink
from octavo.worker.transport.watchdog import Watchdog

EXIT_FAILED = 70

log = structlog.get_logger(__name__)

GOODBYE_S = 1.0  # for the last message to be sent
CPU_ISA_VARIABLE = "OCTAVO_CPU_ISA"  # model/cpu/isa.py reads it


def main(config: WorkerConfig, *, on_progress: OnProgress | None = None) -> int:
    """Serve until drained or stopped. Returns 0 (ended as asked), 70 (the engine failed), 75 (a rank was lost), 76 (a
    gateway refused it). A hang ends the process with 75 or 1 (`worker.transport.watchdog`); a hang after a signal, with
    the code that would have been returned (`worker.shutdown`).

    on_progress: called with the progress of the start; by default that is logged. Raises what prevents a start:
    CheckpointError, CardError, DoesNotFit, EndpointError, KeyFileError, RunnerError, ValueError, OSError (GroupLost
    included).
    """
    configure_logs(config.log_format, config.log_level)
    shutdown = Shutdown(grace_s=config.drain_grace_s)
    shutdown.install()
    raise_descriptor_limit()
    curve = _curve(config)
    gateways = _gateways(config)
    log.info("starting", model=config.model, runner=config.runner.value, device=config.device, pid=os.getpid())
    early = EarlyVocabulary()
    loaded = _load(config, on_progress or LoggedProgress(), early.read)
    with ExitStack() as stack:
        engine = _assemble(config, loaded, early, curve, gateways, shutdown, stack)
        return _run(engine, shutdown)


def _load(config: WorkerConfig, on_progress: OnProgress, meanwhile: Meanwhile) -> Loaded:
    if config.runner is RunnerKind.ORACLE and config.tensor_parallel_size == 1:
        return load_oracle(config, on_progress)
    let_threads_sleep()
    if config.cpu_isa is not None:
        os.environ[CPU_ISA_VARIABLE] = config.cpu_isa
    importlib.import_module("octavo.model.cpu.isa").hide_instructions()  # before torch computes
    from octavo.worker.loading.group import load_group  # imports torch, which the oracle does without

    gc.freeze()  # what is imported stays: the collection before the first request need not walk it, for 0.1 s
    return load_group(config, on_progress, meanwhile)


def _assemble(
    config: WorkerConfig,
    loaded: Loaded,
    early: EarlyVocabulary,
    curve: CurveKeys | None,
    gateways: GatewayEndpoints,
    shutdown: Shutdown,
    stack: ExitStack,
) -> Engine:
    """Create everything that runs; the stack closes it in reverse order."""
    register = _register(config, loaded)
    link = WorkerLink(gateways.endpoints, register, loaded.tokenizer_files, curve=curve)
    stack.callback(link.close)
    stack.callback(gateways.close)
    gateways.follow(link.dial)
    stack.callback(link.linger, GOODBYE_S)
    registry = CollectorRegistry()
    metrics = StepMetrics(registry)
    blocks = BlockManager(_blocks_config(config, loaded))
    engine = Engine(
        config=EngineConfig(epoch=register.epoch, audit_every_steps=config.audit_every_steps),
        scheduler=Scheduler(loaded.scheduler, blocks),
        blocks=blocks,
        runner=loaded.runner,
        inbox=link,
        outbox=link,
        clock=time.monotonic,
        observer=BusyLog(metrics, lambda: engine.stats),
        grammars=make_grammar_manager(config.grammars, loaded, registry, wake=link.wake, early=early),
    )
    shutdown.attach(engine, link.wake)
    link.on_refused = shutdown.refuse
    registry.register(SnapshotCollector(lambda: engine.stats, link.stats, lambda: tuple(link.welcomed.values())))
    cache = CacheInfo(
        dtype=loaded.card.kv_cache_dtype,
        has_prefix_cache=config.prefix_cache is PrefixCacheMode.ON,
        host_bytes=loaded.host_bytes,
        is_host_pinned=loaded.is_host_pinned,
    )
    registry.register(InfoCollector(loaded.card, loaded.capacity, version=_version(), cache=cache))
    registry.register(RankCollector(loaded.card.tensor_parallel_size, loaded.read_ranks))
    metrics_port = _serve_metrics(config, registry, stack, lambda: _why_not_ready(engine, link))
    heartbeat = HeartbeatThread(
        register.epoch,
        lambda: engine.stats,
        lambda: link.welcomed,
        interval_s=config.heartbeat_interval_s,
        curve=curve,
        watchdog=Watchdog(stall_timeout_s=config.stall_exit_s),
    )
    stack.callback(heartbeat.close)
    gc.collect()
    gc.freeze()  # later collections skip the objects that the start left
    heartbeat.start()
    _log_loaded(register.worker_id, loaded, metrics_port)
    return engine


def _log_loaded(worker_id: str, loaded: Loaded, metrics_port: int | None) -> None:
    for note in loaded.notes:
        log.warning("model_note", note=note)
    log.info(
        "loaded",
        worker_id=worker_id,
        model=loaded.card.name,
        device=loaded.device,
        products=loaded.products,
        dtype=loaded.card.dtype,
        tensor_parallel_size=loaded.card.tensor_parallel_size,
        num_blocks=loaded.num_blocks,
        block_size=loaded.block_size,
        num_host_blocks=loaded.num_host_blocks,
        host_bytes=loaded.host_bytes,
        max_model_len=loaded.card.max_model_len,
        metrics_port=metrics_port,
        notes=list(loaded.notes),
    )


def _run(engine: Engine, shutdown: Shutdown) -> int:
    try:
        engine.run()
    except GroupLost as lost:
        log.error("group_lost", error=str(lost))
        return EXIT_LOST
    except Exception:
        log.exception("engine_failed")
        return EXIT_FAILED
    log.info("ended", exit_code=shutdown.exit_code, num_steps=engine.num_steps)
    return shutdown.exit_code


def _register(config: WorkerConfig, loaded: Loaded) -> Register:
    return Register(
        worker_id=config.worker_id or f"{socket.gethostname()}-{os.getpid()}",
        epoch=secrets.token_hex(16),
        card=loaded.card,
        capacity=loaded.capacity,
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        token=config.registration_token,
    )


def _blocks_config(config: WorkerConfig, loaded: Loaded) -> BlockManagerConfig:
    return BlockManagerConfig(
        num_blocks=loaded.num_blocks,
        block_size=loaded.block_size,
        max_slots=loaded.scheduler.max_num_seqs,
        max_blocks_per_slot=loaded.blocks_per_slot,
        fingerprint=loaded.fingerprint,
        prefix_cache=PrefixCache(config.prefix_cache.value),
        num_host_blocks=loaded.num_host_blocks,
        max_copies_in=loaded.max_copies_in,
    )


def _serve_metrics(
    config: WorkerConfig, registry: CollectorRegistry, stack: ExitStack, why_not_ready: Callable[[], str | None]
) -> int | None:
    if config.metrics_port is None:
        return None
    server = MetricsServer(registry, host=config.metrics_host, port=config.metrics_port, why_not_ready=why_not_ready)
    stack.callback(server.close)
    return server.port


def _why_not_ready(engine: Engine, link: WorkerLink) -> str | None:
    """Why a readiness probe should fail; None if ready. Before the model is loaded, the port is closed."""
    if engine.stats.is_draining:
        return "this worker drains"
    return None if any(link.welcomed.values()) else "no gateway has taken this worker yet"


def _curve(config: WorkerConfig) -> CurveKeys | None:
    if config.curve is None:
        return None
    return CurveKeys(
        own=load_keys(config.curve.secret_key_file),
        gateway_public=load_public_key(config.curve.gateway_public_key_file),
    )


def _gateways(config: WorkerConfig) -> GatewayEndpoints:
    """Raises EndpointError."""
    check = partial(require_proof, has_key=config.curve is not None, has_token=bool(config.registration_token))
    return GatewayEndpoints(config.gateway_endpoints, config.gateway_endpoints_file, check=check)


def _version() -> str:
    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "unknown"
