"""What `octavo top` shows: a snapshot of the load as lines that fit a screen. Pure.

octavo top · 127.0.0.1:50051 · gateway-0                                    12:00:01
requests 12 in flight: 1 preparing, 3 waiting, 8 running, 0 paused · 2.1 done/s
tokens   1,204/s in, 812/s out
TTFT     p50 12.0 ms  p95 31.4 ms  p99 40.2 ms       (gaps and queue: a line each)

WORKER    MODEL       STATE  KV                 USED  RUN  WAIT  …
worker-0  folio-chat  ready  [█████▓▓▓▓▓·····]   33%    8     3  …

TENANT …      REQUEST …
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from octavo.v1 import load_pb2 as pb

HEAD = "bold dim"
ACTIVE, CACHED, FREE = ("█", "cyan"), ("▓", "blue"), ("·", "dim")
_STATES = {
    pb.WORKER_CONDITION_REGISTERED: ("loading", "yellow"),
    pb.WORKER_CONDITION_READY: ("ready", "green"),
    pb.WORKER_CONDITION_DRAINING: ("draining", "yellow"),
    pb.WORKER_CONDITION_LOST: ("lost", "bold red"),
}
_PHASES = {
    pb.REQUEST_PHASE_PREPARING: "preparing",
    pb.REQUEST_PHASE_QUEUED: "queued",
    pb.REQUEST_PHASE_PREFILL: "prefill",
    pb.REQUEST_PHASE_DECODE: "decode",
    pb.REQUEST_PHASE_PAUSED: "paused",
}
MOST_TENANTS = 5
MOST_EXTRA = 24
GAP = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class SortKey:
    """A way to sort requests: its key on the keyboard, its name, and the value that it sorts by."""

    key: str
    name: str
    of: Callable[[pb.RequestSnapshot], Any]


SORT_KEYS = (
    SortKey(key="a", name="age", of=lambda request: -request.age_s),
    SortKey(key="o", name="output", of=lambda request: -request.num_output_tokens),
    SortKey(key="p", name="prompt", of=lambda request: -request.num_prompt_tokens),
    SortKey(key="b", name="blocks", of=lambda request: -request.num_blocks),
    SortKey(key="s", name="state", of=lambda request: request.phase),
    SortKey(key="t", name="tenant", of=lambda request: request.tenant),
    SortKey(key="w", name="worker", of=lambda request: request.worker_id),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the user chose. note: what is wrong with the connection, else empty."""

    address: str
    sort: SortKey = SORT_KEYS[0]
    is_reversed: bool = False
    note: str = ""

    def pressed(self, key: str) -> "View":
        """The view after a key; unchanged for a key without meaning."""
        if key == "r":
            return replace(self, is_reversed=not self.is_reversed)
        found = next((each for each in SORT_KEYS if each.key == key), None)
        return self if found is None else replace(self, sort=found, is_reversed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of a table. least: screen width below which it is left out. is_text: left-aligned."""

    title: str
    width: int
    least: int = 0
    is_text: bool = False


def screen(snapshot: pb.WatchLoadResponse, view: View, *, width: int, height: int) -> list[Text]:
    """At most `height` lines, none wider than `width`. Rows without room are counted in a line."""
    head = _head(snapshot, view, width)
    keys = "  ".join(f"{each.key} {each.name}" for each in SORT_KEYS)
    foot = [_fit(Text(f"q quits  r turns round  sort: {keys}", style="dim"), width)]
    room = max(0, height - len(head) - len(foot))
    workers = _section(_WORKERS, [_worker(each) for each in snapshot.workers], width, min(room, 2 + max(2, room // 3)))
    room -= len(workers)
    tenants = [_tenant(each) for each in snapshot.tenants][:MOST_TENANTS]
    shown_tenants = _section(_TENANTS, tenants, width, min(room // 2, 2 + len(tenants))) if tenants else []
    room -= len(shown_tenants)
    requests = _section(_REQUESTS, [_request(each) for each in _sorted(snapshot, view)], width, room)
    body = [*head, *workers, *shown_tenants, *requests]
    body += [Text()] * (height - len(foot) - len(body))
    return [*body[: height - len(foot)], *foot]


def plain(snapshot: pb.WatchLoadResponse, view: View) -> str:
    """Everything, for a pipe."""
    width = 160
    sections = [
        _section(_WORKERS, [_worker(each) for each in snapshot.workers], width, 10_000),
        _section(_TENANTS, [_tenant(each) for each in snapshot.tenants], width, 10_000) if snapshot.tenants else [],
        _section(_REQUESTS, [_request(each) for each in _sorted(snapshot, view)], width, 10_000),
    ]
    lines = [*_head(snapshot, view, width), *(line for section in sections for line in section)]
    return "\n".join(line.plain.rstrip() for line in lines)


def _head(snapshot: pb.WatchLoadResponse, view: View, width: int) -> list[Text]:
    total = snapshot.total
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time_s))
    name = f"octavo top · {view.address} · {snapshot.gateway}"
    first = Text(name, style="bold").append(" " * max(1, width - len(name) - len(clock))).append(clock, "dim")
    counts = (
        f"{total.num_in_flight} in flight: {total.num_preparing} preparing, {total.num_waiting} waiting, "
        f"{total.num_running} running, {total.num_paused} paused"
    )
    pairs = [
        ("requests", f"{counts} · {total.finished_per_s:.1f} done/s"),
        ("tokens", f"{total.prompt_tokens_per_s:,.0f}/s in, {total.generation_tokens_per_s:,.0f}/s out"),
        ("TTFT", _percentiles(total.time_to_first_token_s)),
        ("gaps", _percentiles(total.inter_token_s)),
        ("queue", _percentiles(total.queue_s)),
    ]
    lines = [first, *(Text(f"{label:<9}", "dim").append(value) for label, value in pairs)]
    warnings = [view.note] if view.note else []
    warnings += ["the service drains: new requests are refused"] if snapshot.is_draining else []
    warnings += [f"no answer from {', '.join(snapshot.unreachable_gateways)}"] if snapshot.unreachable_gateways else []
    return [_fit(line, width) for line in [*lines, *(Text(each, "bold yellow") for each in warnings)]]


def _percentiles(found: pb.Percentiles) -> str:
    if not found.num_values:
        return "-"
    return "  ".join(f"p{name} {_seconds(getattr(found, f'p{name}'))}" for name in (50, 95, 99))


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


_WORKERS = (
    _Column(title="WORKER", width=12, is_text=True),
    _Column(title="MODEL", width=20, least=110, is_text=True),
    _Column(title="RANKS", width=5, least=130),
    _Column(title="STATE", width=8, is_text=True),
    _Column(title="KV", width=17, least=60, is_text=True),
    _Column(title="USED", width=4),
    _Column(title="RUN", width=4),
    _Column(title="WAIT", width=4),
    _Column(title="PAUSED", width=6, least=110),
    _Column(title="IN/s", width=7, least=74),
    _Column(title="OUT/s", width=7),
    _Column(title="STEPS/s", width=7, least=100),
    _Column(title="PREEMPTED", width=9, least=120),
)
_TENANTS = (
    _Column(title="TENANT", width=24, is_text=True),
    _Column(title="REQUESTS", width=8),
    _Column(title="RUN", width=4),
    _Column(title="WAIT", width=4),
    _Column(title="IN/s", width=7, least=60),
    _Column(title="OUT/s", width=7),
)
_REQUESTS = (
    _Column(title="REQUEST", width=24, is_text=True),
    _Column(title="TENANT", width=12, least=100, is_text=True),
    _Column(title="STATE", width=9, is_text=True),
    _Column(title="PROMPT", width=7),
    _Column(title="OUTPUT", width=7),
    _Column(title="BLOCKS", width=6, least=70),
    _Column(title="AGE", width=7),
    _Column(title="WORKER", width=12, least=84, is_text=True),
    _Column(title="MODEL", width=20, least=125, is_text=True),
    _Column(title="GATEWAY", width=12, least=145, is_text=True),
)


def _worker(worker: pb.WorkerSnapshot) -> tuple[Text, ...]:
    blocks = worker.blocks
    used = blocks.num_active / blocks.num_blocks if blocks.num_blocks else 0.0
    state, style = _STATES.get(worker.condition, ("?", ""))
    return (
        Text(worker.worker_id),
        Text(worker.model),
        Text(f"{max(1, worker.tensor_parallel_size)}"),
        Text(state, style),
        _bar(blocks),
        Text(f"{used:.0%}"),
        *(Text(f"{count:,}") for count in (worker.num_running, worker.num_waiting, worker.num_paused)),
        *(Text(f"{rate:,.0f}") for rate in (worker.prefill_tokens_per_s, worker.generation_tokens_per_s)),
        Text(f"{worker.steps_per_s:,.0f}"),
        Text(f"{worker.num_preemptions:,}"),
    )


def _bar(blocks: pb.KvBlocks, cells: int = 15) -> Text:
    """Blocks of requests, blocks of the prefix cache, and free ones; each that is not zero gets at least one cell."""
    total = blocks.num_blocks or 1
    num_active, num_cached = (
        min(cells, max(round(cells * count / total), count > 0)) for count in (blocks.num_active, blocks.num_cached)
    )
    num_cached = min(num_cached, cells - num_active)
    bar = Text("[")
    for (sign, style), count in ((ACTIVE, num_active), (CACHED, num_cached), (FREE, cells - num_active - num_cached)):
        bar.append(sign * count, style)
    return bar.append("]")


def _tenant(tenant: pb.TenantLoad) -> tuple[Text, ...]:
    figures = tenant.figures
    counts = (figures.num_in_flight, figures.num_running, figures.num_waiting)
    rates = (figures.prompt_tokens_per_s, figures.generation_tokens_per_s)
    return (Text(tenant.tenant), *(Text(f"{each:,}") for each in counts), *(Text(f"{each:,.0f}") for each in rates))


def _sorted(snapshot: pb.WatchLoadResponse, view: View) -> list[pb.RequestSnapshot]:
    found = sorted(snapshot.requests, key=view.sort.of)
    return found[::-1] if view.is_reversed else found


def _request(request: pb.RequestSnapshot) -> tuple[Text, ...]:
    blocks = f"{request.num_blocks:,}" if request.HasField("num_blocks") else "-"
    return (
        Text(request.request_id),
        Text(request.tenant or "-"),
        Text(_PHASES.get(request.phase, "?")),
        Text(f"{request.num_prompt_tokens:,}"),
        Text(f"{request.num_output_tokens:,}"),
        Text(blocks),
        Text(f"{request.age_s:,.1f}"),
        Text(request.worker_id or "-"),
        Text(request.model or "-"),
        Text(request.gateway),
    )


def _section(columns: Sequence[_Column], rows: Sequence[Sequence[Text]], width: int, room: int) -> list[Text]:
    """An empty line, the headings, as many rows as there is room for, and the number of rows left out."""
    if room < 3:
        return []
    shown = [index for index, column in enumerate(columns) if width >= column.least]
    first, *others = (columns[index] for index in shown)
    # Names are in the first column: it gets what the others leave.
    left = width - first.width - sum(column.width + len(GAP) for column in others)
    fitting = [replace(first, width=first.width + max(0, min(MOST_EXTRA, left))), *others]
    most = room - 2
    kept = rows if len(rows) <= most else rows[: max(0, most - 1)]
    lines = [Text(), _line([Text(column.title, HEAD) for column in fitting], fitting, width)]
    lines += [_line([row[index] for index in shown], fitting, width) for row in kept]
    if len(kept) < len(rows):
        lines.append(Text(f"… and {len(rows) - len(kept)} more", "dim"))
    return lines


def _line(cells: Sequence[Text], columns: Sequence[_Column], width: int) -> Text:
    line = Text()
    for cell, column in zip(cells, columns, strict=True):
        piece = cell.copy()
        piece.truncate(column.width, overflow="ellipsis")
        space = " " * (column.width - piece.cell_len)
        if column.is_text:
            line.append_text(piece).append(space)
        else:
            line.append(space).append_text(piece)
        line.append(GAP)
    return _fit(line, width)


def _fit(line: Text, width: int) -> Text:
    line.rstrip()
    line.truncate(width, overflow="ellipsis")
    return line
