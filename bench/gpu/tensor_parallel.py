"""A worker of one rank and of several on the GPUs of one host, in turns, beside its floor and the bars.

    python -m bench.gpu.tensor_parallel [--shape 7B] [--ranks 1 2] [--rounds 1] [--only decode nano …] [--request]
        [--quantization fp8] [--json out/tensor_parallel.json]

Each turn is a process of its own that starts a worker's ranks as a service does (worker/loading/group.py), with random
weights that every rank draws for its part. nano, first token, prefill, decode, host: as in bench/gpu/engine.py. sums:
milliseconds of a decode step's sums over ranks alone, and their bytes; NCCL's, and the smaller of both where ranks also
read each other's memory. The floor is that of one GPU divided by the ranks. --request: one more turn with the largest
number of ranks, `octavo serve` and a request through gRPC.

Where a shape does not fit, or a turn fails, the report says why and the others go on. On a CPU, in little time:
--shape tiny --device cpu.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.figures import write_json
from bench.gpu.device import copy_rate, need_cuda
from bench.gpu.floors import Floors
from bench.gpu.grpc import BenchError, run_load, serving
from bench.gpu.timed_engine import GpuEngine
from bench.gpu.workloads import decode_ms, first_token_ms, host_us, nano, nano_lengths, prefill
from bench.random_checkpoint import write_description
from bench.shapes import SHAPES
from octavo.blockmgr.ids import PrefixCache
from octavo.model.gpu.autotune import time_graph
from octavo.model.gpu.peer_sums import with_peer_sums
from octavo.model.parallel import Ranks, join_ranks
from octavo.worker.config import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS, LoadFormat, WorkerConfig
from octavo.worker.loading.group import load_group
from octavo.worker.loading.loaded import Loaded

WORKLOADS = ("decode", "nano", "first", "prefill", "host", "sums")
SUM_ROWS = (1, 8, 32, 128, 256)
_TURN_TIMEOUT_S = 580.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What two ranks must reach against one, or against their floor: the most, or the least, that a ratio may be."""

    name: str
    most: float | None = None
    least: float | None = None

    def is_met(self, ratio: float) -> bool:
        """Whether the ratio is on the right side of it."""
        return (self.most is None or ratio <= self.most) and (self.least is None or ratio >= self.least)


BARS = {
    "7B": (Bar(name="decode 1, of one rank's ms", most=0.62), Bar(name="nano, of one rank's tokens/s", least=1.7)),
    "32B": (Bar(name="nano, of one rank's tokens/s", least=1.85),),
    "72B": (Bar(name="decode 1, of the floor", most=1.35),),
}
"""Of two ranks, by shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is asked."""

    requests: int = 256
    longest: int = 1024
    batches: tuple[int, ...] = (1, 32, 128, 256)
    num_steps: int = 256
    first_lengths: tuple[int, ...] = (16, 512, 2048, 8192)
    prompts: tuple[int, int] = (64, 2048)
    max_num_seqs: int = 256
    max_model_len: int = 10_240


GPU = Scale()
CPU = Scale(
    requests=4, longest=16, batches=(1, 4), num_steps=8, first_lengths=(16,), prompts=(2, 32), max_num_seqs=4,
    max_model_len=160,
)  # fmt: skip


def scale_of(device: str) -> Scale:
    """A GPU's work would take a CPU hours."""
    return CPU if device == "cpu" else GPU


# ------------------------------------------------------------ one turn: a worker, in this process


def measure_turn(shape: str, size: int, device: str, only: list[str], quantization: str | None) -> dict[str, Any]:
    """All figures of so many ranks."""
    rate = copy_rate() if device != "cpu" else 1e10
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        if device != "cpu":
            torch.cuda.empty_cache()
        begin_s, scale = time.perf_counter(), scale_of(device)
        config = config_of(write_description(Path(folder) / shape, SHAPES[shape]), size, device, quantization)
        loaded = load_group(config, lambda _stage, _done, _total: None)
        start_s = time.perf_counter() - begin_s
        try:
            figures = measure_worker(loaded, config, scale, Floors(config=SHAPES[shape].config, bytes_per_s=rate), only)
        finally:
            loaded.runner.close()
    pool = {"num_blocks": loaded.num_blocks, "block_size": loaded.block_size}
    return {"device": loaded.device, "copy_bytes_per_s": rate, "start_s": round(start_s, 1), **pool, **figures}


def config_of(folder: Path, size: int, device: str, quantization: str | None) -> WorkerConfig:
    """A worker's, as a service starts it, without memory of the host."""
    scale = scale_of(device)
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
    )


