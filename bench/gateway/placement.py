"""What the choice of a worker alone does to hits and first tokens: `python -m bench.gateway.placement`.

The conversations and workers of `bench.gateway.routing` as discrete events: no process, no core that others hold, the
same figures on every machine. A step takes its time, with --noise-ms more, exponentially distributed; a worker computes
at most --max-batch-tokens in it, first come, first served, keeps blocks in an LRU and tells what it stored and forgot
at once, its free blocks with each heartbeat. Our router is the real one. Sticky: each conversation stays where the
longest beginning of it was sent, one that is new goes where least was sent (smg's cache_aware in short). Lot: drawn.
4 own, 4 told: four gateways with our router each; they know what they sent themselves, or what all have sent, at once.
Dynamo: by the cost of its KV router, with and without the blocks that requests hold. First token: ms, without any way
to the worker and back.
"""

import argparse
import heapq
import random
import statistics
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from itertools import count
from typing import Any

from bench.figures import percentile
from bench.gateway.conversations import QUESTION_WORDS, SYSTEM_WORDS, Shape
from bench.gateway.policies import BLOCK, POLICIES, Asked, Policy, names_of
from bench.gateway.stand_ins import Pace, Room

HEARTBEAT_MS = 200.0
NOT_HERE = {"late_ms", "max_waiting"}  # settings of the stand-ins that do not affect the choice


