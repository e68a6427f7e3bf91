"""`octavo ps`: what serves on this machine, or at one address."""

import contextlib
import http.client
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import grpc
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.cli.client.connect import connect
from octavo.cli.serve.launch import Role
from octavo.cli.serve.readiness import Samples, answers_http, read_metrics
from octavo.cli.serve.record import ProcessRecord, ServiceRecord, running_services
from octavo.cli.settings.addresses import join_address, split_address
from octavo.cli.settings.groups import CallSettings
from octavo.client.errors import OctavoError
from octavo.v1 import load_pb2, model_pb2

TIMEOUT_S = 2.0
REMOTE_TIMEOUT_S = 10.0
_CONDITIONS = {
    load_pb2.WORKER_CONDITION_READY: "ready",
    load_pb2.WORKER_CONDITION_DRAINING: "draining",
    load_pb2.WORKER_CONDITION_LOST: "down",
}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
HEADS = ("service", "address", "process", "pid", "model", "ranks", "state", "requests", "kv", "hits", "uptime")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process of a service; figures are None if unknown.

    state: ready, loading (answers nobody yet), waiting (for a gateway to accept it, or for a host), draining, down (not
        running now).
    model: by its name; checkpoint: as --model has it, if this machine knows.
    requests: a gateway's in flight; a worker's running or queued.
    kv_usage: of its blocks, 0 to 1.
    cache_hit_rate: of its prompts' tokens since its start, 0 to 1; None before the first.
    ranks: of a tensor-parallel worker.
    address: where callers reach a gateway on another host, of which nothing else is known here.
    model_addresses: the same, for callers who name a model by the port.
    """

    name: str
    role: str
    state: str
    model: str = ""
    checkpoint: str = ""
    url: str = ""
    address: str = ""
    model_addresses: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    uptime_s: float | None = None
    requests: int | None = None
    kv_usage: float | None = None
    cache_hit_rate: float | None = None
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """One service: its supervisor's pid and uptime, if it is on this machine."""

    address: str
    state: str
    requests: int | None = None
    pid: int | None = None
    uptime_s: float | None = None
    run_dir: str | None = None
    processes: tuple[ProcessState, ...] = field(default=())


def show_local(*, as_json: bool) -> int:
    """Every service of this user on this machine. Raises RunDirError."""
    records = running_services()
    with ThreadPoolExecutor(max_workers=16) as asking:
        services = [_look(record, asking) for record in records]
    if not services and not as_json:
        print("nothing of this user serves here; `octavo serve` starts a service", file=sys.stderr)  # noqa: T201
    else:
        _show(services, as_json=as_json)
    return 0


def show_remote(settings: CallSettings, *, as_json: bool) -> int:
    """The service at one address: its workers if it reports them, else its models. Raises OctavoError if nothing
    answers."""
    address = join_address(settings.host, settings.port)
    with connect(settings) as client:
        try:
            with contextlib.closing(client.watch_load(timeout_s=REMOTE_TIMEOUT_S)) as watch:
                found = _of_snapshot(address, next(watch))
        except OctavoError as error:
            if error.code not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED):
                raise
            found = _of_models(address, client.models(timeout_s=REMOTE_TIMEOUT_S))
    _show([found], as_json=as_json)
    return 0


def _of_snapshot(address: str, snapshot: load_pb2.WatchLoadResponse) -> ServiceState:
    gateways = [
        ProcessState(
            name=gateway.gateway,
            role=Role.GATEWAY.value,
            state="draining" if gateway.is_draining else "ready",
            requests=gateway.num_in_flight,
        )
        for gateway in snapshot.gateways
    ]
    workers = [
        ProcessState(
            name=worker.worker_id,
            role=Role.WORKER.value,
            state=_CONDITIONS.get(worker.condition, "loading"),
            model=worker.model,
            requests=worker.num_running + worker.num_waiting + worker.num_paused,
            kv_usage=worker.blocks.num_active / max(1, worker.blocks.num_blocks),
            cache_hit_rate=_share(worker.num_hit_tokens, worker.num_queried_tokens),
            ranks=worker.tensor_parallel_size or None,
        )
        for worker in snapshot.workers
    ]
    processes = (*gateways, *workers)
    state = _overall(processes) if workers else "loading"
    return ServiceState(address=address, state=state, requests=snapshot.total.num_in_flight, processes=processes)


def _of_models(address: str, models: Sequence[model_pb2.ModelInfo]) -> ServiceState:
    processes = tuple(
        ProcessState(
            name=f"{model.num_workers} worker{'s' * (model.num_workers != 1)}",
            role=Role.WORKER.value,
            state="ready",
            model=model.name,
            ranks=model.tensor_parallel_size or None,
        )
        for model in models
    )
    return ServiceState(address=address, state="ready" if models else "loading", processes=processes)


def _look(record: ServiceRecord, asking: ThreadPoolExecutor) -> ServiceState:
    pids = record.child_pids()
    told: list[Samples] = []
    if any(_is_worker_elsewhere(each) for each in record.processes):
        here = [each for each in record.processes if each.role == Role.GATEWAY.value and each.metrics]
        told += asking.map(lambda each: read_metrics(f"http://{each.metrics}/metrics"), here)

    def look(each: ProcessRecord) -> ProcessState:
        return _told_by_gateways(each, told) if _is_worker_elsewhere(each) else _look_at(each, pids.get(each.name))

    processes = tuple(asking.map(look, record.processes))
    gateways = [each for each in processes if each.role == Role.GATEWAY.value]
    in_flight = [each.requests for each in gateways if each.requests is not None]
    return ServiceState(
        address=record.address,
        state=_overall(processes),
        requests=sum(in_flight) if in_flight else None,
        pid=record.pid,
        uptime_s=record.uptime_s,
        run_dir=record.run_dir,
        processes=processes,
    )