def measure_worker(
    loaded: Loaded, config: WorkerConfig, scale: Scale, floors: Floors, only: list[str]
) -> dict[str, dict[str, float]]:
    """What was asked for, each beside its floor in milliseconds where it has one."""
    size, found = config.tensor_parallel_size, dict[str, dict[str, float]]()
    engine = GpuEngine(
        loaded.runner, prefix_cache=PrefixCache.OFF, max_batch_tokens=config.max_batch_tokens  # type: ignore[arg-type]
    )  # fmt: skip

    def note(name: str, figures: dict[str, float], floor_ms: float | None = None) -> None:
        found[name] = figures | ({} if floor_ms is None else {"floor_ms": floor_ms / size})
        cells = "  ".join(f"{key} {value:.3f}" for key, value in found[name].items())
        print(f"  {size} ranks  {name:22s}{cells}", flush=True)

    if "decode" in only:
        for batch in scale.batches:
            ms = decode_ms(engine, batch, num_steps=scale.num_steps)
            note(f"decode {batch}", {"ms": ms}, floors.decode_ms(batch, 128 + scale.num_steps / 2))
    if "nano" in only:
        ask = partial(nano, engine, requests=scale.requests, longest=scale.longest)
        ask(99)  # libraries choose their kernels once
        lengths_N2 = nano_lengths(np.random.default_rng(0), requests=scale.requests, longest=scale.longest)
        note("nano", ask(0), floors.serve_ms(lengths_N2))
    if "first" in only:
        for length in scale.first_lengths:
            ms = first_token_ms(engine, length, times=9 if scale is GPU else 2)
            note(f"first token of {length}", {"ms": ms}, floors.prefill_ms([length]))
    if "prefill" in only:
        count, length = scale.prompts
        note("prefill", prefill(engine, count, length), floors.prefill_ms([length] * count))
    if "host" in only:
        for batch in (1, scale.batches[-1]):
            note(f"host at {batch}", host_us(engine, batch, num_steps=220 if scale is GPU else 20))
    return found


# ------------------------------------------------------------ sums alone


def measure_sums(shape: str, size: int, device: str) -> dict[str, dict[str, float]]:
    """Of a decode step, by its rows: bytes that a rank gives away, and milliseconds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="octavo-ranks-") as folder, context.Pool(size) as pool:
        asked = [(Path(folder) / "meeting", rank, size, shape, device) for rank in range(size)]
        return pool.starmap_async(_sums_of_rank, asked, chunksize=1).get(_TURN_TIMEOUT_S)[0]


def _sums_of_rank(meeting: Path, rank: int, size: int, shape: str, device: str) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    config, place = SHAPES[shape].config, device if device == "cpu" else f"cuda:{rank}"
    dtype, found = torch.float32 if device == "cpu" else torch.bfloat16, dict[str, dict[str, float]]()
    num_sums = 2 * config.num_hidden_layers + 1
    with join_ranks(meeting, rank=rank, size=size, device=place) as plain, torch.inference_mode():
        ways: dict[str, Ranks] = {"library": plain}
        if device != "cpu":
            chosen = with_peer_sums(plain, hidden_size=config.hidden_size, dtype=dtype, device=torch.device(place))
            ways |= {} if chosen.peers is None else {"chosen": chosen}
        for rows in SUM_ROWS:
            x_BD = torch.randn(rows, config.hidden_size, dtype=dtype, device=place)
            figures = {"bytes": float(num_sums * x_BD.numel() * x_BD.element_size())}
            for name, ranks in ways.items():
                figures[f"{name}_ms"] = _time(partial(_sum_often, ranks, x_BD, num_sums), device)
            part_BW = torch.randn(rows, config.vocab_size // size, dtype=dtype, device=place)
            figures["logits_ms"] = _time(partial(plain.concatenate, part_BW), device)
            found[f"sums of {rows} rows"] = figures
    return found


def _sum_often(ranks: Ranks, x_BD: torch.Tensor, count: int) -> None:
    for _ in range(count):
        partial_BD = ranks.room(x_BD)
        partial_BD.copy_(x_BD)
        ranks.sum(partial_BD)


def _drop(_result: object) -> None:
    """Its memory is the graph's."""


def _time(work: Callable[[], object], device: str) -> float:
    """Milliseconds: on a GPU of a recorded graph, as in a step."""
    if device != "cpu":
        return time_graph(lambda: _drop(work()))
    seconds = []
    for _ in range(5):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return 1e3 * statistics.median(seconds)


