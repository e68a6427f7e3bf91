"""What the wire costs: encode, decode, and a step's way from the worker's link to the gateway's streams.

    python -m bench.worker.wire [--rows 256] [--steps 2000]

One process plays the worker (a thread of its own process: `multiprocessing` spawn), this one the gateway. Figures are
medians of several rounds; the link figures count one StepOutput message with ``rows`` tokens as one message. Prints a
table, then the same as a line of JSON.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.worker.wire_echo import round_trips
from bench.worker.wire_worker import MODEL, play_worker, step_message
from octavo.gateway.workers import RunRequest, WorkerPool, WorkerPoolConfig
from octavo.wire.codec import decode_to_gateway, encode
from octavo.wire.messages import Finished, Sampling, TokenLogprobs

ROUNDS = 5


class CountingSink:
    """A stream that only counts."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.done = asyncio.get_running_loop().create_future()

    def on_started(self) -> None:
        """Nothing to do."""

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Count."""
        self.num_tokens += len(token_ids)

    def on_finished(self, finished: Finished) -> None:
        """Terminal."""
        self.done.set_result(None)

    def on_lost(self, reason: str, detail: str) -> None:
        """Terminal."""
        self.done.set_exception(RuntimeError(f"{reason}: {detail}"))

    def on_moved(self, worker_id: str) -> None:
        """Never."""


def microseconds(call: Callable[[], object], repeats: int = 2_000) -> float:
    """Median over rounds of the mean time of one call."""
    means = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        for _ in range(repeats):
            call()
        means.append((time.perf_counter() - started_s) / repeats * 1e6)
    return statistics.median(means)


def codec_figures(rows: int) -> dict[str, float]:
    """Encode and decode of one StepOutput."""
    message = step_message("e" * 32, 1, np.arange(rows, dtype=np.int64))
    frame = encode(message)
    return {
        "step_output_bytes": float(len(frame)),
        "encode_us": microseconds(lambda: encode(message)),
        "decode_us": microseconds(lambda: decode_to_gateway(frame)),
    }


async def link_figures(rows: int, steps: int) -> dict[str, float]:
    """Through the real pool: tokens and messages per second, and the gateway's CPU time per message."""
    folder = Path(tempfile.mkdtemp())
    pool = WorkerPool(WorkerPoolConfig(endpoints=(f"ipc://{folder}/run/gateway-0.sock",)))
    await pool.start()
    process = multiprocessing.get_context("spawn").Process(
        target=play_worker, args=(pool.bound_endpoints[0], rows, steps), daemon=True
    )
    process.start()
    ready = asyncio.Event()
    pool.on_change(ready.set)
    await ready.wait()
    rounds = [await one_round(pool, rows, steps) for _ in range(ROUNDS)]
    process.terminate()
    process.join()
    await pool.close()
    assert not pool.stats.protocol_errors, pool.stats.protocol_errors
    return {
        "messages_per_s": statistics.median(steps / wall_s for wall_s, _ in rounds),
        "tokens_per_s": statistics.median(rows * steps / wall_s for wall_s, _ in rounds),
        "gateway_cpu_us_per_message": statistics.median(cpu_s / steps * 1e6 for _, cpu_s in rounds),
    }


async def one_round(pool: WorkerPool, rows: int, steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of this process from the first token to the last."""
    prompt = np.arange(8, dtype=np.int32)
    sinks = [CountingSink() for _ in range(rows)]
    worker = pool.choose(MODEL, prompt, "")
    for number, sink in enumerate(sinks):
        asked = RunRequest(request_id=str(number), prompt_ids=prompt, sampling=Sampling(max_tokens=steps))
        pool.open(worker, asked, sink)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(sink.done for sink in sinks))
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    assert all(sink.num_tokens == steps for sink in sinks)
    return wall_s, cpu_s


async def measure(rows: int, steps: int) -> dict[str, float]:
    """Everything."""
    frame = encode(step_message("e" * 32, 1, np.arange(rows, dtype=np.int64)))
    figures = codec_figures(rows) | await link_figures(rows, steps)
    for kind in ("reader", "asyncio"):
        figures[f"round_trip_{kind}_us"] = await round_trips(frame, steps, kind)
    return figures


def main() -> None:
    """Print a table, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256, help="tokens per step")
    parser.add_argument("--steps", type=int, default=2_000)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.rows, arguments.steps))
    for name, value in figures.items():
        print(f"{name:<30} {value:>14,.1f}")
    print(json.dumps({"rows": arguments.rows, "steps": arguments.steps, "cpus": os.cpu_count()} | figures))


if __name__ == "__main__":
    main()
