"""A worker of one rank and of several on the GPUs of one host, in turns, beside its floor and the bars.

    python -m bench.gpu.tensor_parallel [--shape 7B] [--ranks 1 2] [--rounds 1] [--only decode nano …] [--request]
        [--brief] [--batches 1] [--sums library] [--limit-s 580] [--quantization fp8] [--json out/tensor_parallel.json]

Each turn is a process of its own that starts a worker's ranks as a service does (worker/loading/group.py), with random
weights that every rank draws for its part. nano, first token, prefill, decode, host: as in bench/gpu/engine.py. sums,
before the others: milliseconds of a decode step's sums over ranks alone, and their bytes; the library's, and those of
each way in which ranks read each other's memory; where that turn fails, the others do with the library's (--sums). The
floor is that of one GPU divided by the ranks. --request: one more turn with the largest number of ranks, `octavo serve`
and a request through gRPC. --brief: fewer steps and sizes.

Where a shape does not fit, or a turn fails or takes more than --limit-s, the report says why and the others go on: with
the end of what went to stderr, all of which is in a file beside --json, as is what was found up to then. What turns of
other ranks wrote there before is kept, so that ranks can also be measured one by one, each on its GPUs. On a CPU, in
little time: --shape tiny --device cpu.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.figures import write_json
from bench.gpu.device import copy_rate, need_cuda
from bench.gpu.floors import Floors
from bench.gpu.grpc import SUMS_VARIABLE, BenchError, run_load, serving
from bench.gpu.timed_engine import GpuEngine
from bench.gpu.workloads import decode_ms, first_token_ms, host_us, nano, nano_lengths, prefill
from bench.random_checkpoint import write_description
from bench.rank_sums import measure_sums
from bench.shapes import SHAPES
from bench.turns import LIMIT_S, turn
from octavo.blockmgr.ids import PrefixCache
from octavo.model.gpu.peer_sums import Way
from octavo.worker.config import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS, LoadFormat, WorkerConfig
from octavo.worker.loading.group import load_group
from octavo.worker.loading.loaded import Loaded

MODULE = "bench.gpu.tensor_parallel"
WORKLOADS = ("decode", "nano", "first", "prefill", "host", "sums")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What two ranks must reach compared with one, or with their floor: the most, or the least, that a ratio may be."""

    name: str
    most: float | None = None
    least: float | None = None

    def is_met(self, ratio: float) -> bool:
        """Whether the ratio is on the right side of the bar."""
        return (self.most is None or ratio <= self.most) and (self.least is None or ratio >= self.least)


BARS = {
    "7B": (Bar(name="decode 1, of one rank's ms", most=0.62), Bar(name="nano, of one rank's tokens/s", least=1.7)),
    "32B": (Bar(name="nano, of one rank's tokens/s", least=1.85),),
    "72B": (Bar(name="decode 1, of the floor", most=1.35),),
}
"""For two ranks, by shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of the workloads."""

    requests: int = 256
    longest: int = 1024
    batches: tuple[int, ...] = (1, 32, 128, 256)
    num_steps: int = 256
    first_lengths: tuple[int, ...] = (16, 512, 2048, 8192)
    first_times: int = 9
    prompts: tuple[int, int] = (64, 2048)
    host_steps: int = 220
    max_num_seqs: int = 256
    max_model_len: int = 10_240


GPU = Scale()
CPU = Scale(
    requests=4, longest=16, batches=(1, 4), num_steps=8, first_lengths=(16,), first_times=2, prompts=(2, 32),
    host_steps=20, max_num_seqs=4, max_model_len=160,
)  # fmt: skip
BRIEF = Scale(num_steps=96, first_lengths=(512, 2048), first_times=5, prompts=(32, 2048), max_model_len=2_560)
LEAST_SEQS = 8


