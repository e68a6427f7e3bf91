"""A running service, what was true of it before a fault, and whether the eight common invariants hold after it.

B blocks balance · H nothing hangs · I bystanders are byte-identical · T victims' text is a beginning of theirs ·
R resources are back · M metrics reconcile · L a canary is served again · P the gateway lived, and nothing was UNKNOWN
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from octavo import AsyncClient
from octavo.worker.runners.oracle.model import OracleModel
from tests.support.faults.callers import Call, golden, run, run_all
from tests.support.services.scrape import Page, scrape
from tests.support.services.service import Service

CANARY_S = 30.0  # wanted: 2; far less on a quiet machine
RSS_SHARE = 0.05
RSS_SLACK_BYTES = 16 << 20  # of allocators; a leak of a stream or of blocks grows past it when repeated
# gRPC's pool grows while cores are busy, and keeps what it has while there is something to do now and then.
POOL_THREADS, POOL_NAME = 4, "event_engine"
NO_RETRIES = (("grpc.enable_retries", 0),)  # what callers see is the first answer
BAD_LINES = ("Task exception was never retrieved", "Traceback (most recent call last)", "was never awaited")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one process holds. threads: count by name. thread_room: this many more, of any name, are not a leak."""

    pid: int
    rss_bytes: int
    num_fds: int
    threads: Counter[str]
    thread_room: int = 0

    @classmethod
    def of(cls, process: psutil.Process) -> "Resources":
        """Now."""
        with process.oneshot():
            return cls(
                pid=process.pid,
                rss_bytes=process.memory_info().rss,
                num_fds=process.num_fds(),
                threads=Counter(_thread_names(process.pid)),
            )


