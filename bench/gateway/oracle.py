"""The gateway between real callers and a real worker without a model: `python -m bench.gateway.oracle --gateways 1 2`.

Processes: gateways (a port each), one worker (scheduler, block manager, engine loop, link; its runner gives tokens at a
fixed pace), the callers. The runner stands for the oracle, which in Python hashes what it reads back for longer than a
step may take; `--oracle` brings it back. Every stream gets one token a step. The worker notes when each step's tokens
are known, the caller when they arrive: the difference is what engine loop, wire, gateway, gRPC and caller add. One JSON
line for each number of gateways.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.figures import percentile
from bench.serving import wait_until_serving
from octavo.cli.serve.ports import free_port

PROMPT = 16
SERVICE = "octavo.v1.InferenceService"
START_TIMEOUT_S = 60.0
MODEL = Path(__file__).resolve().parents[2] / "model" / "embedded" / "folio-chat"
_MAX_LATE_S = 0.1  # delays up to this are made up for


@dataclass(frozen=True, kw_only=True)
class Pace:
    """reads_back: whether tokens are the oracle's; else arbitrary ones."""

    steps_per_s: float
    reads_back: bool


def worker_process(endpoints: tuple[str, ...], pace: Pace, num_streams: int, times: Path) -> None:
    """A worker at a fixed pace that records when each request's tokens were known."""
    import numpy as np

    from octavo.worker.config import RunnerKind, WorkerConfig
    from octavo.worker.main import main
    from octavo.worker.runners.oracle.runner import OracleRunner
    from octavo.worker.scheduler.plan import StepPlan, StepResult

    names: dict[int, str] = {}
    known: dict[str, list[float]] = defaultdict(list)
    plans: list[StepPlan] = []
    launch, collect = OracleRunner.launch, OracleRunner.collect
    due_s = time.monotonic()

    def timed_launch(self: OracleRunner, plan: StepPlan) -> None:
        names.update({join.slot: join.request_id for join in plan.new_requests})
        plans.append(plan)
        if pace.reads_back:
            launch(self, plan)

    def timed_collect(self: OracleRunner) -> StepResult:
        nonlocal due_s
        plan = plans.pop(0)
        slots, count = plan.sampled_slots, len(plan.sampled_slots)
        tokens_S = np.full(count, 400 + plan.step % 1000, np.int32)
        result = StepResult(step=plan.step, tokens_S=tokens_S, is_finite_S=np.ones(count, np.bool_))
        result = collect(self) if pace.reads_back else result
        due_s = max(due_s + 1 / pace.steps_per_s, time.monotonic() - _MAX_LATE_S)
        time.sleep(max(0.0, due_s - time.monotonic()))
        now_s = time.monotonic()
        for slot in slots.tolist():
            known[names[slot]].append(now_s)
        return result

    def write_times(self: OracleRunner) -> None:
        times.write_text(json.dumps(known))

    OracleRunner.launch, OracleRunner.collect = timed_launch, timed_collect  # type: ignore[method-assign]
    OracleRunner.close = write_times  # type: ignore[method-assign]
    main(
        WorkerConfig(
            model=str(MODEL),
            gateway_endpoints=endpoints,
            runner=RunnerKind.ORACLE,
            max_num_seqs=num_streams,
            max_batch_tokens=max(2048, num_streams),
            num_blocks=num_streams * 128,
            metrics_port=None,
            log_format="json",
            log_level="warning",
        )
    )


def gateway_process(port: int, endpoint: str) -> None:
    """Serve until SIGTERM."""
    from octavo.gateway.config import GatewayConfig, LogFormat
    from octavo.gateway.main import main
    from octavo.gateway.workers.config import WorkerPoolConfig

    pool = WorkerPoolConfig(endpoints=(endpoint,))
    address = f"127.0.0.1:{port}"
    main(
        GatewayConfig(
            workers=pool, listen_address=address, metrics_address=None, log_format=LogFormat.JSON, log_level="warning"
        )
    )


