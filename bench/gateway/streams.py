"""The gateway alone: how many tokens a second it streams, at which cost, without any model.

A process runs the gateway with a stand-in for the workers that emits one token per stream and step; another one is a
real gRPC client. `python -m bench.gateway.streams --streams 256 --steps-per-s 100 --seconds 10`. JSON on stdout.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.figures import percentile
from octavo.cli.serve.ports import free_port

MAX_TOKENS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Load:
    """num_streams concurrent outputs, each of which gets one token per step."""

    num_streams: int
    steps_per_s: float
    seconds: float
    wants_ids: bool
    num_channels: int
    dialect: str


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def emit_steps(pool: Any, load: Load, token_ids: list[int], report: dict[str, Any]) -> None:
    """The stand-in worker: waits for all streams, then steps at a fixed rate; overdue steps are made at once."""
    while len(pool.runs) < load.num_streams:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    sinks = [run.sink for run in pool.runs]
    begin_s, begin_cpu_s = time.monotonic(), cpu_s()
    num_steps, in_sinks_s = 0, 0.0
    while (now_s := time.monotonic()) - begin_s < load.seconds:
        due = int((now_s - begin_s) * load.steps_per_s) + 1
        while num_steps < due:
            token = [token_ids[num_steps % len(token_ids)]]
            for sink in sinks:
                sink.on_tokens(token, None)
            num_steps += 1
        in_sinks_s += time.monotonic() - now_s
        await asyncio.sleep(max(0.0, begin_s + num_steps / load.steps_per_s - time.monotonic()))
    report |= {"steps": num_steps, "sink_us_per_token": 1e6 * in_sinks_s / (num_steps * load.num_streams)}
    report |= {"gateway_cpu_share": (cpu_s() - begin_cpu_s) / (time.monotonic() - begin_s)}
    for run in pool.runs:
        run.finish()


def serve(address: str, load: Load, loop_kind: str, pipe: Any) -> None:
    """The gateway's process."""
    import uvloop

    from bench.gateway.lone_gateway import lone_gateway
    from octavo.gateway.config import RequestLimits
    from tests.support.gateway.fake_pool import model_card
    from tests.support.gateway.tokenizers_tiny import tiny_files

    async def main() -> None:
        card, limits = model_card(), RequestLimits(max_pending_tokens=MAX_TOKENS)
        async with lone_gateway(address, card, tiny_files(), limits) as (gateway, pool):
            pipe.send("ready")
            report: dict[str, Any] = {}
            table = gateway.models.text_of(card).table.visible_bytes
            token_ids = [token_id for token_id, row in enumerate(table) if row.isascii() and row]
            await emit_steps(pool, load, token_ids, report)
            while len(gateway.tracker):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            meters = gateway.meters.of_model(card.name)
            pipe.send(report | {"messages": meters.messages, "tokens": meters.generation_tokens})

    factory = uvloop.new_event_loop if loop_kind == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


def octavo_calls(load: Load) -> Callable[[Any], Any]:
    """Calls Generate of octavo.v1 on a channel."""
    from octavo.v1 import common_pb2, inference_pb2_grpc
    from octavo.v1 import inference_pb2 as pb

    output_format = pb.OUTPUT_FORMAT_TOKEN_IDS if load.wants_ids else pb.OUTPUT_FORMAT_TEXT
    request = pb.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[5] * 16), output=pb.OutputOptions(format=output_format)
    )
    return lambda channel: inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)


def vllm_calls(load: Load) -> Callable[[Any], Any]:
    """Calls Generate of VllmEngine on a channel; ids only."""
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc

    request = pb.GenerateRequest(stream=True, tokenized=pb.TokenizedInput(input_ids=[5] * 16))
    return lambda channel: vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request)


async def read_streams(address: str, load: Load) -> dict[str, Any]:
    """The client: reads every stream and records the time of every message."""
    import grpc

    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(load.num_channels)]
    generate = vllm_calls(load) if load.dialect == "vllm" else octavo_calls(load)

    async def one(index: int) -> list[float]:
        return [time.monotonic() async for _ in generate(channels[index % len(channels)])]

    begin_cpu_s, begin_s = cpu_s(), time.monotonic()
    arrivals = await asyncio.gather(*(one(index) for index in range(load.num_streams)))
    share = (cpu_s() - begin_cpu_s) / (time.monotonic() - begin_s)
    gaps = [b - a for times in arrivals for a, b in pairwise(times[1:-1])]  # only Deltas
    for channel in channels:
        await channel.close()
    return {
        "client_cpu_share": share,
        "gap_ms": {str(q): round(1e3 * percentile(gaps, 100 * q), 3) for q in (0.5, 0.9, 0.99)} if gaps else {},
    }


def measure(load: Load, loop_kind: str) -> dict[str, Any]:
    """One run: both processes, one report."""
    address = f"127.0.0.1:{free_port('127.0.0.1', set())}"
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(address, load, loop_kind, theirs))
    process.start()
    assert ours.recv() == "ready"
    client = asyncio.run(read_streams(address, load))
    report = ours.recv() | client
    process.join()
    seconds = report["steps"] / load.steps_per_s
    report |= {
        "loop": loop_kind,
        "streams": load.num_streams,
        "steps_per_s": load.steps_per_s,
        "tokens_per_s": round(report["tokens"] / seconds),
        "messages_per_s": round(report["messages"] / seconds),
        "tokens_per_message": round(report["tokens"] / report["messages"], 2),
        "gateway_us_per_message": round(1e6 * report["gateway_cpu_share"] * seconds / report["messages"], 1),
        "gateway_us_per_token": round(1e6 * report["gateway_cpu_share"] * seconds / report["tokens"], 1),
    }
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in report.items()}


def main() -> None:
    """Print one JSON line per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps-per-s", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--ids", action="store_true", help="token ids instead of text")
    parser.add_argument("--dialect", choices=["octavo", "vllm"], default="octavo")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], nargs="+", default=["uvloop"])
    arguments = parser.parse_args()
    for loop_kind in arguments.loop:
        for num_streams in arguments.streams:
            load = Load(
                num_streams=num_streams,
                steps_per_s=arguments.steps_per_s,
                seconds=arguments.seconds,
                wants_ids=arguments.ids,
                num_channels=arguments.channels,
                dialect=arguments.dialect,
            )
            print(json.dumps(measure(load, loop_kind)), flush=True)


if __name__ == "__main__":
    main()
