"""Which router finds the worker that has a conversation: `python -m bench.gateway.routing [--json FILE]`.

64 conversations of six turns, side by side, over four workers whose prefix caches together have a little more room than
all conversations need: one that is sent elsewhere is computed again, and pushes out another. The routers in turns, on
the same seeded conversations by the same interface (OpenAI's HTTP, streamed): our gateway in front of four workers; the
same with a policy that draws lots, and with one that goes round; smg's cache_aware in front of four services of a
gateway and a worker each. Workers are real but for the model: real block manager, and steps that take a model's time
(--step-ms, and --prompt-token-us for each prompt token that is computed). Prints a table, --json writes every run.

Hit: cached prompt tokens over prompt tokens, by the callers' receipts; and by the workers' metrics, what they did not
compute. First token: from the request, ms. Way: the same of a short question with nobody else about, which is what the
step, the interface and the processes between take.
"""

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.figures import percentile, write_json
from bench.gateway.conversations import FOLDER, Shape, Turn, ask, draw, hold, words
from bench.gateway.stand_ins import Pace, Room, running, serve_front, serve_gateway, serve_worker
from bench.machine import this_machine
from octavo.cli.serve.ports import free_port
from tests.support.services.dynamo import dynamo
from tests.support.services.interop import NoEnvironment, interop_python
from tests.support.services.scrape import scrape
from tests.support.services.smg import smg

START_S = 180.0
NUM_LONE = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What stays the same for all routers."""

    workers: int
    pace: Pace
    room: Room
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A routed service: port of its HTTP interface, ports of its workers' metrics."""

    port: int
    worker_ports: tuple[int, ...]


@contextmanager
def of_gateway(setting: Setting, folder: Path, policy: str) -> Iterator[Place]:
    """One gateway in front of all workers, with our front before it."""
    taken: set[int] = set()
    port, grpc_port = free_port("127.0.0.1", taken), free_port("127.0.0.1", taken)
    endpoint = f"ipc://{folder}/gateway.sock"
    workers, ports = _workers(setting, [endpoint] * setting.workers, taken)
    gateway = (serve_gateway, grpc_port, endpoint, policy)
    with running(gateway, *workers, (serve_front, port, (f"127.0.0.1:{grpc_port}",))):
        _wait_until_taken(ports)
        yield Place(port=port, worker_ports=ports)


@contextmanager
def services(setting: Setting, folder: Path) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """A gateway for each worker: the gateways' addresses, and the ports of the workers' metrics."""
    taken: set[int] = set()
    grpc_ports = [free_port("127.0.0.1", taken) for _ in range(setting.workers)]
    endpoints = [f"ipc://{folder}/gateway-{number}.sock" for number in range(setting.workers)]
    workers, ports = _workers(setting, endpoints, taken)
    gateways = [(serve_gateway, *pair, "ours") for pair in zip(grpc_ports, endpoints, strict=True)]
    with running(*gateways, *workers):
        _wait_until_taken(ports)
        yield [f"127.0.0.1:{port}" for port in grpc_ports], ports


@contextmanager
def of_smg(setting: Setting, folder: Path) -> Iterator[Place]:
    """smg in front of services. Raises NoEnvironment if smg is not available."""
    python = interop_python("smg")
    with services(setting, folder) as (targets, ports), smg(python, folder, targets, "--policy=cache_aware") as url:
        yield Place(port=int(url.rpartition(":")[2]), worker_ports=ports)


@contextmanager
def of_dynamo(setting: Setting, folder: Path, *flags: str) -> Iterator[Place]:
    """Dynamo in front of services. flags: for its frontend. Raises NoEnvironment if Dynamo is not available."""
    python, inside = interop_python("dynamo"), folder / "dynamo"
    inside.mkdir()
    with services(setting, folder) as (targets, ports), dynamo(python, inside, targets, *flags) as front:
        yield Place(port=front.port, worker_ports=ports)


ROUTERS: dict[str, Callable[[Setting, Path], AbstractContextManager[Place]]] = {
    "ours": lambda setting, folder: of_gateway(setting, folder, "ours"),
    "smg cache_aware": of_smg,
    "Dynamo KV router": of_dynamo,
    "Dynamo by prompt alone": lambda setting, folder: of_dynamo(setting, folder, "--no-router-track-active-blocks"),
    "random": lambda setting, folder: of_gateway(setting, folder, "random"),
    "round robin": lambda setting, folder: of_gateway(setting, folder, "round robin"),
}


def _workers(
    setting: Setting, endpoints: Sequence[str], taken: set[int]
) -> tuple[list[tuple[Any, ...]], tuple[int, ...]]:
    ports = tuple(free_port("127.0.0.1", taken) for _ in endpoints)
    token_ids = tuple(token_id for token_id, _ in words())
    calls = [
        (serve_worker, (endpoint,), f"worker-{number}", str(FOLDER), setting.pace, setting.room, token_ids, port)
        for number, (endpoint, port) in enumerate(zip(endpoints, ports, strict=True))
    ]
    return calls, ports


def _wait_until_taken(ports: Sequence[int]) -> None:
    """Wait until a gateway has every worker."""
    deadline_s = time.monotonic() + START_S
    for port in ports:
        while not _is_ready(port):
            if time.monotonic() > deadline_s:
                raise TimeoutError("no gateway took the workers in time")
            time.sleep(0.05)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _wait_until_answered(port: int) -> None:
    """Wait until the interface answers a question."""
    deadline_s, problem = time.monotonic() + START_S, ""
    while time.monotonic() < deadline_s:
        try:
            ask(port, [{"role": "user", "content": "Hello."}], 1)
        except (OSError, ValueError) as error:
            problem = repr(error)
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"nothing answers: {problem}")


