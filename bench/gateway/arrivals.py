"""Requests that arrive together at a gateway that streams: `python -m bench.gateway.arrivals --requests 256 --slots
64`.

A process runs the gateway with a stand-in for the workers that has a number of slots and gives each of them one token a
step; another one is a real gRPC client, which asks for everything at once. New requests and tokens compete for one
thread: slots stay empty while requests wait to be taken in. Processes in turns: tokens in rounds once the gateway is
busy (gateway/streams/stream.py), and each as it comes. One JSON line a run.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from bench.figures import percentile
from bench.gateway.streams import cpu_s
from octavo.cli.serve.ports import free_port


@dataclass(frozen=True, kw_only=True)
class Load:
    """in_rounds: whether tokens are sent in rounds while the gateway is busy."""

    num_requests: int
    num_slots: int
    steps_per_s: float
    num_tokens: int
    in_rounds: bool


@dataclass(eq=False)
class Slots:
    """The stand-in worker: in each step a token for as many requests as there are slots, in order of arrival."""

    load: Load
    waiting: deque[Any] = field(default_factory=deque)
    arrived_s: list[float] = field(default_factory=list)
    num_steps: int = 0

    def on_run(self, run: Any) -> None:
        """Add a request that has arrived."""
        self.waiting.append(run)
        self.arrived_s.append(time.monotonic())

    async def run(self, token_id: int) -> None:
        """Run until all requests are done. Delays of less than 50 ms are made up for."""
        running: list[tuple[Any, int]] = []
        due_s, num_done = 0.0, 0
        while num_done < self.load.num_requests:
            while self.waiting and len(running) < self.load.num_slots:
                running.append((self.waiting.popleft(), self.num_steps + self.load.num_tokens))
            for run, last_step in running:
                run.sink.on_tokens([token_id], None)
                if last_step == self.num_steps + 1:
                    run.finish()
                    num_done += 1
            self.num_steps += bool(running)
            running = [pair for pair in running if pair[1] > self.num_steps]
            due_s = max(due_s + 1 / self.load.steps_per_s, time.monotonic() - 0.05)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def serve(address: str, load: Load, pipe: Any) -> None:
    """The gateway's process."""
    import uvloop

    from bench.gateway.lone_gateway import lone_gateway
    from octavo.gateway.config import RequestLimits
    from octavo.gateway.streams.stream import Coalescer
    from tests.support.gateway.fake_pool import model_card
    from tests.support.gateway.tokenizers_tiny import tiny_files

    class AtOnce(Coalescer):
        def notify(self, notifier: Any) -> None:
            notifier.notify()

    async def main() -> None:
        card, slots = model_card(), Slots(load)
        limits = RequestLimits(max_pending_tokens=1_000_000)
        async with lone_gateway(address, card, tiny_files(), limits, on_run=slots.on_run) as (gateway, _):
            if not load.in_rounds:
                gateway.submitter.coalescer = AtOnce()
            table = gateway.models.text_of(card).table.visible_bytes
            token_id = next(token_id for token_id, row in enumerate(table) if row.isascii() and row)
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            begin_s, begin_cpu_s = time.monotonic(), cpu_s()
            await slots.run(token_id)
            while len(gateway.tracker):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            meters = gateway.meters.of_model(card.name)
            pipe.send(
                {
                    "gateway_cpu_share": (cpu_s() - begin_cpu_s) / (time.monotonic() - begin_s),
                    "all_taken_in_ms": 1e3 * (slots.arrived_s[-1] - slots.arrived_s[0]),
                    "steps": slots.num_steps,
                    "messages": meters.messages,
                }
            )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def read_streams(address: str, load: Load, pipe: Any) -> dict[str, Any]:
    """The client: sends all requests at once, records the time of every message."""
    from octavo import AsyncClient
    from octavo.cli.bench.load import Job, drive
    from octavo.cli.bench.report import latencies_ms

    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    clients = [AsyncClient(address, options=options) for _ in range(2)]
    for client in clients:
        await client.tokenize("x")
    jobs = [Job(fields={"token_ids": [5] * 64, "output": "token_ids"}) for _ in range(load.num_requests)]
    pipe.send("go")
    outcomes = await drive(clients, jobs)
    seconds = max(each.begin_s + each.latency_s for each in outcomes)
    for client in clients:
        await client.close()
    latencies = latencies_ms(outcomes)
    first_ms = [1e3 * each.begin_s + first for each, first in zip(outcomes, latencies["ttft"], strict=True)]
    return {
        "tokens_per_s": round(load.num_requests * load.num_tokens / seconds),
        "first_token_ms": {f"p{percent}": round(percentile(first_ms, percent)) for percent in (50, 99)},
        "gap_ms": {f"p{percent}": round(percentile(latencies["itl"], percent), 1) for percent in (50, 99)},
    }


def measure(load: Load) -> dict[str, Any]:
    """One run: both processes, one report."""
    address = f"127.0.0.1:{free_port('127.0.0.1', set())}"
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(address, load, theirs))
    process.start()
    assert ours.recv() == "ready"
    report = asyncio.run(read_streams(address, load, ours)) | ours.recv()
    process.join()
    report = {key: round(value, 2) if isinstance(value, float) else value for key, value in report.items()}
    return {"in_rounds": load.in_rounds, "requests": load.num_requests, "slots": load.num_slots} | report


def main() -> None:
    """Print one JSON line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--steps-per-s", type=float, default=600.0)
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    for in_rounds in (True, False) * given.repeats:
        load = Load(
            num_requests=given.requests,
            num_slots=given.slots,
            steps_per_s=given.steps_per_s,
            num_tokens=given.tokens,
            in_rounds=in_rounds,
        )
        print(json.dumps(measure(load)), flush=True)


if __name__ == "__main__":
    main()