class Worker:
    """A simulated worker: its blocks and its queue."""

    def __init__(self, number: int, room: Room, pace: Pace, answer: int, policy: Policy) -> None:
        self.number, self._room, self._pace, self._answer, self._policy = number, room, pace, answer, policy
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._held = Counter[int]()
        self._num_own = 0
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.is_busy = False
        self.num_computed = 0

    @property
    def num_free(self) -> int:
        return self._room.num_blocks - len(self._held) - len(self._cached) - self._num_own

    def plan(self) -> tuple[list[tuple[Asked, int]], float]:
        """(request, prompt tokens) pairs of the next step, and the milliseconds that it takes."""
        decoding = [each for each in self.running if each.num_computed == each.num_prompt]
        left, steps = self._room.max_batch_tokens - len(decoding), [(each, 0) for each in decoding]
        for each in [*self.running, *self.waiting]:
            if each in decoding or left <= 0:
                continue
            is_full = len(self.running) >= self._room.max_num_seqs
            if each not in self.running and (is_full or not self._admit(each)):
                break
            num_tokens = min(left, each.num_prompt - each.num_computed)
            steps.append((each, num_tokens))
            left -= num_tokens
        num_tokens = sum(number for _, number in steps)
        self.num_computed += num_tokens
        return steps, self._pace.step_ms + self._pace.prompt_token_us / 1e3 * num_tokens

    def compute(self, asked: Asked, num_tokens: int) -> None:
        """Compute prompt tokens, or a token of the answer."""
        asked.num_computed += num_tokens
        self._store(asked, asked.num_computed)
        if asked.num_computed == asked.num_prompt:
            asked.token_ids.append(100 + asked.num_said)
            asked.num_said += 1
        if asked.num_said == self._answer:
            self._store(asked, len(asked.token_ids) - 1)
            for name in reversed(asked.names):
                self._held[name] -= 1
                if not self._held[name]:
                    del self._held[name]
                    self._cached[name] = None
            self._num_own -= asked.num_own
            self.running.remove(asked)

    def _admit(self, asked: Asked) -> bool:
        names = names_of(asked.token_ids[: asked.num_prompt - 1])
        missing = next((n for n, each in enumerate(names) if each not in self._held and each not in self._cached), None)
        hit = names[:missing]
        num_own = -(-(asked.num_prompt + self._answer) // BLOCK) - len(hit)
        if self.num_free + len(self._cached) - sum(name in self._cached for name in hit) < num_own:
            return False
        for name in hit:
            self._cached.pop(name, None)
            self._held[name] += 1
        while self.num_free < num_own:
            name, _ = self._cached.popitem(last=False)
            self._policy.on_removed(self.number, name)
        self._num_own += num_own
        asked.names, asked.num_own = hit, num_own
        asked.num_cached = asked.num_computed = BLOCK * len(hit)
        self.waiting.remove(asked)
        self.running.append(asked)
        return True

    def _store(self, asked: Asked, num_tokens: int) -> None:
        if num_tokens // BLOCK <= len(asked.names):
            return
        for name in names_of(asked.token_ids[:num_tokens])[len(asked.names) :]:
            begin = BLOCK * len(asked.names)
            if name not in self._held and name not in self._cached:
                parent = asked.names[-1] if asked.names else 0
                self._policy.on_stored(self.number, name, parent, asked.token_ids[begin : begin + BLOCK])
            self._cached.pop(name, None)
            self._held[name] += 1
            asked.names.append(name)
            asked.num_own -= 1
            self._num_own -= 1


class Simulation:
    """One run: workers, callers, and pending events. done: the turns that were answered."""

    def __init__(
        self, seed: int, policy: str, *, shape: Shape, room: Room, pace: Pace, num_workers: int, noise_ms: float
    ) -> None:
        self._shape, self._room, self._noise_ms = shape, room, noise_ms
        self._drawn, self._noise = random.Random(seed), random.Random(seed + 1)
        self._router = POLICIES[policy](num_workers, room)
        self.workers = [Worker(n, room, pace, shape.answer, self._router) for n in range(num_workers)]
        self.done: list[Asked] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()

    def run(self) -> None:
        """Run until every turn of every conversation is answered."""
        systems: dict[int, list[int]] = defaultdict(lambda: self._words(SYSTEM_WORDS))
        self._beat(0.0)
        for number in range(self._shape.conversations):
            system = systems[number % self._shape.systems]
            begin_ms = 1e3 * self._drawn.uniform(0, self._shape.begin_s)
            self._at(begin_ms, partial(self._ask, number, 0, system))
        while len(self.done) < self._shape.conversations * self._shape.turns:
            now_ms, _, what = heapq.heappop(self._events)
            what(now_ms)

    def _at(self, ms: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (ms, next(self._order), what))

    def _words(self, bounds: tuple[int, int]) -> list[int]:
        return [self._drawn.randrange(1000, 9000) for _ in range(self._drawn.randint(*bounds))]

    def _ask(self, conversation: int, turn: int, before: list[int], now_ms: float) -> None:
        token_ids = before + self._words(QUESTION_WORDS)
        asked = Asked(
            conversation=conversation, turn=turn, token_ids=token_ids, num_prompt=len(token_ids), begun_ms=now_ms
        )
        asked.worker = self._router.route(asked)
        self.workers[asked.worker].waiting.append(asked)
        self._start_step(self.workers[asked.worker], now_ms)

    def _start_step(self, worker: Worker, now_ms: float) -> None:
        if worker.is_busy or not (worker.waiting or worker.running):
            return
        steps, takes_ms = worker.plan()
        worker.is_busy = True
        late_ms = self._noise.expovariate(1 / self._noise_ms) if self._noise_ms else 0.0
        self._at(now_ms + takes_ms + late_ms, partial(self._end_step, worker, steps))

    def _end_step(self, worker: Worker, steps: Sequence[tuple[Asked, int]], now_ms: float) -> None:
        worker.is_busy = False
        for asked, num_tokens in steps:
            worker.compute(asked, num_tokens)
            if asked.num_said == 1:
                asked.first_ms = now_ms - asked.begun_ms
                self._router.on_first(asked)
            if asked.num_said == self._shape.answer:
                self._end_turn(asked, now_ms)
        self._start_step(worker, now_ms)

    def _end_turn(self, asked: Asked, now_ms: float) -> None:
        self._router.on_end(asked)
        self.done.append(asked)
        if asked.turn + 1 < self._shape.turns:
            think_ms = 1e3 * self._drawn.expovariate(1 / self._shape.think_s)
            self._at(now_ms + think_ms, partial(self._ask, asked.conversation, asked.turn + 1, asked.token_ids))

    def _beat(self, now_ms: float) -> None:
        self._router.on_heartbeat([1 - each.num_free / self._room.num_blocks for each in self.workers])
        self._at(now_ms + HEARTBEAT_MS, self._beat)


def simulate(
    seed: int, policy: str, *, shape: Shape, room: Room, pace: Pace, num_workers: int = 4, noise_ms: float = 0.0
) -> dict[str, Any]:
    """One run's figures."""
    run = Simulation(seed, policy, shape=shape, room=room, pace=pace, num_workers=num_workers, noise_ms=noise_ms)
    run.run()
    first_ms, computed = [each.first_ms for each in run.done], [each.num_computed for each in run.workers]
    return {
        "hit": sum(each.num_cached for each in run.done) / sum(each.num_prompt for each in run.done),
        "first_ms_p50": percentile(first_ms, 50),
        "first_ms_p99": percentile(first_ms, 99),
        "busiest_share": max(computed) / sum(computed),
    }


def main() -> None:
    """A line for each policy: means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--noise-ms", type=float, default=0.0)
    groups: dict[type[Any], Any] = {Shape: Shape(), Pace: Pace(), Room: Room(num_blocks=1500, max_num_seqs=256)}
    for group in groups.values():
        for each in (each for each in fields(group) if each.name not in NOT_HERE):
            default = getattr(group, each.name)
            parser.add_argument(f"--{each.name.replace('_', '-')}", type=type(default), default=default)
    given = parser.parse_args()
    values = vars(given)
    shape, pace, room = (
        kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values}) for kind in groups
    )
    print(f"{'policy':<8}{'hit':>8}{'p50':>10}{'p99 (worst)':>20}{'busiest':>10}")
    for policy in POLICIES:
        runs = [
            simulate(
                seed, policy, shape=shape, room=room, pace=pace, num_workers=given.workers, noise_ms=given.noise_ms
            )
            for seed in range(given.seeds)
        ]
        means = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        worst = max(run["first_ms_p99"] for run in runs)
        print(
            f"{policy:<8}{means['hit']:>8.1%}{means['first_ms_p50']:>7.0f} ms"
            f"{means['first_ms_p99']:>10.0f} ({worst:.0f}) ms{means['busiest_share']:>10.0%}"
        )


if __name__ == "__main__":
    main()