def measure(router: str, seed: int, setting: Setting) -> dict[str, Any]:
    """One run in fresh processes."""
    conversations = draw(seed, setting.shape)
    with tempfile.TemporaryDirectory(prefix="octavo-") as made:
        folder = Path(made)
        folder.chmod(0o700)
        with ROUTERS[router](setting, folder) as place:
            _wait_until_answered(place.port)
            before, start_s = [_computed(port) for port in place.worker_ports], time.monotonic()
            turns = hold(place.port, conversations, setting.shape.answer)
            seconds = time.monotonic() - start_s
            computed = [_computed(port) - former for port, former in zip(place.worker_ports, before, strict=True)]
            way_ms = round(percentile([1e3 * _again(place.port) for _ in range(NUM_LONE)], 50), 1)
    return {"router": router, "seed": seed, "seconds": round(seconds, 1), "way_ms": way_ms} | figures(turns, computed)


def _again(port: int) -> float:
    """Seconds to the first token of a question that every worker was asked before, with no other load."""
    turn, _ = ask(port, [{"role": "user", "content": "Hello."}], 1)
    return turn.first_s


def _computed(port: int) -> float:
    return scrape(port).total("octavo_prefill_tokens_total")


def figures(turns: Sequence[Turn], computed: Sequence[float]) -> dict[str, Any]:
    """The figures of one run. computed: prompt tokens that each worker computed."""
    answered = [turn for turn in turns if not turn.error]
    prompt = sum(turn.prompt_tokens for turn in answered)
    first_ms = [1e3 * turn.first_s for turn in answered]
    later_ms = [1e3 * turn.first_s for turn in answered if turn.number] or first_ms
    return {
        "answered": len(answered),
        "errors": sorted({turn.error for turn in turns if turn.error})[:3],
        "prompt_tokens": prompt,
        "hit_receipts": round(sum(turn.cached_tokens for turn in answered) / prompt, 4),
        "hit_workers": round(1 - sum(computed) / prompt, 4),
        "first_ms_p50": round(percentile(first_ms, 50), 1),
        "first_ms_p99": round(percentile(first_ms, 99), 1),
        "later_first_ms_p50": round(percentile(later_ms, 50), 1),
        "busiest_share": round(max(computed) / max(sum(computed), 1), 3),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each router: means over the seeds, and the worst."""
    lines = [
        f"{'router':<18}{'runs':>5}{'answered':>10}{'hit, receipts':>22}{'hit, workers':>14}"
        f"{'first token p50':>18}{'p99 (worst)':>20}{'way':>8}{'busiest worker':>16}"
    ]
    for router in dict.fromkeys(run["router"] for run in runs):
        of = [run for run in runs if run["router"] == router]
        receipts = [run["hit_receipts"] for run in of]
        worst = max(run["first_ms_p99"] for run in of)
        lines.append(
            f"{router:<18}{len(of):>5}{sum(run['answered'] for run in of):>10}"
            f"{statistics.mean(receipts):>9.1%} ({min(receipts):.1%} up){_mean(of, 'hit_workers'):>11.1%}"
            f"{_mean(of, 'first_ms_p50'):>15.0f} ms{_mean(of, 'first_ms_p99'):>9.0f} ({worst:.0f}) ms"
            f"{_mean(of, 'way_ms'):>5.0f} ms{_mean(of, 'busiest_share'):>16.0%}"
        )
    return "\n".join(lines)


def _mean(runs: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.mean(run[name] for run in runs)


def main() -> None:
    """Run every router with every seed, in turns; a different one begins each time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS), metavar="ROUTER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--num-blocks", type=int, default=1500, help="of each worker, of 16 tokens")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="of each worker")
    parser.add_argument("--step-ms", type=float, default=Pace.step_ms)
    parser.add_argument("--prompt-token-us", type=float, default=Pace.prompt_token_us)
    for field in fields(Shape):
        flag, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        parser.add_argument(flag, type=kind, default=field.default)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    setting = Setting(
        workers=given.workers,
        pace=Pace(step_ms=given.step_ms, prompt_token_us=given.prompt_token_us),
        room=Room(num_blocks=given.num_blocks, max_num_seqs=given.max_num_seqs),
        shape=Shape(**{field.name: getattr(given, field.name) for field in fields(Shape)}),
    )
    machine, runs, missing = this_machine(), list[dict[str, Any]](), dict[str, str]()

    def content() -> dict[str, Any]:
        return {"machine": machine.as_dict(), "setting": asdict(setting), "runs": runs, "missing": missing}

    for turn, seed in enumerate(given.seeds):
        shift = turn % len(given.routers)
        for router in given.routers[shift:] + given.routers[:shift]:
            if router in missing:
                continue
            try:
                runs.append(measure(router, seed, setting))
            except (NoEnvironment, TimeoutError, AssertionError) as error:  # report it; the others continue
                missing[router] = str(error)
                continue
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            write_json(given.json, content())
    print(machine.line())
    print(table(runs))
    for router, why in missing.items():
        print(f"{router}: not measured: {why}")
    write_json(given.json, content())


if __name__ == "__main__":
    mp.freeze_support()
    main()
