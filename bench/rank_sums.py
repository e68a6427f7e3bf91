"""Sums over ranks alone: as many as a decode step's layers have, each added to a stream, in every available way, with a
process for each rank.

Must not know: workers, what else is measured.
"""

import faulthandler
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from bench.figures import write_json
from bench.gpu.grpc import BenchError
from bench.shapes import SHAPES
from octavo.model.gpu.autotune import STEPS, time_graph
from octavo.model.gpu.peer_sums import CANDIDATES, MANY_ROWS, STEPS_OF_MANY, Way, sum_pairs, ways_to_sum
from octavo.model.parallel import Ranks, join_ranks

SUM_ROWS = (1, 8, 32, 128, 256, 1024, 4096, 8192)
CPU_SUM_ROWS = (1, 8, 32)
STILL_S = 60.0
"""After this long in one way at one size, a rank writes its stacks to stderr and ends: on a GPU, waiting for a missing
peer would never end."""


def measure_sums(shape: str, size: int, device: str, wanted: Way, out: Path) -> dict[str, dict[str, float]]:
    """For a decode step, by number of rows: bytes that a rank sends, and milliseconds. out: where figures are written
    as they come. Raises BenchError with the message of the first rank that failed; the others wait for it, and end with
    this process."""
    context = multiprocessing.get_context("spawn")
    ends, processes = list[Connection](), list[BaseProcess]()
    with tempfile.TemporaryDirectory(prefix="octavo-ranks-") as folder:
        for rank in range(size):
            end, theirs = context.Pipe(duplex=False)
            words = (theirs, Path(folder) / "meeting", rank, size, shape, device, wanted, out)
            process = context.Process(target=_try_sums, args=words, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(end)
        found, waiting = dict[str, dict[str, float]](), list(ends)
        while waiting:
            ready = wait(waiting)
            for end in [each for each in waiting if each in ready]:
                try:
                    error, figures = end.recv()
                except EOFError:
                    error, figures = "it ended without a word", {}
                if error is not None:
                    raise BenchError(f"rank {ends.index(end)}: {error}")
                found |= figures
                waiting.remove(end)
        for each in processes:
            each.join()
    return found


def _try_sums(end: Connection, *words: Any) -> None:
    try:
        end.send((None, _sums_of_rank(*words)))
    except BaseException:
        end.send((traceback.format_exc(), {}))


def _sums_of_rank(
    meeting: Path, rank: int, size: int, shape: str, device: str, wanted: Way, out: Path
) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    config, place = SHAPES[shape].config, device if device == "cpu" else f"cuda:{rank}"
    dtype, found = torch.float32 if device == "cpu" else torch.bfloat16, dict[str, dict[str, float]]()
    num_sums = 2 * config.num_hidden_layers
    tell = partial(print, f"    rank {rank}:", file=sys.stderr, flush=True)
    with join_ranks(meeting, rank=rank, size=size, device=place) as plain, torch.inference_mode():
        all_rows = CPU_SUM_ROWS if device == "cpu" else SUM_ROWS
        ways: dict[str, Ranks] = {Way.BY_LIBRARY.value: plain}
        faulthandler.dump_traceback_later(STILL_S, exit=True)
        ways |= ways_to_sum(
            plain,
            CANDIDATES[wanted],
            hidden_size=config.hidden_size,
            max_rows=all_rows[-1],
            dtype=dtype,
            device=torch.device(place),
            note=tell,
        )
        for rows in all_rows:
            x_BD = torch.randn(rows, config.hidden_size, device=place).to(dtype)
            figures = {"bytes": float(num_sums * x_BD.numel() * x_BD.element_size())}
            expected_BD = sum_pairs(plain, x_BD, 1).float()
            for name, ranks in ways.items():
                if ranks.peers is None or ranks.peers.takes(x_BD):
                    faulthandler.dump_traceback_later(STILL_S, exit=True)
                    found_BD = sum_pairs(ranks, x_BD, 1).float()
                    work = partial(sum_pairs, ranks, x_BD, config.num_hidden_layers)
                    figures[f"{name}_ms"] = _time(work, device, steps=STEPS_OF_MANY if rows >= MANY_ROWS else STEPS)
                    figures[f"{name}_us_each"] = 1e3 * figures[f"{name}_ms"] / num_sums
                    figures[f"{name}_off"] = float((found_BD - expected_BD).abs().max())
            part_BW = torch.randn(rows, config.vocab_size // size, dtype=dtype, device=place)
            figures["logits_ms"] = _time(partial(plain.concatenate, part_BW), device)
            found[f"sums of {rows} rows"] = figures
            if rank == 0:
                _print_figures(f"sums of {rows} rows", figures)
                write_json(out, found)
        faulthandler.cancel_dump_traceback_later()
    return found


def _print_figures(name: str, figures: dict[str, float]) -> None:
    print(f"  {name:22s}" + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True)


def _drop(_result: object) -> None:
    """Drop the result, whose memory belongs to the graph."""


def _time(work: Callable[[], object], device: str, steps: int = STEPS) -> float:
    """Milliseconds of the work; on a GPU those of a recorded graph, as in a step."""
    if device != "cpu":
        return time_graph(lambda: _drop(work()), steps=steps)
    seconds = []
    for _ in range(5):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return 1e3 * statistics.median(seconds)
