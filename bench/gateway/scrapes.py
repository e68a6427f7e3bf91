"""What a flood of scrapes costs: the scrapers' wait, and how late it makes an event loop in the same process.

    python -m bench.gateway.scrapes [SCRAPERS] [SCRAPES]

Alternates between the endpoint of prometheus_client (a thread a scrape) and ours, each in a process of its own that has
a gateway's collector and a loop with a timer of 2 ms; scrapers (20) are threads of this process.
Prints a line for each run, writes nothing.
"""

import argparse
import asyncio
import math
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

from prometheus_client import start_http_server

from bench.figures import percentile
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector, MetricsEndpoint, registry_of
from octavo.gateway.workers.stats import PoolStats

ROUNDS = 3
TICK_S = 0.002
TIMEOUT_S = 10.0


def serve(kind: str, pipe: Connection) -> None:
    """In a process: send the port, then how late the loop was between two messages, and the CPU seconds."""
    meters = GatewayMeters()
    for n in range(4):
        meters.of_model(f"model-{n}")
    stats = PoolStats()
    registry = registry_of(GatewayCollector(meters, stats))
    if kind == "ours":
        pipe.send(MetricsEndpoint("127.0.0.1:0", registry).port)
    else:
        pipe.send(start_http_server(0, addr="127.0.0.1", registry=registry)[0].server_port)
    pipe.recv()
    cpu_s = time.process_time()
    late_s = asyncio.run(ticks(pipe))
    pipe.send((late_s, time.process_time() - cpu_s))


async def ticks(pipe: Connection) -> list[float]:
    """How late each tick was, until a message comes."""
    late_s: list[float] = []
    while not pipe.poll():
        due_s = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s.append(time.perf_counter() - due_s)
    return late_s


@contextmanager
def process(kind: str) -> Iterator[Connection]:
    """A process that serves until the block ends."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(kind, theirs), daemon=True)
    child.start()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()


def scrape(port: int) -> float:
    """Seconds of one scrape; infinite if no page came."""
    begin_s = time.perf_counter()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
            answer.read()
    except OSError:
        return math.inf
    return time.perf_counter() - begin_s


def measure(kind: str, num_scrapers: int, num_scrapes: int) -> str:
    """The line of one run."""
    with process(kind) as pipe, ThreadPoolExecutor(num_scrapers) as threads:
        port = pipe.recv()
        pipe.send("go")
        begin_s = time.perf_counter()
        took_s = list(threads.map(lambda _: scrape(port), range(num_scrapes)))
        elapsed_s = time.perf_counter() - begin_s
        pipe.send("stop")
        late_s, cpu_s = pipe.recv()
    return (
        f"{kind:<18} scrape p50 {percentile(took_s, 50) * 1e3:7.1f} p99 {percentile(took_s, 99) * 1e3:7.1f} ms"
        f" · {num_scrapes / elapsed_s:6.0f} scrapes/s · loop late p50 {percentile(late_s, 50) * 1e3:5.2f}"
        f" p99 {percentile(late_s, 99) * 1e3:6.2f} ms · CPU {100 * cpu_s / elapsed_s:3.0f} %"
    )


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scrapers", type=int, nargs="?", default=20)
    parser.add_argument("scrapes", type=int, nargs="?", help="of a run; default: 25 for each scraper")
    arguments = parser.parse_args()
    num_scrapes = arguments.scrapes or 25 * arguments.scrapers
    for _ in range(ROUNDS):
        for kind in ("prometheus_client", "ours"):
            print(measure(kind, arguments.scrapers, num_scrapes), flush=True)


if __name__ == "__main__":
    main()
