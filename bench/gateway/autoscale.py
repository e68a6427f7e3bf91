"""What `--autoscale` does over a day: GPU hours, waits and flaps, beside fixed numbers of workers.

    python -m bench.gateway.autoscale [--trace FILE] [--hours 24] [--json out/autoscale.json]

The requests are those of the Azure chat trace of 2023 (58 minutes), repeated; of each hour of the day a share is kept,
so that the load rises from 15 % at four in the morning to all of it at four in the afternoon. Workers are simulated in
steps of half a second: a prompt takes prefill time, those that run share steps whose time grows with their number, each
holds KV tokens. The policy is the product's own (`cli/serve/autoscale.py`), at its defaults, and sees what it would
see.
"""

import argparse
import csv
import itertools
import json
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from octavo.cli.serve.autoscale import AutoscalePolicy, AutoscaleState, Demand, next_state

TICK_S = 0.5
LOOK_S = 1.0
WINDOW_S = 10.0
FLAP_S = 600.0
TRACE = Path("../shared/data/traces/AzureLLMInferenceTrace_conv.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One worker, roughly a 32B model on one H100: prompt tokens per second; seconds of a step, and seconds more for
    each output in it; outputs at once; KV tokens; seconds until a new worker takes requests."""

    prefill_tokens_per_s: float = 8000.0
    step_s: float = 0.022
    step_per_output_s: float = 0.00015
    max_num_seqs: int = 64
    kv_tokens: int = 120_000
    start_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the trace."""

    time_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One simulated worker."""

    machine: Machine
    ready_s: float
    is_leaving: bool = False
    debt_s: float = 0.0
    held: int = 0
    waiting: deque[Arrival] = field(default_factory=deque)
    left: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float64))
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def load(self) -> int:
        return len(self.left) + len(self.waiting)

    @property
    def usage(self) -> float:
        return max(self.held / self.machine.kv_tokens, len(self.left) / self.machine.max_num_seqs)

    def run(self, now_s: float, waits: list[float]) -> int:
        """Simulate one tick; returns how many outputs became complete. waits: gets the waits of requests that begin
        now."""
        machine, budget_s = self.machine, TICK_S - self.debt_s
        began: list[Arrival] = []
        while self.waiting and budget_s > 0 and len(self.left) + len(began) < machine.max_num_seqs:
            size = self.waiting[0].prompt_tokens + self.waiting[0].output_tokens
            if self.held + size > machine.kv_tokens and self.held:
                break
            arrival = self.waiting.popleft()
            self.held += size
            waits.append(max(0.0, now_s + TICK_S - budget_s - arrival.time_s))  # until its first step
            budget_s -= arrival.prompt_tokens / machine.prefill_tokens_per_s
            began.append(arrival)
        if began:
            self.left = np.append(self.left, [float(each.output_tokens) for each in began])
            self.sizes = np.append(self.sizes, [each.prompt_tokens + each.output_tokens for each in began])
        self.debt_s = max(0.0, -budget_s)
        if len(self.left) == 0 or budget_s <= 0:
            return 0
        self.left -= budget_s / (machine.step_s + machine.step_per_output_s * len(self.left))
        done = self.left <= 0
        self.held -= int(self.sizes[done].sum())
        self.left, self.sizes = self.left[~done], self.sizes[~done]
        return int(done.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a day. gpu_hours: of all workers, from the start of each to its end. flaps: changes that were
    reversed within ten minutes. changes: their total number."""

    name: str
    num_requests: int
    gpu_hours: float
    mean_workers: float
    max_workers: int
    queue_p50_s: float
    queue_p99_s: float
    queue_max_s: float
    changes: int
    flaps: int


def read_trace(path: Path) -> list[Arrival]:
    """The trace, with times relative to its first request."""
    with path.open(newline="") as file:
        rows = [(_seconds(row["TIMESTAMP"]), row) for row in csv.DictReader(file)]
    start_s = rows[0][0]
    return [Arrival(s - start_s, int(row["ContextTokens"]), int(row["GeneratedTokens"])) for s, row in rows]


def _seconds(text: str) -> float:
    whole, _, part = text.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{part or 0}")


def share_at(time_s: float) -> float:
    """Share of the trace's requests to keep, by time of day: 0.15 at four in the morning, 1 at four in the
    afternoon."""
    return 0.575 - 0.425 * math.cos(2 * math.pi * (time_s / 3600 - 4) / 24)


def a_day(trace: Sequence[Arrival], *, hours: float, pace: float, seed: int = 1) -> Iterator[Arrival]:
    """The trace repeated, pace times as dense, thinned by the time of day."""
    dice = np.random.default_rng(seed)
    length_s = (trace[-1].time_s + 1.0) / pace
    for turn in range(math.ceil(hours * 3600 / length_s)):
        kept = dice.random(len(trace))
        for arrival, draw in zip(trace, kept, strict=True):
            time_s = turn * length_s + arrival.time_s / pace
            if time_s >= hours * 3600:
                return
            if draw < share_at(time_s):
                yield Arrival(time_s, arrival.prompt_tokens, arrival.output_tokens)


def simulate(
    arrivals: Iterator[Arrival],
    machine: Machine,
    *,
    hours: float,
    name: str,
    fixed: int = 0,
    policy: AutoscalePolicy | None = None,
) -> Result:
    """Simulate with a fixed number of workers, or with the number that the policy chooses."""
    first = fixed or (policy.floor if policy else 1)
    workers = [Worker(machine=machine, ready_s=0.0) for _ in range(first)]
    state = AutoscaleState(wanted=first)
    waits: list[float] = []
    recent: deque[tuple[float, int, int]] = deque()  # time, waits so far, outputs complete in the tick
    changes: list[tuple[float, int]] = []
    used_s, num_requests, most, coming = 0.0, 0, first, next(arrivals, None)
    for tick in range(int(hours * 3600 / TICK_S)):
        now_s = tick * TICK_S
        open_ = [each for each in workers if each.ready_s <= now_s and not each.is_leaving]
        while coming is not None and coming.time_s < now_s + TICK_S:
            min(open_, key=lambda each: each.load).waiting.append(coming)
            num_requests += 1
            coming = next(arrivals, None)
        seen = len(waits)
        complete = sum(each.run(now_s, waits) for each in workers if each.ready_s <= now_s)
        recent.append((now_s, seen, complete))
        while recent[0][0] < now_s - WINDOW_S:
            recent.popleft()
        used_s += TICK_S * len(workers)
        workers = [each for each in workers if not (each.is_leaving and each.load == 0)]
        if policy is not None and now_s % LOOK_S == 0:
            before = state.wanted
            state = next_state(policy, state, _seen(open_, waits, recent), now_s)
            if state.wanted != before:
                changes.append((now_s, state.wanted - before))
                _resize(workers, state.wanted, machine, now_s)
        most = max(most, len(workers))
    gone = np.array(waits or [0.0])
    return Result(
        name=name,
        num_requests=num_requests,
        gpu_hours=used_s / 3600,
        mean_workers=used_s / 3600 / hours,
        max_workers=most,
        queue_p50_s=float(np.percentile(gone, 50)),
        queue_p99_s=float(np.percentile(gone, 99)),
        queue_max_s=float(gone.max()),
        changes=len(changes),
        flaps=count_flaps(changes),
    )


def _seen(workers: Sequence[Worker], waits: Sequence[float], recent: "deque[tuple[float, int, int]]") -> Demand:
    """The demand, as `demand_of` computes it from a snapshot."""
    last = waits[recent[0][1] :]
    pace = max(sum(each[2] for each in recent) / WINDOW_S, 1.0)
    waiting = sum(len(each.waiting) for each in workers)
    slots = sum(len(each.left) for each in workers) / (len(workers) * workers[0].machine.max_num_seqs)
    held = sum(each.held for each in workers) / (len(workers) * workers[0].machine.kv_tokens)
    p95 = float(np.percentile(last, 95)) if last else 0.0
    return Demand(num_workers=len(workers), queue_s=max(p95, waiting / pace), usage=min(1.0, max(slots, held)))


def _resize(workers: list[Worker], wanted: int, machine: Machine, now_s: float) -> None:
    staying = [each for each in workers if not each.is_leaving]
    for each in staying[wanted:]:
        each.is_leaving = True
        for arrival in each.waiting:  # a leaving worker hands over what it has not begun
            staying[0].waiting.append(arrival)
        each.waiting.clear()
    workers += [Worker(machine=machine, ready_s=now_s + machine.start_s) for _ in range(wanted - len(staying))]


def count_flaps(changes: Sequence[tuple[float, int]]) -> int:
    """Changes within ten minutes of the one before that go in the other direction."""
    return sum(a[1] * b[1] < 0 and b[0] - a[0] < FLAP_S for a, b in itertools.pairwise(changes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--pace", type=float, default=2.0, help="times the trace's own pace, at the height of the day")
    parser.add_argument("--fixed", default="2,3,4,5,6")
    parser.add_argument("--bounds", default="1:8")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not asked.trace.exists():
        print(f"left out: there is no trace at {asked.trace}", file=sys.stderr)
        return 0
    trace, machine = read_trace(asked.trace), Machine()
    low, high = map(int, asked.bounds.split(":"))

    def day() -> Iterator[Arrival]:
        return a_day(trace, hours=asked.hours, pace=asked.pace)

    results = []
    heads = ("GPU h", "mean", "most", "p50 s", "p99 s", "max s", "changes", "flaps")
    print(f"{'workers':<16}" + "".join(f"{head:>9}" for head in heads))
    choices: list[tuple[str, int, AutoscalePolicy | None]] = [
        *((number, int(number), None) for number in asked.fixed.split(",")),
        (f"autoscale {low}:{high}", 0, AutoscalePolicy(floor=low, ceiling=high)),
    ]
    for name, fixed, policy in choices:
        one = simulate(day(), machine, hours=asked.hours, name=name, fixed=fixed, policy=policy)
        results.append(one)
        figures = [f"{one.gpu_hours:.1f}", f"{one.mean_workers:.2f}", f"{one.max_workers}", f"{one.queue_p50_s:.2f}"]
        figures += [f"{one.queue_p99_s:.2f}", f"{one.queue_max_s:.1f}", f"{one.changes}", f"{one.flaps}"]
        print(f"{one.name:<16}" + "".join(f"{figure:>9}" for figure in figures), flush=True)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        told = {"machine": asdict(machine), "pace": asked.pace, "hours": asked.hours}
        asked.json.write_text(json.dumps(told | {"results": [asdict(each) for each in results]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