async def read_streams(ports: list[int], num_streams: int, num_tokens: int) -> dict[str, list[tuple[float, int]]]:
    """(time, tokens) of every message of each request."""
    import grpc

    from octavo.v1 import common_pb2, inference_pb2_grpc
    from octavo.v1 import inference_pb2 as pb

    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{ports[i % len(ports)]}", options=options) for i in range(8)]

    async def one(index: int) -> tuple[str, list[tuple[float, int]]]:
        name, arrivals = f"s{index}", list[tuple[float, int]]()
        request = pb.GenerateRequest(
            request_id=name,
            token_ids=common_pb2.TokenIds(ids=[index % 200 + 5] * PROMPT),
            stop=pb.StopConditions(max_tokens=num_tokens, ignore_eos=True),
            output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
        )
        async for event in inference_pb2_grpc.InferenceServiceStub(channels[index % 8]).Generate(request):
            if event.WhichOneof("event") == "delta":
                arrivals.append((time.monotonic(), len(event.delta.token_ids)))
        return name, arrivals

    found = dict(await asyncio.gather(*map(one, range(num_streams))))
    for channel in channels:
        await channel.close()
    return found


def added_ms(known: dict[str, list[float]], arrived: dict[str, list[tuple[float, int]]]) -> dict[str, float]:
    """Percentiles, over all tokens, of the milliseconds from known to arrived."""
    added: list[float] = []
    for name, messages in arrived.items():
        times, position = known[name], 0
        for at_s, count in messages:
            added += [1e3 * (at_s - times[index]) for index in range(position, position + count)]
            position += count
    return {f"p{percent}": round(percentile(added, percent), 2) for percent in (50, 99)}


def measure(num_gateways: int, num_streams: int, pace: Pace, seconds: float) -> dict[str, Any]:
    """One run."""
    context = mp.get_context("spawn")
    num_tokens = min(round(pace.steps_per_s * seconds), 2000)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as made:
        run_dir, times = Path(made) / "run", Path(made) / "times.json"
        run_dir.mkdir(mode=0o700)
        endpoints = tuple(f"ipc://{run_dir}/gateway-{index}.sock" for index in range(num_gateways))
        taken: set[int] = set()
        ports = [free_port("127.0.0.1", taken) for _ in endpoints]
        gateways = [context.Process(target=gateway_process, args=pair) for pair in zip(ports, endpoints, strict=True)]
        worker = context.Process(target=worker_process, args=(endpoints, pace, num_streams, times))
        for process in (*gateways, worker):
            process.start()
        try:
            for port in ports:
                wait_until_serving(f"127.0.0.1:{port}", SERVICE, timeout_s=START_TIMEOUT_S)
            cpu = Cpu([*gateways, worker])
            start_s = time.monotonic()
            arrived = asyncio.run(read_streams(ports, num_streams, num_tokens))
            shares = cpu.shares(time.monotonic() - start_s)
        finally:
            for process in (worker, *gateways):  # the worker first: it writes its times when it ends
                os.kill(process.pid or 0, signal.SIGTERM)
                process.join(30)
        known = json.loads(times.read_text())
    ends = [messages[-1][0] for messages in arrived.values()]
    begins = [messages[0][0] for messages in arrived.values()]
    span_s = max(ends) - min(begins)
    num_messages = sum(map(len, arrived.values()))
    steps = max(map(len, known.values())) / (max(t[-1] for t in known.values()) - min(t[0] for t in known.values()))
    return {
        "gateways": num_gateways,
        "streams": num_streams,
        "steps_per_s": round(steps, 1),
        "tokens_per_s": round(num_streams * num_tokens / span_s),
        "messages_per_s": round(num_messages / span_s),
        "tokens_per_message": round(num_streams * num_tokens / num_messages, 2),
        "added_ms": added_ms(known, arrived),
        "gateway_cpu": shares[:-2],
        "worker_cpu": shares[-2],
        "caller_cpu": shares[-1],
    }


class Cpu:
    """CPU seconds of these processes and of this one, from now on."""

    def __init__(self, processes: list[Any]) -> None:
        self._processes = [psutil.Process(process.pid) for process in processes] + [psutil.Process()]
        self._before = self._now()

    def shares(self, seconds: float) -> list[float]:
        """The share of a core that each used."""
        return [round((now - before) / seconds, 2) for now, before in zip(self._now(), self._before, strict=True)]

    def _now(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self._processes]


def main() -> None:
    """One JSON line per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps-per-s", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--oracle", action="store_true", help="hash what the block tables lead to, as tests do")
    given = parser.parse_args()
    pace = Pace(steps_per_s=given.steps_per_s, reads_back=given.oracle)
    for num_gateways in given.gateways:
        print(json.dumps(measure(num_gateways, given.streams, pace, given.seconds)), flush=True)


if __name__ == "__main__":
    main()
