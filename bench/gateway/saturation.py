"""What saturates first as workers and gateways are added: `python -m bench.gateway.saturation [--json FILE]`.

Workers without a model, each with so many streams and a token a step for each; gateways that all workers know; callers
in processes of their own, spread evenly over the gateways. For each number of workers and gateways: tokens a second
that were asked for and that arrived, the CPU time that a token costs gateways, workers and callers, and what was at its
end:

  pace      nothing: what was asked for arrived (95 % of it)
  gateway   the event loop of a gateway ran, or was ready to run, all the time
  caller    the same of a caller's loop; it bounds the figure, not the service
  worker    the same of a worker's engine
  cores     they were ready to run, and others had the cores for most of that

Where the machine has fewer cores than there are processes, or is shared, the figures of whole runs are bounded by
cores; CPU time a token says what a gateway can carry on a core of its own. Prints a table; --json writes every run.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.figures import write_json
from bench.gateway.conversations import FOLDER, words
from bench.gateway.stand_ins import Pace, Room, running, serve_gateway, serve_worker
from bench.machine import this_machine
from bench.serving import wait_until_serving
from octavo.cli.serve.ports import free_port
from tests.support.services.scrape import scrape

SERVICE = "octavo.v1.InferenceService"
START_S = 90.0
PROMPT = 16
LATE_MS = 200.0
ARRIVED = 0.95
IDLE = 0.05  # of the machine: less than this counts as no idle cores
READY = 0.9
"""A thread that ran or waited for a core for at least this share of the time is saturated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """CPU seconds of a process's busiest thread and of all its threads. waited_s: time it was ready but had no core."""

    thread_s: float
    waited_s: float
    all_s: float

    def minus(self, former: "Used") -> "Used":
        """The difference to a former reading."""
        return Used(
            thread_s=self.thread_s - former.thread_s,
            waited_s=self.waited_s - former.waited_s,
            all_s=self.all_s - former.all_s,
        )


def used(pid: int) -> Used:
    """The usage since the process began, as Linux counts it (schedstat)."""
    threads = [(0.0, 0.0)]
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            ran, waited, _ = path.read_text().split()
            threads.append((int(ran) / 1e9, int(waited) / 1e9))
    thread_s, waited_s = max(threads)
    return Used(thread_s=thread_s, waited_s=waited_s, all_s=sum(ran for ran, _ in threads))


def limiter(arrived: float, spent: Mapping[str, Sequence[Used]], seconds: float, *, idle: float) -> str:
    """What was saturated. arrived: share of the requested tokens. idle: share of the machine's cores."""
    if arrived >= ARRIVED:
        return "pace"
    if idle < IDLE and max(_wanted(each, seconds) for of in spent.values() for each in of) < READY:
        return "cores"
    wanted = {role: max(_wanted(each, seconds) for each in of) for role, of in spent.items()}
    role = max(wanted, key=lambda each: wanted[each])
    if wanted[role] < READY:
        return "unknown"
    busiest = max(spent[role], key=lambda each: _wanted(each, seconds))
    return "cores" if busiest.waited_s > busiest.thread_s else role


def _wanted(each: Used, seconds: float) -> float:
    return (each.thread_s + each.waited_s) / seconds


