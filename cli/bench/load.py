"""The load generator: sends requests when they are due and takes the time of everything that comes back.

Client processes of its own share the requests, since one Python process reads no more than some thousand messages a
second. Must not know: datasets, figures.
"""

import asyncio
import math
import multiprocessing as mp
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from octavo import AsyncClient
from octavo.cli.client.connect import connect_async
from octavo.cli.errors import CliError
from octavo.cli.settings.groups import CallSettings
from octavo.client.errors import OctavoError
from octavo.client.requests import GenerateFields

STREAMS_PER_CONNECTION = 256  # servers take 512
MAX_CONNECTIONS = 64
TOLD_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request and when it is due, in seconds after the start."""

    fields: GenerateFields
    due_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a request. begin_s: after the start. arrivals_s: of each message with output, after begin_s.
    error: the reason if it failed, else empty."""

    begin_s: float
    latency_s: float
    arrivals_s: tuple[float, ...] = ()
    num_prompt: int = 0
    num_output: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All outcomes of a run, and the CPU use of the busiest client process, 0 to 1."""

    outcomes: list[Outcome]
    client_cpu_share: float


def due_times(count: int, rate: float, burstiness: float, *, seed: int) -> list[float]:
    """Arrival times for `rate` requests a second on average. Gaps follow a gamma distribution with shape `burstiness`:
    1 is a Poisson process, less is more bursty, more is more even. rate inf: all at once."""
    if math.isinf(rate):
        return [0.0] * count
    dice, now_s, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now_s)
        now_s += dice.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


async def drive(
    clients: Sequence[AsyncClient],
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None = None,
    timeout_s: float | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Send every job when it is due, with at most max_concurrency in flight; a job that waits for its turn is not timed
    yet."""
    turns = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
    start_s = time.perf_counter()

    async def one(client: AsyncClient, job: Job) -> Outcome:
        await asyncio.sleep(job.due_s - (time.perf_counter() - start_s))
        async with turns:
            outcome = await _ask(client, job.fields, start_s, timeout_s)
        on_done()
        return outcome

    return await asyncio.gather(*(one(clients[index % len(clients)], job) for index, job in enumerate(jobs)))


async def _ask(client: AsyncClient, fields: GenerateFields, start_s: float, timeout_s: float | None) -> Outcome:
    begin_s, arrivals = time.perf_counter(), list[float]()
    stream = client.stream(timeout_s=timeout_s, **fields)
    try:
        async for delta in stream.deltas():
            if delta.text or delta.token_ids:
                arrivals.append(time.perf_counter() - begin_s)
    except OctavoError as error:
        latency_s = time.perf_counter() - begin_s
        return Outcome(begin_s=begin_s - start_s, latency_s=latency_s, error=error.reason or error.code.name)
    usage = stream.finished.usage if stream.finished is not None else None
    return Outcome(
        begin_s=begin_s - start_s,
        latency_s=time.perf_counter() - begin_s,
        arrivals_s=tuple(arrivals),
        num_prompt=usage.prompt_tokens if usage is not None else 0,
        num_output=usage.completion_tokens if usage is not None else 0,
    )


def run_load(
    settings: CallSettings,
    jobs: Sequence[Job],
    *,
    processes: int,
    max_concurrency: int | None,
    timeout_s: float | None,
    on_done: Callable[[int], None] = lambda _: None,
) -> Measured:
    """Drive the jobs from this many client processes. on_done: called with the number of requests that have ended.
    Raises CliError if a client process dies."""
    count = max(1, min(processes, len(jobs), max_concurrency or len(jobs)))
    shares = [(max_concurrency or 0) // count + (index < (max_concurrency or 0) % count) for index in range(count)]
    context = mp.get_context("spawn")
    links: list[Connection] = []
    children = []
    for index in range(count):
        ours, theirs = context.Pipe()
        arguments = (theirs, settings, jobs[index::count], shares[index] or None, timeout_s)
        children.append(context.Process(target=_client_process, args=arguments, daemon=True))
        children[-1].start()
        theirs.close()
        links.append(ours)
    try:
        for link in links:
            _receive(link)
        for link in links:
            link.send("go")
        return _collect(links, on_done)
    finally:
        for link in links:
            link.close()
        for child in children:
            child.join(timeout=5.0)
            child.kill()


def _collect(links: list[Connection], on_done: Callable[[int], None]) -> Measured:
    done, outcomes, busiest = dict.fromkeys(links, 0), list[Outcome](), 0.0
    open_links = list(links)
    while open_links:
        for link in wait(open_links):
            assert isinstance(link, Connection)
            told = _receive(link)
            if isinstance(told, int):
                done[link] = told
                on_done(sum(done.values()))
            else:
                its_outcomes, share = told
                outcomes += its_outcomes
                busiest = max(busiest, share)
                open_links.remove(link)
    return Measured(outcomes=sorted(outcomes, key=lambda each: each.begin_s), client_cpu_share=busiest)


def _receive(link: Connection) -> Any:
    try:
        return link.recv()
    except EOFError:
        advice = "see its own lines above; give fewer --processes where memory is short"
        raise CliError("a client process ended", "it had requests to send", advice) from None


def _client_process(
    link: Connection, settings: CallSettings, jobs: Sequence[Job], max_concurrency: int | None, timeout_s: float | None
) -> None:
    """Reports that it is ready, waits for the start signal, reports how many requests have ended, and finally all
    outcomes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends us
    at_once = min(max_concurrency or len(jobs), len(jobs))
    num_connections = min(at_once, MAX_CONNECTIONS, max(4, -(-at_once // STREAMS_PER_CONNECTION)))
    driving = _drive_from(link, settings, jobs, max_concurrency, timeout_s, num_connections=num_connections)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        link.send(runner.run(driving))


async def _drive_from(
    link: Connection,
    settings: CallSettings,
    jobs: Sequence[Job],
    max_concurrency: int | None,
    timeout_s: float | None,
    *,
    num_connections: int,
) -> tuple[list[Outcome], float]:
    ended, told_s = 0, 0.0

    def on_done() -> None:
        nonlocal ended, told_s
        ended += 1
        if (now_s := time.monotonic()) - told_s >= TOLD_EVERY_S or ended == len(jobs):
            told_s = now_s
            link.send(ended)

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect_async(settings)) for _ in range(num_connections)]
        for client in clients:
            await client.models()  # connected before the clock runs
        link.send("ready")
        await asyncio.to_thread(link.recv)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        outcomes = await drive(clients, jobs, max_concurrency=max_concurrency, timeout_s=timeout_s, on_done=on_done)
        share = (time.process_time() - begin_cpu_s) / max(1e-9, time.perf_counter() - begin_s)
    return outcomes, share


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def peak(spans: Sequence[tuple[float, float]]) -> int:
    """How many of these intervals [begin, end) overlap at most."""
    return max(_running(spans), default=0)


def _running(spans: Sequence[tuple[float, float]]) -> Iterator[int]:
    count = 0
    for _, change in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        count += change
        yield count
