"""How many workers a model should have, from how long its requests wait and how full its workers are. Pure: takes the
current demand and the previous state, and returns the next state.

Scales up in steps proportional to the load, once the workers requested before have started; scales down one worker at a
time, after a long enough quiet period. `bench/gateway/autoscale.py` simulates a day of it.
"""

import math
import re
from dataclasses import dataclass, replace

from octavo.cli.errors import usage as usage_error
from octavo.cli.settings.groups import ServeSettings
from octavo.gateway.validation.limits import MAX_WORKERS
from octavo.v1 import load_pb2

MAX_GROWTH = 2.0  # factor on the number of workers, in one step
LONG_QUEUE = 4.0  # times the acceptable wait: beyond it, add at least half as many workers again
MISSED = 2.0  # times down_s: if more workers are needed again within it, the last removal was too early
MAX_PATIENCE = 4.0
QUIET_QUEUE = 0.25  # of the acceptable wait
QUIET_USAGE = 0.75  # of the acceptable usage, with one worker fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalePolicy:
    """floor, ceiling: limits of the number of workers. queue_s: acceptable wait. usage: acceptable share of KV blocks
    in use, or of the outputs that can run at once. up_s, down_s: time between two changes, up and down; scaling down
    also needs that much quiet before. A refused change is tried again after up_s."""

    floor: int
    ceiling: int
    queue_s: float = 2.0
    usage: float = 0.8
    up_s: float = 15.0
    down_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Of one model, now. num_workers: those that take requests. queue_s: how long requests wait. usage: how full its
    workers are, taken together, 0 to 1."""

    num_workers: int
    queue_s: float
    usage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleState:
    """State between two calls of `next_state`. wanted: target number of workers. quiet_since_s: None while it is not
    quiet. left_s: when a worker was last removed. patience: factor on down_s, raised when a removal proves too early.
    refused_s: when a change was last refused; refused: the target that was refused then."""

    wanted: int
    changed_s: float = -math.inf
    quiet_since_s: float | None = None
    left_s: float = -math.inf
    patience: float = 1.0
    refused_s: float = -math.inf
    refused: int | None = None


def refused(before: AutoscaleState, asked: AutoscaleState, *, size: int, now_s: float) -> AutoscaleState:
    """The state after a change was refused: `asked` is what `next_state` made of `before`, and there are still `size`
    workers. Keeps what was learned and drops what the change itself would have started."""
    is_growth = asked.wanted > size
    return replace(
        before,
        wanted=size,
        quiet_since_s=None if is_growth else before.quiet_since_s,
        refused_s=now_s,
        refused=asked.wanted if is_growth else before.refused,
    )


def next_state(policy: AutoscalePolicy, state: AutoscaleState, demand: Demand, now_s: float) -> AutoscaleState:
    """The next state."""
    wanted = min(max(state.wanted, policy.floor), policy.ceiling)
    may_ask = now_s - state.refused_s >= policy.up_s
    if wanted != state.wanted:
        return replace(state, wanted=wanted, changed_s=now_s, quiet_since_s=None) if may_ask else state
    if demand.num_workers == 0:  # no worker is ready: the load is unknown
        return replace(state, quiet_since_s=None)
    if demand.queue_s > policy.queue_s or demand.usage > policy.usage:
        state = replace(state, quiet_since_s=None)
        has_come = demand.num_workers >= wanted and now_s - state.changed_s >= policy.up_s
        more = _less(state, min(_grown(policy, demand), policy.ceiling)) if has_come and may_ask else wanted
        if more == wanted:
            return state
        was_missed = now_s - state.left_s < MISSED * policy.down_s
        patience = min(MAX_PATIENCE, 2 * state.patience) if was_missed else state.patience
        return replace(state, wanted=more, changed_s=now_s, patience=patience, refused=None)
    if wanted == policy.floor or demand.num_workers > wanted or not _is_quiet(policy, demand):
        return replace(state, quiet_since_s=None)
    since_s = now_s if state.quiet_since_s is None else state.quiet_since_s
    if now_s - max(since_s, state.changed_s) < state.patience * policy.down_s or not may_ask:
        return replace(state, quiet_since_s=since_s)
    has_gone_well = state.left_s == state.changed_s  # the last change was a removal as well
    patience = max(1.0, state.patience / 2) if has_gone_well else state.patience
    return replace(state, wanted=wanted - 1, changed_s=now_s, quiet_since_s=None, left_s=now_s, patience=patience)


def _grown(policy: AutoscalePolicy, demand: Demand) -> int:
    """The number of workers that brings usage down to the acceptable one; at least one more than now."""
    growth = min(MAX_GROWTH, demand.usage / policy.usage)
    if demand.queue_s > LONG_QUEUE * policy.queue_s:
        growth = max(growth, 1.5)
    return max(demand.num_workers + 1, math.ceil(demand.num_workers * growth))


def _less(state: AutoscaleState, more: int) -> int:
    """`more`, or half of the step that was refused last if `more` would be at least as large: there may be room for
    that."""
    if state.refused is None or more < state.refused:
        return more
    return state.wanted + max(1, (state.refused - state.wanted) // 2)


def _is_quiet(policy: AutoscalePolicy, demand: Demand) -> bool:
    """Whether the load would still be low with one worker fewer."""
    fewer = demand.num_workers - 1
    return (
        fewer > 0
        and demand.queue_s <= QUIET_QUEUE * policy.queue_s
        and demand.usage * demand.num_workers / fewer <= QUIET_USAGE * policy.usage
    )


def demand_of(snapshot: load_pb2.WatchLoadResponse, model: str) -> Demand:
    """The demand on a model in a snapshot of the service. queue_s is the 95th percentile of finished outputs' waits or,
    if larger, the wait of those queued now at the rate at which outputs finish."""
    ready = [
        each for each in snapshot.workers if each.model == model and each.condition == load_pb2.WORKER_CONDITION_READY
    ]
    figures = next((each.figures for each in snapshot.models if each.model == model), load_pb2.LoadFigures())
    waiting = sum(each.num_waiting for each in ready)
    pace = max(figures.finished_per_s, 1.0)
    blocks = sum(each.blocks.num_blocks for each in ready)
    slots = sum(each.max_num_seqs for each in ready)
    held = sum(each.blocks.num_active for each in ready) / blocks if blocks else 0.0
    running = sum(each.num_running for each in ready) / slots if slots else 0.0
    return Demand(
        num_workers=len(ready), queue_s=max(figures.queue_s.p95, waiting / pace), usage=min(1.0, max(held, running))
    )


def policy_of(settings: ServeSettings) -> AutoscalePolicy | None:
    """--autoscale, parsed; None if it is unset. Raises CliError."""
    if not settings.autoscale:
        return None
    low, _, high = settings.autoscale.partition(":")
    is_pair = re.fullmatch("[0-9]{1,9}:[0-9]{1,9}", settings.autoscale)
    if not is_pair or not 1 <= int(low) <= int(high) <= MAX_WORKERS:
        numbers = f"{settings.autoscale[:40]!r} is not MIN:MAX with 1 ≤ MIN ≤ MAX ≤ {MAX_WORKERS}"
        raise usage_error("bad value for --autoscale", numbers, "write it as 1:4")
    if settings.workers > int(high):
        numbers = f"--workers is {settings.workers}, and --autoscale {settings.autoscale} allows {int(high)} at most"
        raise usage_error("--workers and --autoscale contradict each other", numbers, "leave --workers out")
    return AutoscalePolicy(
        floor=int(low),
        ceiling=int(high),
        queue_s=settings.autoscale_queue_s,
        usage=settings.autoscale_usage,
        up_s=settings.autoscale_up_s,
        down_s=settings.autoscale_down_s,
    )