def call(ports: Sequence[int], names: Sequence[str], num_tokens: int, barrier: Any, results: Any) -> None:
    """A caller's process: reads its streams; reports tokens, messages, first and last time, and CPU usage."""
    import grpc

    from octavo.v1 import common_pb2, inference_pb2_grpc
    from octavo.v1 import inference_pb2 as pb

    async def main() -> tuple[int, int, float, float, Used]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for port in ports]
        for channel in channels:
            await channel.channel_ready()
        barrier.wait()
        before, begin_s = used(mp.current_process().pid or 0), time.monotonic()

        async def one(number: int, name: str) -> tuple[int, int]:
            request = pb.GenerateRequest(
                request_id=name,
                token_ids=common_pb2.TokenIds(ids=[hash(name) % 4000 + 5] * PROMPT),
                stop=pb.StopConditions(max_tokens=num_tokens, ignore_eos=True),
                output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
            )
            tokens = messages = 0
            stub = inference_pb2_grpc.InferenceServiceStub(channels[number % len(channels)])
            async for event in stub.Generate(request):
                if event.WhichOneof("event") == "delta":
                    tokens, messages = tokens + len(event.delta.token_ids), messages + 1
            return tokens, messages

        told = await asyncio.gather(*(one(number, name) for number, name in enumerate(names)))
        end_s, spent = time.monotonic(), used(mp.current_process().pid or 0).minus(before)
        for channel in channels:
            await channel.close()
        return sum(tokens for tokens, _ in told), sum(messages for _, messages in told), begin_s, end_s, spent

    results.put(asyncio.run(main()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """streams: per worker."""

    streams: int
    steps_per_s: float
    seconds: float
    callers: int


def measure(num_workers: int, num_gateways: int, load: Load) -> dict[str, Any]:
    """One run in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as made:
        folder, taken = Path(made), set[int]()
        folder.chmod(0o700)
        endpoints = tuple(f"ipc://{folder}/gateway-{number}.sock" for number in range(num_gateways))
        ports = [free_port("127.0.0.1", taken) for _ in endpoints]
        gateways = [(serve_gateway, *pair, "ours") for pair in zip(ports, endpoints, strict=True)]
        metrics = [free_port("127.0.0.1", taken) for _ in range(num_workers)]
        pace = Pace(step_ms=1e3 / load.steps_per_s, prompt_token_us=0.0, late_ms=LATE_MS)
        room = Room(num_blocks=load.streams * 256, max_num_seqs=2 * load.streams, max_batch_tokens=8192)
        token_ids = tuple(token_id for token_id, _ in words())
        workers = [
            (serve_worker, endpoints, f"worker-{number}", str(FOLDER), pace, room, token_ids, port)
            for number, port in enumerate(metrics)
        ]
        with running(*gateways, *workers) as processes:
            _wait_for_all(ports, metrics)
            pids = [process.pid or 0 for process in processes]
            return _drive(num_workers, ports, pids, load)


def _wait_for_all(ports: Sequence[int], metrics: Sequence[int]) -> None:
    """Wait until every gateway serves and has every worker."""
    for port in ports:
        wait_until_serving(f"127.0.0.1:{port}", SERVICE, timeout_s=START_S)
    deadline_s = time.monotonic() + START_S
    for port in metrics:
        while True:
            with suppress(OSError):
                if scrape(port).total("octavo_worker_gateways") >= len(ports):
                    break
            if time.monotonic() > deadline_s:
                raise TimeoutError("the gateways did not take the workers in time")
            time.sleep(0.05)


def _drive(num_workers: int, ports: Sequence[int], pids: Sequence[int], load: Load) -> dict[str, Any]:
    context, num_gateways = mp.get_context("spawn"), len(ports)
    barrier, results = context.Barrier(load.callers + 1), context.Queue()
    names = [f"s{number}" for number in range(load.streams * num_workers)]
    num_tokens = round(load.steps_per_s * load.seconds)
    calls = [(call, ports, names[n :: load.callers], num_tokens, barrier, results) for n in range(load.callers)]
    with running(*calls):
        barrier.wait(START_S)
        before, machine = [used(pid) for pid in pids], psutil.cpu_times()
        told = [results.get(timeout=60 + 20 * load.seconds) for _ in calls]
        spent = [used(pid).minus(former) for pid, former in zip(pids, before, strict=True)]
    seconds = max(end_s for *_, end_s, _ in told) - min(begin_s for _, _, begin_s, _, _ in told)
    tokens, messages = sum(each[0] for each in told), sum(each[1] for each in told)
    by_role = {"gateway": spent[:num_gateways], "worker": spent[num_gateways:], "caller": [each[4] for each in told]}
    asked = len(names) * load.steps_per_s
    ours = sum(each.all_s for of in by_role.values() for each in of)
    idle = psutil.cpu_times().idle - machine.idle
    return {
        "workers": num_workers,
        "gateways": num_gateways,
        "streams": len(names),
        "asked_tokens_per_s": round(asked),
        "tokens_per_s": round(tokens / seconds),
        "arrived": round(tokens / seconds / asked, 3),
        "tokens_per_message": round(tokens / messages, 2),
        "us_per_token": {role: round(1e6 * sum(each.all_s for each in of) / tokens, 1) for role, of in by_role.items()},
        "gateway_us_per_message": round(1e6 * sum(each.all_s for each in by_role["gateway"]) / messages, 1),
        "busiest_loop": {role: round(max(each.thread_s for each in of) / seconds, 2) for role, of in by_role.items()},
        "waited": {role: round(max(each.waited_s for each in of) / seconds, 2) for role, of in by_role.items()},
        "cores_ours": round(ours / seconds, 2),
        "cores_idle": round(idle / seconds, 2),
        "limiter": limiter(tokens / seconds / asked, by_role, seconds, idle=idle / seconds / (psutil.cpu_count() or 1)),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each run."""
    lines = [
        f"{'workers':>7}{'gateways':>9}{'asked':>8}{'tokens/s':>9}{'arrived':>9}{'a message':>10}"
        f"{'µs a token: gateway':>20}{'worker':>7}{'caller':>7}{'loop':>6}{'cores, idle':>13}  limiter"
    ]
    lines += [
        f"{run['workers']:>7}{run['gateways']:>9}{run['asked_tokens_per_s']:>8}{run['tokens_per_s']:>9}"
        f"{run['arrived']:>9.0%}{run['tokens_per_message']:>10.2f}{run['us_per_token']['gateway']:>20.1f}"
        f"{run['us_per_token']['worker']:>7.1f}{run['us_per_token']['caller']:>7.1f}"
        f"{run['busiest_loop']['gateway']:>6.2f}{run['cores_ours']:>7.1f}, {run['cores_idle']:>4.1f}  {run['limiter']}"
        for run in runs
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure every number of workers behind every number of gateways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--streams", type=int, default=32, help="of each worker")
    parser.add_argument("--steps-per-s", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--callers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    load = Load(streams=given.streams, steps_per_s=given.steps_per_s, seconds=given.seconds, callers=given.callers)
    machine, runs = this_machine(), list[dict[str, Any]]()
    for num_gateways in given.gateways:
        for num_workers in given.workers:
            try:
                runs.append(measure(num_workers, num_gateways, load))
            except TimeoutError as error:  # on a busy machine a start may take too long; the others continue
                print(f"{num_workers} workers, {num_gateways} gateways: {error}", file=sys.stderr)
                continue
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    print(machine.line())
    print(table(runs))
    write_json(given.json, {"machine": machine.as_dict(), "runs": runs})


if __name__ == "__main__":
    main()