def _thread_names(pid: int) -> Iterable[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # ended meanwhile
            yield (task / "comm").read_text().strip()


@dataclass(slots=True, kw_only=True)
class FaultBench:
    """Created when the service is ready and warm. model: the oracle that its workers run. metrics_port: the gateway's.
    num_rpcs: calls that were made, including those by others (`foreign_rpcs`). rss_slack_bytes: memory that may be
    kept."""

    service: Service
    model: OracleModel
    metrics_port: int
    gateways: list[Resources] = field(default_factory=list)
    num_rpcs: int = 0
    rss_slack_bytes: int = RSS_SLACK_BYTES
    epochs: set[str] = field(default_factory=set)  # of the workers, when they were last looked at

    async def begin(self) -> None:
        """Warm the service up, and record what it holds when idle."""
        await asyncio.to_thread(self.service.wait_until_supervised)
        async with AsyncClient(self.service.target) as client:
            await asyncio.gather(*(run(client, Call(prompt=[5, n + 10], max_tokens=4)) for n in range(32)))
        self.num_rpcs += 32
        await asyncio.to_thread(self.service.wait_until_idle)
        await self.note_gateways()

    async def note_gateways(self) -> None:
        """Take these gateways and workers, as they are now, as the baseline for the checks."""
        self.epochs = {load.epoch for load in await asyncio.to_thread(self.service.load)}
        self.gateways = [Resources.of(each) for each in self.service.children("gateway")]

    async def run(self, calls: Sequence[Call]) -> None:
        """Run all calls at once, with a client that is closed afterwards, so that its connection does not count as a
        leak."""
        self.num_rpcs += len(calls)
        async with AsyncClient(self.service.target, options=NO_RETRIES) as client:
            await run_all(client, calls)

    async def metrics(self) -> Page:
        """The gateway's metrics now."""
        return await asyncio.to_thread(scrape, self.metrics_port)

    async def num_ended(self) -> int:
        """Calls of Generate that the gateway has counted, by anyone."""
        page = await self.metrics()
        return round(page.total("octavo_requests_total", method="/octavo.v1.InferenceService/Generate"))

    async def until_workers(self, count: int, *, num_new: int, timeout_s: float = 60.0) -> float:
        """Wait until this many workers are registered, num_new of them since the last time, and requests are served.
        Returns the seconds it took."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < timeout_s:
            epochs = {load.epoch for load in await asyncio.to_thread(self.service.load)}
            if len(epochs) == count and len(epochs - self.epochs) == num_new:
                self.epochs = epochs
                await asyncio.to_thread(self.service.wait_until_ready)
                return time.monotonic() - start_s
            await asyncio.sleep(0.02)
        raise AssertionError(f"L: not {count} workers, {num_new} of them new, within {timeout_s} s")

    def check_calls(self, calls: Iterable[Call], *, limit_s: float, victims: Iterable[str] = ()) -> None:
        """H, I, T and P for calls alone, if the service is gone."""
        for call in calls:
            self._check_call(call, limit_s=limit_s, victims=set(victims))

    async def check(self, calls: Iterable[Call], *, limit_s: float, victims: Iterable[str] = ()) -> None:
        """Check all invariants after the fault. calls: everything that ran. limit_s: longest time that a call may have
        taken. victims: reasons that some calls may have ended with; all others must be complete."""
        self.check_calls(calls, limit_s=limit_s, victims=victims)
        await self.canary()
        await asyncio.to_thread(self.service.wait_until_idle)
        violations = [audit.violations for audit in await asyncio.to_thread(self.service.audit)]
        assert not any(violations), f"B: {violations}"
        await self._check_resources()
        await self._check_metrics()
        self.check_log()

    def _check_call(self, call: Call, *, limit_s: float, victims: set[str]) -> None:
        assert call.ended_s, f"H: {call.prompt} has no end"
        assert call.ended_s - call.sent_s <= limit_s, f"H: {call.prompt} took {call.ended_s - call.sent_s:.2f} s"
        assert call.code != "UNKNOWN", f"P: {call.error}"
        expected = golden(call, self.model)
        if call.error is None:
            assert call.token_ids == expected, f"I: {call.prompt}"
        else:
            assert call.reason in victims, f"I: {call.prompt} ended with {call.code}/{call.reason}: {call.error}"
            assert call.token_ids == expected[: len(call.token_ids)], f"T: {call.prompt}"

    async def canary(self) -> float:
        """Seconds until a request is served again; AssertionError if that takes too long."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < CANARY_S:
            call = Call(prompt=[3, 1, 4], max_tokens=3)
            self.num_rpcs += 1
            async with AsyncClient(self.service.target, options=NO_RETRIES) as client:
                await run(client, call)
            if call.error is None:
                assert call.token_ids == golden(call, self.model), "I: the canary"
                return time.monotonic() - start_s
            await asyncio.sleep(0.02)
        raise AssertionError(f"L: no canary within {CANARY_S} s: {call.error}")

    async def _check_resources(self) -> None:
        """Closed connections take a moment to disappear, and idle threads half a minute."""
        problems: list[str] = []
        for _ in range(600):
            problems = list(self._differences())
            if not problems:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"R: {problems}")

    def _differences(self) -> Iterable[str]:
        now = {each.pid: Resources.of(each) for each in self.service.children("gateway")}
        if set(now) != {each.pid for each in self.gateways}:
            yield f"P: gateways were {[each.pid for each in self.gateways]}, are {list(now)}"
            return
        for before in self.gateways:
            after = now[before.pid]
            if after.num_fds > before.num_fds:
                yield f"{after.num_fds - before.num_fds} more descriptors"
            more = after.threads - before.threads
            if more.total() > max(before.thread_room, min(more[POOL_NAME], POOL_THREADS)):
                yield f"more threads: {dict(more)}"
            if after.rss_bytes > before.rss_bytes * (1 + RSS_SHARE) + self.rss_slack_bytes:
                yield f"{(after.rss_bytes - before.rss_bytes) >> 20} MiB more memory"

    async def _check_metrics(self) -> None:
        """Every call was counted once, when it ended; nothing is reported as running or waiting. Gauges are updated
        every second."""
        problems: list[str] = []
        for _ in range(300):
            page = await self.metrics()
            problems = list(self._not_reconciled(page))
            if not problems:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"M: {problems}")

    def _not_reconciled(self, page: Page) -> Iterable[str]:
        ended = page.total("octavo_requests_total", method="/octavo.v1.InferenceService/Generate")
        if ended != self.num_rpcs:
            yield f"{self.num_rpcs} calls were made, {ended:g} have an end"
        if page.total("octavo_requests_total", code="UNKNOWN"):
            yield "an UNKNOWN status"
        for gauge in ("octavo_gateway_requests", "octavo_worker_in_flight_requests"):
            if page.total(gauge):
                yield f"{gauge} is {page.total(gauge):g}"
        for counter in ("octavo_gateway_sink_errors_total", "octavo_gateway_protocol_errors_total"):
            if page.total(counter):
                yield f"{counter} is {page.total(counter):g}"

    def check_log(self) -> None:
        """No line that only a defect writes."""
        log = self.service.log.read_text(errors="replace")
        found = [line for line in BAD_LINES if line in log]
        assert not found, f"P: {found}\n{log[-3000:]}"
