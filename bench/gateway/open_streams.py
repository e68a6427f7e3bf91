"""What open streams cost a gateway: `python -m bench.gateway.open_streams --streams 100 1000 10000`.

The gateway runs alone in a process, a stand-in for its workers gives every stream a token when told to, and real gRPC
callers read them: memory of a stream, CPU time of a token. One JSON line for each number of streams.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing as mp
import time
from typing import Any

import psutil

from octavo.cli.serve.ports import free_port

STREAMS_A_CHANNEL = 100
MOST_OPENING = 256  # so that callers, which share the cores, do not wait for each other
TIMEOUT_S = 300.0


def serve(address: str, num_streams: int, pipe: Any) -> None:
    """The gateway's process: b"step" on the pipe gives every stream a token, b"report" ends it."""
    import uvloop

    from bench.gateway.lone_gateway import lone_gateway
    from octavo.gateway.config import ConnectionConfig, RequestLimits
    from tests.support.gateway.fake_pool import FakeRun, model_card
    from tests.support.gateway.tokenizers_tiny import tiny_files

    async def main() -> None:
        card, loop, process = model_card(), asyncio.get_running_loop(), psutil.Process()
        limits = RequestLimits(max_requests=num_streams + 1)
        patient = ConnectionConfig(
            keepalive_timeout_s=TIMEOUT_S, message_timeout_s=TIMEOUT_S, settings_timeout_s=TIMEOUT_S
        )

        def begin(run: FakeRun) -> None:
            loop.call_soon(run.sink.on_tokens, [token_ids[0]], None)

        async with lone_gateway(address, card, tiny_files(), limits, on_run=begin, connection=patient) as (
            gateway,
            pool,
        ):
            table = gateway.models.text_of(card).table.visible_bytes
            token_ids = [token_id for token_id, row in enumerate(table) if row.isascii() and row]
            gc.collect()
            empty_bytes, begin_s = process.memory_info().rss, sum(process.cpu_times()[:2])
            pipe.send("ready")
            while len(pool.runs) < num_streams:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            gc.collect()
            open_bytes, open_s = process.memory_info().rss, sum(process.cpu_times()[:2])
            pipe.send("open")
            num_steps = 0
            while await loop.run_in_executor(None, pipe.recv) == "step":
                for run in pool.runs:
                    run.sink.on_tokens([token_ids[num_steps % len(token_ids)]], None)
                num_steps += 1
            end_s = sum(process.cpu_times()[:2])
            pipe.send(
                {
                    "open_us": 1e6 * (open_s - begin_s) / num_streams,
                    "kib_per_stream": (open_bytes - empty_bytes) / 1024 / num_streams,
                    "us_per_token": 1e6 * (end_s - open_s) / (num_streams * num_steps),
                }
            )
            for run in pool.runs:
                run.finish()
            while len(gateway.tracker):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def read_streams(address: str, num_streams: int, num_steps: int, pipe: Any) -> dict[str, float]:
    """The callers: all have read a step before the next one is requested."""
    import grpc

    from octavo.v1 import common_pb2, inference_pb2_grpc
    from octavo.v1 import inference_pb2 as pb

    num_read, opening = 0, asyncio.Semaphore(MOST_OPENING)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(address, options=options) for _ in range(-(-num_streams // STREAMS_A_CHANNEL))
    ]
    request = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5] * 16))

    async def one(index: int) -> None:
        nonlocal num_read
        stub = inference_pb2_grpc.InferenceServiceStub(channels[index // STREAMS_A_CHANNEL])
        await opening.acquire()
        is_open = False
        async for event in stub.Generate(request):
            num_read += event.WhichOneof("event") == "delta"
            if not is_open:
                is_open = True
                opening.release()

    async def told(reading: "asyncio.Future[Any]") -> Any:
        while not pipe.poll():
            if reading.done():
                reading.result()  # raises the error that ended a stream early
            await asyncio.sleep(0.01)
        return pipe.recv()

    async with asyncio.timeout(TIMEOUT_S):
        reading = asyncio.gather(*map(one, range(num_streams)))
        await told(reading)
        while num_read < num_streams and not reading.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for step in range(num_steps):
            pipe.send("step")
            while num_read < num_streams * (step + 2) and not reading.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        pipe.send("report")
        report: dict[str, float] = await told(reading)
        await reading
    for channel in channels:
        await channel.close()
    return report


def measure(num_streams: int, num_steps: int) -> dict[str, float]:
    """One run."""
    address, context = f"127.0.0.1:{free_port('127.0.0.1', set())}", mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(address, num_streams, theirs), daemon=True)
    process.start()
    try:
        assert ours.recv() == "ready"
        report = asyncio.run(read_streams(address, num_streams, num_steps, ours))
        process.join(TIMEOUT_S)
    finally:
        process.kill()
    return {"streams": num_streams} | {name: round(value, 2) for name, value in report.items()}


def main() -> None:
    """One JSON line per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 300, 1000, 3000, 10_000])
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    for num_streams in given.streams:
        begin_s = time.monotonic()
        figures = measure(num_streams, given.steps)
        print(json.dumps(figures | {"seconds": round(time.monotonic() - begin_s, 1)}), flush=True)


if __name__ == "__main__":
    main()
