"""What it costs to be watched: tokens per second, and CPU per token, with the live page open and without.

    python -m bench.gateway.watched [--gateways 1] [--streams 256] [--steps-per-s 200] [--rounds 6] [--pages 1]

Processes: gateways (the first one with the page), a worker without a model that steps at a pace, and callers that read
their streams to the end and start again. In every other interval pages watch as browsers do: a snapshot a second with
100 requests and maps of 1,024 cells, in JSON over HTTP. Watched and unwatched intervals take turns, so that a machine
that becomes slower or faster affects both alike. Prints a line for each interval, then the ratios of the medians.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing as mp
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.gateway.oracle import SERVICE, START_TIMEOUT_S, Pace, worker_process
from bench.serving import wait_until_serving
from octavo.cli.serve.ports import free_port

PROMPT, NUM_TOKENS = 16, 1500
WATCH = {"interval_s": 1, "max_requests": 100, "max_block_cells": 1024}
SETTLE_S = 1.0


def gateway_process(port: int, page_port: int | None, endpoint: str, controls: tuple[str, ...], index: int) -> None:
    """Serve until SIGTERM. page_port None: no page."""
    from octavo.gateway.config import GatewayConfig, LogFormat, PageConfig, PeerConfig
    from octavo.gateway.main import main
    from octavo.gateway.workers.config import WorkerPoolConfig

    main(
        GatewayConfig(
            workers=WorkerPoolConfig(endpoints=(endpoint,)),
            peers=PeerConfig(endpoint=controls[index], others=controls) if len(controls) > 1 else PeerConfig(),
            listen_address=f"127.0.0.1:{port}",
            metrics_address=None,
            page=None if page_port is None else PageConfig(port=page_port),
            log_format=LogFormat.JSON,
            log_level="error",
        )
    )


class Callers:
    """Streams that start again when they end, on their own event loop. num_tokens: read so far."""

    def __init__(self, ports: list[int], num_streams: int) -> None:
        self.num_tokens = 0
        self._ports, self._num_streams = ports, num_streams
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Make calls during the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    async def _run(self) -> None:
        import grpc

        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{self._ports[n % len(self._ports)]}", options=options)
            for n in range(8)
        ]
        tasks = [asyncio.create_task(self._stream(channels[n % 8], n)) for n in range(self._num_streams)]
        await asyncio.to_thread(self._over.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()

    async def _stream(self, channel: object, index: int) -> None:
        from octavo.v1 import common_pb2, inference_pb2_grpc
        from octavo.v1 import inference_pb2 as pb

        request = pb.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=[index % 200 + 5] * PROMPT),
            stop=pb.StopConditions(max_tokens=NUM_TOKENS - index, ignore_eos=True),
            output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS),
        )
        while True:
            async for event in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
                if event.WhichOneof("event") == "delta":
                    self.num_tokens += len(event.delta.token_ids)


@contextmanager
def watching(page_port: int, num_pages: int) -> Iterator[list[int]]:
    """Keep num_pages pages open during the block; yields the sizes of their snapshots in bytes."""
    sizes: list[int] = []
    connections = [http.client.HTTPConnection("127.0.0.1", page_port) for _ in range(num_pages)]

    def read(connection: http.client.HTTPConnection) -> None:
        with suppress(OSError, ValueError, http.client.HTTPException, AttributeError):
            path, headers = "/octavo.v1.LoadService/WatchLoad", {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(WATCH), headers)
            response = connection.getresponse()
            while line := response.readline():
                if line.startswith(b"data: "):
                    sizes.append(len(line))

    threads = [threading.Thread(target=read, args=(each,)) for each in connections]
    for thread in threads:
        thread.start()
    try:
        yield sizes
    finally:
        for connection in connections:
            if connection.sock is not None:
                connection.sock.shutdown(2)
        for thread in threads:
            thread.join(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The running processes. page_port: of the first gateway's page."""

    ports: list[int]
    page_port: int
    processes: list[psutil.Process]

    def cpu_s(self) -> float:
        """CPU time that all processes have used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)


@contextmanager
def running_service(given: argparse.Namespace) -> Iterator[Service]:
    """Run gateways and a worker until the block ends."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as made:
        run_dir = Path(made) / "run"
        run_dir.mkdir(mode=0o700)
        endpoints = tuple(f"ipc://{run_dir}/gateway-{n}.sock" for n in range(given.gateways))
        controls = tuple(f"ipc://{run_dir}/gateway-{n}.peers.sock" for n in range(given.gateways))
        taken: set[int] = set()
        ports = [free_port("127.0.0.1", taken) for _ in endpoints]
        page_port = free_port("127.0.0.1", taken)
        gateways = [
            context.Process(target=gateway_process, args=(port, None if n else page_port, endpoints[n], controls, n))
            for n, port in enumerate(ports)
        ]
        pace = Pace(steps_per_s=given.steps_per_s, reads_back=False)
        arguments = (endpoints, pace, given.streams, Path(made) / "times.json")
        worker = context.Process(target=worker_process, args=arguments)
        for process in (*gateways, worker):
            process.start()
        try:
            for port in ports:
                wait_until_serving(f"127.0.0.1:{port}", SERVICE, timeout_s=START_TIMEOUT_S)
            processes = [psutil.Process(process.pid) for process in (*gateways, worker)]
            yield Service(ports=ports, page_port=page_port, processes=processes)
        finally:
            for process in (worker, *gateways):
                os.kill(process.pid or 0, signal.SIGTERM)
                process.join(30)


def measure_interval(service: Service, callers: Callers, *, num_pages: int, seconds: float) -> tuple[float, float, str]:
    """With num_pages pages open: tokens per second, µs of CPU per token, and what the pages got, in words."""
    with watching(service.page_port, num_pages) as sizes:
        time.sleep(SETTLE_S)
        begin_s, tokens, cpu_s = time.monotonic(), callers.num_tokens, service.cpu_s()
        time.sleep(seconds)
        tokens = callers.num_tokens - tokens
        cpu_s, span_s = service.cpu_s() - cpu_s, time.monotonic() - begin_s
    size = f", {len(sizes)} snapshots of {statistics.median(sizes):.0f} bytes" if sizes else ""
    return tokens / span_s, 1e6 * cpu_s / max(1, tokens), size


def measure(given: argparse.Namespace) -> None:
    """Measure all intervals and print them."""
    rows: dict[str, list[tuple[float, float]]] = {"unwatched": [], "watched": []}
    with running_service(given) as service:
        callers = Callers(service.ports, given.streams)
        with callers.calling():
            time.sleep(3 * SETTLE_S)
            for kind, num_pages in (("unwatched", 0), ("watched", given.pages)) * given.rounds:
                tokens_per_s, cpu_us, size = measure_interval(
                    service, callers, num_pages=num_pages, seconds=given.seconds
                )
                rows[kind].append((tokens_per_s, cpu_us))
                print(f"{kind:<10} {tokens_per_s:8.0f} tokens/s {cpu_us:7.2f} µs CPU a token{size}", flush=True)
    (before, before_us), (after, after_us) = (
        [statistics.median(column) for column in zip(*rows[kind], strict=True)] for kind in ("unwatched", "watched")
    )
    print(f"tokens/s watched : unwatched = {after:.0f} : {before:.0f} = {after / before:.4f}")
    print(f"CPU a token watched : unwatched = {after_us:.2f} : {before_us:.2f} µs = {after_us / before_us:.4f}")


def main() -> None:
    """Print a line for each interval, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps-per-s", type=float, default=200.0, help="10000: as fast as the worker can")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--pages", type=int, default=1)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
