"""The eight invariants at a quiesce point, told as a list: a soak goes on after a violation and reports it.

Builds on `FaultBench`, which checks a service that nothing else has happened to; here gateways die and are replaced,
and strangers' calls are in the counters too.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import grpc
import psutil

from tests.soak.asked import PATIENCE_S, Asked, complaint
from tests.soak.memory import MIB, Sample
from tests.support.faults.bench import BAD_LINES, POOL_THREADS, FaultBench, Resources
from tests.support.faults.callers import Call

METHODS = {"Generate": "/octavo.v1.InferenceService/Generate", "Complete": "/octavo.v1.InferenceService/Complete"}
LISTENERS_LEFT = 8  # descriptors: a socket that vanished is bound again, and its first listener stays open
ROOM_MIB = 256  # what attacks make the allocator keep; what grows is seen by its slope
OVERSHOOT_S = 5.0  # of a deadline, while this process competes with attackers of its own
NO_DESCRIPTOR = "socket.accept() out of system resource"
WORKER_FDS = 8  # more than in the beginning of a life: sockets of gateways that came and went


@dataclass(slots=True, kw_only=True)
class SoakBench(FaultBench):
    """born_s: when the present gateway was first there. log_at: how far the log was read."""

    born_s: float = 0.0
    log_at: int = 0
    foreign: int = 0  # calls of others at most, in the present gateway's life
    known: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 0))
    possible: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 0))
    num_checks: int = 0
    first_fds: dict[int, int] = field(default_factory=dict)  # of workers, by process

    async def settle_in(self) -> None:
        """A gateway is new: what it holds after a first few calls is what the checks compare with."""
        self.num_rpcs = 0
        await self.begin()
        self.known["Generate"] += self.num_rpcs
        self.possible["Generate"] += self.num_rpcs
        self.num_rpcs = 0
        self.gateways = [
            replace(
                each,
                thread_room=POOL_THREADS,
                num_fds=each.num_fds + LISTENERS_LEFT,
                rss_bytes=each.rss_bytes + ROOM_MIB * MIB,
            )
            for each in self.gateways
        ]

    def lost_gateway(self) -> None:
        """It was killed, now: the next one counts from nought."""
        self.born_s, self.foreign = time.monotonic(), 0
        self.known, self.possible = dict.fromkeys(METHODS, 0), dict.fromkeys(METHODS, 0)

    async def violations(
        self, asked: Sequence[Asked], probes: Sequence[Call], *, allowed: Collection[str]
    ) -> list[str]:
        """Everything that is wrong, now that nothing is asked any more. allowed: reasons that anybody may have got."""
        found = [problem for each in asked for problem in self._of_asked(each, allowed)]
        for name, check in self._checks(probes, allowed).items():
            self.num_checks += 1
            try:
                await check()
            except (AssertionError, OSError, grpc.RpcError, psutil.Error) as error:
                found.append(f"{name}: {str(error)[:500]}")
        return found

    def _of_asked(self, asked: Asked, allowed: Collection[str]) -> list[str]:
        self.num_checks += 1
        limit_s = OVERSHOOT_S + (asked.timeout_s if asked.timeout_s is not None else PATIENCE_S)
        took_s = asked.ended_s - asked.sent_s
        problems = [complaint(asked, self.model)]
        if not asked.ended_s or took_s > limit_s:
            problems.append(f"H: {asked.kind} took {took_s:.1f} s")
        if asked.code == "UNKNOWN":
            problems.append(f"P: {asked.error}")
        if asked.reason is not None and asked.is_patient and asked.reason not in allowed:
            problems.append(f"I: {asked.kind} ended with {asked.outcome}: {asked.error}")
        return [each for each in problems if each]

    def _checks(self, probes: Sequence[Call], allowed: Collection[str]) -> dict[str, Callable[[], Awaitable[object]]]:
        async def of_probes() -> None:
            self.check_calls(probes, limit_s=PATIENCE_S, victims={*allowed, "DEADLINE", "UNKNOWN"})

        async def of_blocks() -> None:
            await asyncio.to_thread(self.service.wait_until_idle)
            found = [audit.violations for audit in await asyncio.to_thread(self.service.audit)]
            assert not any(found), found

        async def of_log() -> None:
            self.check_log()

        async def of_workers() -> None:
            self._check_workers()

        return {
            "H I T": of_probes,
            "L": self.canary,
            "B": of_blocks,
            "R": self._check_resources,
            "R of workers": of_workers,
            "M": self._check_counters,
            "P": of_log,
        }

    def count(self, asked: Sequence[Asked], probes: Sequence[Call]) -> None:
        """Take calls into the account of the gateway that has them: those that it ended for sure, and all that it may
        have ended."""
        for each in asked:
            self._count("Complete" if each.kind == "unary" else "Generate", each)
        for call in probes:
            self._count("Generate", call)

    def _count(self, method: str, call: Asked | Call) -> None:
        if call.ended_s >= self.born_s:
            self.possible[method] += 1
        if call.sent_s > self.born_s and (call.error is None or call.reason not in ("UNKNOWN", "CancelledError")):
            self.known[method] += 1

    async def _check_counters(self) -> None:
        """M. What is counted lies between what we know and what may be; then nothing may be in flight."""
        num_canaries = self.num_rpcs
        page = await self.metrics()
        for name, method in METHODS.items():
            ended = page.total("octavo_requests_total", method=method)
            extra = num_canaries if name == "Generate" else 0
            low, high = self.known[name], self.possible[name] + self.foreign + extra
            assert low <= ended <= high, f"{name}: {ended:g} ended, not from {low} to {high}"
        self.possible["Generate"] += num_canaries
        self.num_rpcs = int(page.total("octavo_requests_total", method=METHODS["Generate"]))
        await self._check_metrics()
        self.num_rpcs = 0

    def check_log(self) -> None:
        """Nothing new that only a defect writes."""
        with self.service.log.open("rb") as log:
            log.seek(self.log_at)
            data = log.read()
        self.log_at += len(data)
        lines = data.decode(errors="replace").splitlines()
        bad = [n for n, line in enumerate(lines) if any(each in line for each in BAD_LINES)]
        # asyncio says so, with a traceback, where a scraper cannot be let in; it tries again by itself.
        bad = [n for n in bad if not any(NO_DESCRIPTOR in line for line in lines[max(0, n - 2) : n])]
        assert not bad, lines[bad[0] : bad[0] + 20]

    def _check_workers(self) -> None:
        for process in self.service.children("worker"):
            now = process.num_fds()
            first = self.first_fds.setdefault(process.pid, now)
            assert now <= first + WORKER_FDS, f"worker {process.pid} has {now} descriptors, had {first}"

    def samples(self, at_s: float) -> list[Sample]:
        """Of every gateway and worker, now."""
        return [
            Sample(
                role=role,
                pid=process.pid,
                at_s=at_s,
                age_s=time.time() - process.create_time(),
                rss_bytes=each.rss_bytes,
                num_fds=each.num_fds,
                num_threads=each.threads.total(),
            )
            for role in ("gateway", "worker")
            for process in self.service.children(role)
            for each in [Resources.of(process)]
        ]