# ------------------------------------------------------------ a request through gRPC


def measure_request(shape: str, size: int, device: str, quantization: str | None) -> dict[str, Any]:
    """Start of the whole service and one streamed request. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as name:
        folder = Path(name)
        model = write_description(folder / shape, SHAPES[shape])
        flags = [f"--model={model}", f"--device={device}", "--load-format=random", f"--tensor-parallel-size={size}"]
        flags += ["--gateways=1", "--max-model-len=1024", *([f"--quantization={quantization}"] if quantization else [])]
        flags += ["--num-blocks=256", "--num-threads=1"] if device == "cpu" else []
        with serving(folder, flags, start_timeout_s=_TURN_TIMEOUT_S - 60) as service:
            load_flags = ["--num-prompts", "1", "--input-len", "128", "--output-len", "64" if device != "cpu" else "8"]
            load = run_load(None, service, folder, load_flags, timeout_s=120)
            return {"start_s": round(service.start_s, 1), "load": load}


# ------------------------------------------------------------ turns


def turn(words: list[str], timeout_s: float = _TURN_TIMEOUT_S) -> dict[str, Any]:
    """One of the above in a process of its own; {"failed": why} where it does not come to an end."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        out = Path(folder) / "turn.json"
        command = [sys.executable, "-m", "bench.gpu.tensor_parallel", *words, "--turn", str(out)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        try:
            _, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"failed": f"not done in {timeout_s:g} s"}
        if process.returncode or not out.exists():
            return {"failed": "\n".join(said.strip().splitlines()[-3:]) or f"ended with {process.returncode}"}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def judge(shape: str, turns: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every bar of the shape for two ranks that can be told from medians of the turns."""
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
    """Of figures that every turn has."""
    good = [each for each in turns if "failed" not in each]
    names = [name for name, figures in good[0].items() if isinstance(figures, dict)] if good else []
    return {name: {key: statistics.median(each[name][key] for each in good) for key in good[0][name]} for name in names}


def main() -> None:
    """Measure in turns, print and write everything."""
    arguments = parse()
    shape, device = arguments.shape, arguments.device
    if arguments.turn is not None:
        write_json(arguments.turn, _one_turn(arguments))
        return
    if device != "cpu":
        need_cuda()
    common = ["--shape", shape, "--device", device, "--only", *arguments.only]
    common += ["--quantization", arguments.quantization] if arguments.quantization else []
    turns: dict[int, list[dict[str, Any]]] = {size: [] for size in arguments.ranks}
    report: dict[str, Any] = {"shape": shape, "device": device, "rounds": arguments.rounds, "turns": turns}
    for number in range(arguments.rounds):
        for size in arguments.ranks:
            print(f"-- {shape}, {size} ranks, round {number + 1} of {arguments.rounds}", flush=True)
            turns[size].append(_told(turn([*common, "--ranks", str(size)])))
    most = max(arguments.ranks)
    if "sums" in arguments.only and most > 1:
        report["sums"] = _told(turn([*common, "--ranks", str(most), "--kind", "sums"]))
    if arguments.request:
        report["request"] = _told(turn([*common, "--ranks", str(most), "--kind", "request"]))
    report["bars"] = judge(shape, turns)
    for bar in report["bars"]:
        print(f"{'met ' if bar['is_met'] else 'MISS'}  {bar['name']}: {bar['ratio']:.3f}, bar {bar['bar']}")
    write_json(arguments.json, report)


def _told(found: dict[str, Any]) -> dict[str, Any]:
    """As it is, but a failure is printed too, and so are figures of turns that print nothing themselves."""
    if "failed" in found:
        print(f"  failed: {found['failed']}", flush=True)
    for name, figures in found.items():
        if name.startswith("sums of"):
            print(f"  {name:22s}" + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True)
    return found


def _one_turn(arguments: argparse.Namespace) -> dict[str, Any]:
    shape, (size,), device = arguments.shape, arguments.ranks, arguments.device
    if arguments.kind == "sums":
        return measure_sums(shape, size, device)
    try:
        if arguments.kind == "request":
            return measure_request(shape, size, device, arguments.quantization)
        return measure_turn(shape, size, device, arguments.only, arguments.quantization)
    except BenchError as error:
        raise SystemExit(f"error: {error}") from None


def parse() -> argparse.Namespace:
    """The command line. --kind, --turn: of the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--quantization", choices=("int8", "fp8"))
    parser.add_argument("--request", action="store_true", help="one through gRPC, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=("worker", "sums", "request"), default="worker", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