def scale_of(arguments: argparse.Namespace) -> Scale:
    """Smaller on a CPU, which would take hours for a GPU's work. Without nano, no more rows than requested, so that
    fewer steps are recorded."""
    scale = CPU if arguments.device == "cpu" else BRIEF if arguments.brief else GPU
    if arguments.batches:
        scale = replace(scale, batches=tuple(arguments.batches))
    if arguments.steps:
        scale = replace(scale, num_steps=arguments.steps)
    if {"nano", "prefill"} & set(arguments.only):
        return scale
    return replace(scale, max_num_seqs=min(scale.max_num_seqs, max(LEAST_SEQS, *scale.batches)))


# ------------------------------------------------------------ one turn: a worker, in this process


def measure_turn(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of this number of ranks."""
    shape, (size,), device, scale = arguments.shape, arguments.ranks, arguments.device, scale_of(arguments)
    begin_s = time.perf_counter()
    rate = copy_rate() if device != "cpu" else 1e10
    if device != "cpu":
        torch.cuda.empty_cache()
    print(f"  {size} ranks  copies {rate / 1e12:.2f} TB/s, after {time.perf_counter() - begin_s:.1f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        begin_s = time.perf_counter()
        config = config_of(
            write_description(Path(folder) / shape, SHAPES[shape]), size, device, arguments.quantization, scale
        )
        loaded = load_group(config, _tell_stages(begin_s))
        start_s = time.perf_counter() - begin_s
        pool = {"num_blocks": loaded.num_blocks, "block_size": loaded.block_size}
        about = {"device": loaded.device, "copy_bytes_per_s": rate, "start_s": round(start_s, 1), **pool}
        print(f"  {size} ranks  started in {start_s:.1f} s, {loaded.num_blocks} blocks", flush=True)
        write_json(arguments.turn, about)
        try:
            floors = Floors(config=SHAPES[shape].config, bytes_per_s=rate)
            figures = measure_worker(
                loaded, config, scale, floors, arguments.only, lambda found: write_json(arguments.turn, about | found)
            )
        finally:
            loaded.runner.close()
    return about | figures


def _tell_stages(begin_s: float) -> Callable[[str, int | None, int | None], None]:
    """A callback that prints when each stage of a start begins."""
    seen = set[str]()

    def tell(stage: str, _done: int | None, _total: int | None) -> None:
        if stage not in seen:
            seen.add(stage)
            print(f"    {time.perf_counter() - begin_s:6.1f} s  {stage}", flush=True)

    return tell


def config_of(folder: Path, size: int, device: str, quantization: str | None, scale: Scale) -> WorkerConfig:
    """The configuration of a worker as a service starts it, without host memory; a follower that fails says where."""
    return WorkerConfig(
        model=str(folder),
        gateway_endpoints=(),
        device=device,
        load_format=LoadFormat.RANDOM,
        quantization=quantization,
        tensor_parallel_size=size,
        num_threads=1 if device == "cpu" else None,
        host_kv_gib=0,
        num_blocks=256 if device == "cpu" else None,
        max_model_len=scale.max_model_len,
        max_num_seqs=scale.max_num_seqs,
        max_batch_tokens=CPU_BATCH_TOKENS if device == "cpu" else GPU_BATCH_TOKENS,
        log_format="console",
        log_level="debug",
    )


def measure_worker(
    loaded: Loaded,
    config: WorkerConfig,
    scale: Scale,
    floors: Floors,
    only: list[str],
    keep: Callable[[dict[str, dict[str, float]]], None],
) -> dict[str, dict[str, float]]:
    """Measure what was asked for, each figure beside its floor in milliseconds if it has one. keep: is given all
    figures, after each."""
    size, found = config.tensor_parallel_size, dict[str, dict[str, float]]()
    engine = GpuEngine(
        loaded.runner, prefix_cache=PrefixCache.OFF, max_batch_tokens=config.max_batch_tokens  # type: ignore[arg-type]
    )  # fmt: skip

    def note(name: str, figures: dict[str, float], floor_ms: float | None = None) -> None:
        found[name] = figures | ({} if floor_ms is None else {"floor_ms": floor_ms / size})
        cells = "  ".join(f"{key} {value:.3f}" for key, value in found[name].items())
        print(f"  {size} ranks  {name:22s}{cells}", flush=True)
        keep(found)

    if "decode" in only:
        for batch in scale.batches:
            ms = decode_ms(engine, batch, num_steps=scale.num_steps)
            note(f"decode {batch}", {"ms": ms}, floors.decode_ms(batch, 128 + scale.num_steps / 2))
    if "nano" in only:
        ask = partial(nano, engine, requests=scale.requests, longest=scale.longest)
        nano(engine, 99, requests=scale.requests // 4, longest=scale.longest // 4)  # warm-up: libraries choose kernels
        lengths_N2 = nano_lengths(np.random.default_rng(0), requests=scale.requests, longest=scale.longest)
        note("nano", ask(0), floors.serve_ms(lengths_N2))
    if "first" in only:
        for length in scale.first_lengths:
            ms = first_token_ms(engine, length, times=scale.first_times)
            note(f"first token of {length}", {"ms": ms}, floors.prefill_ms([length]))
    if "prefill" in only:
        count, length = scale.prompts
        note("prefill", prefill(engine, count, length), floors.prefill_ms([length] * count))
    if "host" in only:
        for batch in (1, scale.batches[-1]):
            note(f"host at {batch}", host_us(engine, batch, num_steps=scale.host_steps))
    return found


# ------------------------------------------------------------ a request through gRPC


def measure_request(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start of the whole service and one streamed request. Raises BenchError."""
    shape, (size,), device, quantization = arguments.shape, arguments.ranks, arguments.device, arguments.quantization
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as name:
        folder = Path(name)
        model = write_description(folder / shape, SHAPES[shape])
        flags = [f"--model={model}", f"--device={device}", "--load-format=random", f"--tensor-parallel-size={size}"]
        flags += ["--gateways=1", "--max-model-len=1024", f"--max-num-seqs={LEAST_SEQS}", "--host-kv-gib=0"]
        flags += [f"--quantization={quantization}"] if quantization else []
        flags += ["--num-blocks=256", "--num-threads=1"] if device == "cpu" else []
        with serving(folder, flags, start_timeout_s=arguments.limit_s) as service:
            print(f"  {size} ranks  ready in {service.start_s:.1f} s", flush=True)
            write_json(arguments.turn, {"start_s": round(service.start_s, 1)})
            load_flags = ["--num-prompts", "1", "--input-len", "128", "--output-len", "64" if device != "cpu" else "8"]
            load = run_load(None, service, folder, load_flags, timeout_s=arguments.limit_s)
            print(f"  {size} ranks  {json.dumps(load)[:600]}", flush=True)
            return {"start_s": round(service.start_s, 1), "load": load}


# ------------------------------------------------------------ all of them


def judge(shape: str, turns: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every bar of the shape for two ranks that can be judged from medians of the turns."""
    ratios = {}
    one, two = ({} if size not in turns else _medians(turns[size]) for size in (1, 2))
    if "decode 1" in one and "decode 1" in two:
        ratios["decode 1, of one rank's ms"] = two["decode 1"]["ms"] / one["decode 1"]["ms"]
    if "nano" in one and "nano" in two:
        ratios["nano, of one rank's tokens/s"] = two["nano"]["tokens_per_s"] / one["nano"]["tokens_per_s"]
    if "decode 1" in two:
        ratios["decode 1, of the floor"] = two["decode 1"]["ms"] / two["decode 1"]["floor_ms"]
    return [
        {
            "name": bar.name, "ratio": ratios[bar.name], "bar": bar.most if bar.least is None else bar.least,
            "is_met": bar.is_met(ratios[bar.name]),
        }
        for bar in BARS.get(shape, ())
        if bar.name in ratios
    ]  # fmt: skip


def _medians(turns: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The median of each figure over the turns that have it, including figures from before a turn failed."""
    names = {name for each in turns for name, figures in each.items() if isinstance(figures, dict)}
    found = {name: [each[name] for each in turns if name in each] for name in names}
    return {
        name: {key: statistics.median(figures[key] for figures in each) for key in each[0]}
        for name, each in found.items()
    }


def main() -> None:
    """Measure in turns, print and write everything."""
    arguments = parse()
    if arguments.turn is not None:
        write_json(arguments.turn, _one_turn(arguments))
        return
    if arguments.device != "cpu":
        need_cuda()
    os.environ[SUMS_VARIABLE] = arguments.sums
    report = _report_of(arguments)
    turns, most = report["turns"], max(arguments.ranks)
    if "sums" in arguments.only and most > 1:
        report["sums"] = _measured(arguments, report, "sums", most, f"{arguments.shape}, sums over {most} ranks")
        if "failed" in report["sums"] and arguments.sums == Way.FASTEST.value:
            print("  so that the other turns do with the library's sums", flush=True)
            os.environ[SUMS_VARIABLE] = Way.BY_LIBRARY.value
    if set(arguments.only) != {"sums"}:
        for number in range(arguments.rounds):
            for size in arguments.ranks:
                title = f"{arguments.shape}, {size} ranks, round {number + 1} of {arguments.rounds}"
                turns[size].append(_measured(arguments, report, "worker", size, title))
    if arguments.request:
        title = f"{arguments.shape}, a request through {most} ranks"
        report["request"] = _measured(arguments, report, "request", most, title)
    report["bars"] = judge(arguments.shape, turns)
    for bar in report["bars"]:
        print(f"{'met ' if bar['is_met'] else 'MISS'}  {bar['name']}: {bar['ratio']:.3f}, bar {bar['bar']}", flush=True)
    write_json(arguments.json, report)


def _report_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """A new report, with earlier figures of the same shape for other numbers of ranks."""
    turns: dict[int, list[dict[str, Any]]] = {size: [] for size in arguments.ranks}
    if arguments.json is not None and arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        if before["shape"] == arguments.shape and before["device"] == arguments.device:
            turns = {int(size): each for size, each in before["turns"].items()} | turns
    return {"shape": arguments.shape, "device": arguments.device, "rounds": arguments.rounds, "turns": turns}


def _measured(
    arguments: argparse.Namespace, report: dict[str, Any], kind: str, size: int, title: str
) -> dict[str, Any]:
    """Run a turn and print its figures, or why there are none; writes all figures so far."""
    print(f"-- {title}", flush=True)
    begin_s, words = time.monotonic(), ["--shape", arguments.shape, "--device", arguments.device, "--only"]
    words += [*arguments.only, "--ranks", str(size), "--kind", kind]
    words += [f"--quantization={arguments.quantization}"] if arguments.quantization else []
    words += [f"--sums={os.environ[SUMS_VARIABLE]}"]
    words += ["--brief"] if arguments.brief else []
    words += ["--batches", *map(str, arguments.batches)] if arguments.batches else []
    words += [f"--steps={arguments.steps}"] if arguments.steps else []
    beside = arguments.json
    errors = None if beside is None else beside.with_name(f"{beside.stem}_{kind}_{size}.log")
    found = turn(MODULE, words, limit_s=arguments.limit_s, errors=errors)
    print(
        f"  {time.monotonic() - begin_s:.1f} s" + (f"; failed: {found['failed']}" if "failed" in found else ""),
        flush=True,
    )
    write_json(arguments.json, report | {"latest": {"title": title, **found}})
    return found


def _one_turn(arguments: argparse.Namespace) -> dict[str, Any]:
    kinds = {"request": measure_request, "worker": measure_turn}
    try:
        if arguments.kind == "sums":
            (size,) = arguments.ranks
            return measure_sums(arguments.shape, size, arguments.device, Way(arguments.sums), arguments.turn)
        return kinds[arguments.kind](arguments)
    except BenchError as error:
        raise SystemExit(f"error: {error}") from None


def parse() -> argparse.Namespace:
    """The command line. --kind, --turn: for the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--quantization", choices=("int8", "fp8"))
    parser.add_argument("--brief", action="store_true", help="fewer steps and sizes")
    parser.add_argument("--batches", type=int, nargs="+", help="of decode")
    parser.add_argument("--steps", type=int, help="of decode")
    parser.add_argument("--sums", choices=[way.value for way in Way], default=Way.FASTEST.value)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a turn")
    parser.add_argument("--request", action="store_true", help="one through gRPC, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=("worker", "sums", "request"), default="worker", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