def _overall(processes: Sequence[ProcessState]) -> str:
    """ready if all are; else the state of the first that is not."""
    return next((each.state for each in processes if each.state != "ready"), "ready")


def _is_worker_elsewhere(process: ProcessRecord) -> bool:
    return process.is_placed and process.role == Role.WORKER.value


def _told_by_gateways(process: ProcessRecord, told: Sequence[Samples]) -> ProcessState:
    """A worker on another host, as reported by the gateways of this one."""

    def values(name: str) -> list[float]:
        rows = (row for samples in told for row in samples.get(name, ()))
        return [value for labels, value in rows if labels.get("worker_id") == process.name]

    up, requests = values("octavo_worker_up"), values("octavo_worker_in_flight_requests")
    state = "draining" if process.is_leaving else "ready" if any(up) else "loading" if up else "waiting"
    return ProcessState(
        name=process.name,
        role=process.role,
        state=state,
        model=process.model,
        checkpoint=process.checkpoint,
        requests=int(sum(requests)) if requests else None,
    )


def _look_at(process: ProcessRecord, pid: int | None) -> ProcessState:
    """Query its /metrics, and a worker's /ready."""
    samples = read_metrics(f"http://{process.metrics}/metrics") if pid is not None and process.metrics else {}
    is_worker = process.role == Role.WORKER.value
    counted = ("octavo_num_requests_running", "octavo_num_requests_waiting", "octavo_num_requests_paused")
    return ProcessState(
        name=process.name,
        role=process.role,
        url=process.url,
        address=process.address,
        model_addresses=process.model_addresses,
        state=_state(process, pid, samples),
        model=process.model,
        checkpoint=process.checkpoint,
        pid=pid,
        uptime_s=None if pid is None else _uptime_s(pid),
        requests=_count(samples, *(counted if is_worker else ("octavo_gateway_requests",))),
        kv_usage=_total(samples, "octavo_kv_cache_usage_ratio") if is_worker else None,
        cache_hit_rate=_share(
            _total(samples, "octavo_prefix_cache_hits_total"), _total(samples, "octavo_prefix_cache_queries_total")
        ),
        ranks=_count(samples, "octavo_tensor_parallel_size") if is_worker else None,
    )


def _uptime_s(pid: int) -> float | None:
    with contextlib.suppress(psutil.Error):
        return max(0.0, time.time() - psutil.Process(pid).create_time())
    return None


def _state(process: ProcessRecord, pid: int | None, samples: Samples) -> str:
    if process.is_leaving:
        return "draining"
    if process.address:
        return "ready" if _accepts(process.address) else "down"
    if process.is_placed:
        return "waiting"
    if pid is None:
        return "down"
    if process.url:
        return "ready" if answers_http(process.url) else "loading"
    if not samples:
        return "loading"
    if process.role != Role.WORKER.value:
        return "draining" if _total(samples, "octavo_gateway_draining") else "ready"
    try:
        with _OPENER.open(f"http://{process.metrics}/ready", timeout=TIMEOUT_S):
            return "ready"
    except urllib.error.HTTPError as error:
        return "draining" if b"drain" in error.read() else "waiting"
    except (OSError, http.client.HTTPException):
        return "loading"


def _accepts(address: str) -> bool:
    """Whether anything accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection(split_address(address), timeout=TIMEOUT_S):
        return True
    return False


def _total(samples: Samples, name: str) -> float | None:
    return sum(value for _, value in samples[name]) if name in samples else None


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _count(samples: Samples, *names: str) -> int | None:
    found = [_total(samples, name) for name in names if name in samples]
    return int(sum(value or 0 for value in found)) if found else None


def _show(services: Sequence[ServiceState], *, as_json: bool) -> None:
    if as_json:
        for service in services:
            print(json.dumps(asdict(service)))  # noqa: T201
        return
    rows = [row for service in services for row in rows_of(service)]
    if not sys.stdout.isatty():
        print(_aligned([tuple(map(str.upper, HEADS)), *rows]))  # noqa: T201
        return
    table = Table(*HEADS, header_style="dim", box=None)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def rows_of(service: ServiceState) -> list[tuple[str, ...]]:
    """The service, then its processes: one row each, with a cell for each of HEADS."""
    pid, uptime = _shown(service.pid), shown_duration(service.uptime_s)
    rows: list[tuple[str, ...]] = [
        (pid, service.address, "-", pid, "-", "-", service.state, _shown(service.requests), "-", "-", uptime)
    ]
    for each in service.processes:
        what = (each.name, _shown(each.pid), each.model or "-", _shown(each.ranks), each.state)
        nowhere = each.role == Role.GATEWAY.value and each.state == "waiting"  # it has no host yet
        rows.append(
            (
                pid,
                each.url or each.address or ("-" if nowhere else service.address),
                *what,
                _shown(each.requests),
                _shown_share(each.kv_usage),
                _shown_share(each.cache_hit_rate),
                shown_duration(each.uptime_s),
            )
        )
    return rows


def shown_duration(seconds: float | None) -> str:
    """For example 3 d 04:05:06; - for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    days, clock = whole // 86400, f"{whole // 3600 % 24:02}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{days} d {clock}" if days else clock


def _shown(number: int | None) -> str:
    return "-" if number is None else str(number)


def _shown_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Aligned columns in whole lines, for pipes."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
