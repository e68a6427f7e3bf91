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
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio

from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.gateway.workers.pool import WorkerPool
from octavo.wire.bundle import bundle_digest
from octavo.wire.codec import decode_to_gateway, encode
from octavo.wire.messages import (
    Capacity,
    Finished,
    ModelCard,
    Register,
    Run,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
    WireFinishReason,
)
from octavo.wire.options import new_router
from octavo.worker.scheduler.plan import GatewayIndex
from octavo.worker.transport.link import WorkerLink

ROUNDS = 5
FILES = {"tokenizer.json": b"{}"}
MODEL = "bench"


def register(epoch: str, rows: int) -> Register:
    """The registration of a worker with one large model."""
    card = ModelCard(
        name=MODEL,
        fingerprint="f",
        architecture="Bench",
        dtype="none",
        max_model_len=1 << 30,
        vocab_size=151_665,
        eos_token_ids=(),
        default_sampling={},
        tokenizer_digest=bundle_digest(FILES),
    )
    capacity = Capacity(num_blocks=1 << 20, block_size=16, max_num_seqs=rows, max_waiting=rows, max_batch_tokens=8192)
    return Register(worker_id="bench", epoch=epoch, card=card, capacity=capacity, pid=os.getpid(), pid_namespace="")


def step_message(epoch: str, seq: int, handles_N: np.ndarray, finished: tuple[Finished, ...] = ()) -> StepOutput:
    """The output of a step with one token per handle."""
    tokens_N = np.full(len(handles_N), seq % 151_665, np.int32)
    return StepOutput(
        epoch=epoch, seq=seq, step=seq, handles=handles_N.tobytes(), tokens=tokens_N.tobytes(), finished=finished
    )


def play_worker(address: str, rows: int, steps: int) -> None:
    """Wait for ``rows`` requests, then send ``steps`` tokens for each as fast as the socket takes them; again and
    again."""
    epoch = secrets.token_hex(16)
    link = WorkerLink([address], register(epoch, rows), FILES)
    seq = 0
    handles: list[int] = []
    while True:
        link.wait(0.2)
        handles += [message.handle for _, message in link.drain() if isinstance(message, Run)]
        if len(handles) == rows:
            seq = flood(link, epoch, seq, np.array(handles, np.int64), steps)
            handles.clear()


def flood(link: WorkerLink, epoch: str, seq: int, handles_N: np.ndarray, steps: int) -> int:
    """Send steps as fast as the socket takes them, the last one with the ends of all outputs."""
    ends = tuple(
        Finished(handle=handle, reason=WireFinishReason.LENGTH, completion_tokens=steps)
        for handle in handles_N.tolist()
    )
    for step in range(steps):
        seq += 1
        link.put(GatewayIndex(0), step_message(epoch, seq, handles_N, ends if step == steps - 1 else ()))
        while any(each.socket.has_backlog for each in link._gateways.values()):
            link.wait(0.001)
            link.drain()
    return seq


def echo(address: str) -> None:
    """A DEALER that sends back what it gets."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        socket.send(b"here")
        while True:
            socket.send(socket.recv())


async def round_trips(frame: bytes, count: int, kind: str) -> float:
    """Microseconds of one round trip: `reader` as the pool reads, `asyncio` with zmq.asyncio."""
    address = f"ipc://{tempfile.mkdtemp()}/echo.sock"
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(address,), daemon=True)
    run = through_reader if kind == "reader" else through_asyncio
    try:
        return await run(address, process.start, frame, count)
    finally:
        process.terminate()
        process.join()


async def through_reader(address: str, start: Callable[[], None], frame: bytes, count: int) -> float:
    """The round trips with add_reader on the socket's descriptor, as in `gateway.workers.link`."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = new_router(context)
    router.bind(address)
    left, started_s = count, 0.0

    def drain() -> None:
        nonlocal left, started_s
        try:
            while True:
                routing_id = router.recv(zmq.NOBLOCK)
                router.recv(zmq.NOBLOCK)
                started_s = started_s or time.perf_counter()
                left -= 1
                if left < 0 and not done.done():
                    done.set_result(time.perf_counter() - started_s)
                router.send_multipart((routing_id, frame), zmq.NOBLOCK)
        except zmq.Again:
            pass

    loop.add_reader(int(router.getsockopt(zmq.FD)), drain)
    start()
    while not done.done():  # the descriptor is edge-triggered: poll now and then
        await asyncio.sleep(0.05)
        drain()
    loop.remove_reader(int(router.getsockopt(zmq.FD)))
    router.close(linger=0)
    context.destroy(linger=0)
    return float(done.result() / count * 1e6)


async def through_asyncio(address: str, start: Callable[[], None], frame: bytes, count: int) -> float:
    """The same with zmq.asyncio's futures."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    start()
    routing_id, _ = await router.recv_multipart()
    started_s = time.perf_counter()
    for _ in range(count):
        await router.send_multipart((routing_id, frame))
        await router.recv_multipart()
    elapsed_s = time.perf_counter() - started_s
    context.destroy(linger=0)
    return elapsed_s / count * 1e6


class CountingSink:
    """A stream that only counts."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.done = asyncio.get_running_loop().create_future()

    def on_started(self) -> None:
        """Ignore."""

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Count."""
        self.num_tokens += len(token_ids)

    def on_finished(self, finished: Finished) -> None:
        """Note the terminal event."""
        self.done.set_result(None)

    def on_lost(self, reason: str, detail: str) -> None:
        """Note the terminal event."""
        self.done.set_exception(RuntimeError(f"{reason}: {detail}"))

    def on_moved(self, worker_id: str, lost_s: float, moved_s: float) -> None:
        """Never called."""


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
    """Figures through the real pool: tokens and messages per second, and the gateway's CPU time per message."""
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
        (handle,) = pool.draw_handles(1)
        sampling = SamplingParams(max_tokens=steps)
        run = Run(handle=handle, request_id=str(number), prompt_ids=prompt.tobytes(), sampling=sampling)
        pool.submit(worker, run, [sink])
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(sink.done for sink in sinks))
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    assert all(sink.num_tokens == steps for sink in sinks)
    return wall_s, cpu_s


async def measure(rows: int, steps: int) -> dict[str, float]:
    """All figures."""
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
