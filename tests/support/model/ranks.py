"""The ranks of a tensor-parallel group as processes on this machine, with one thread each."""

import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from octavo.model import CausalLM
from octavo.model.checkpoint.weight_names import destinations
from octavo.model.parallel import Ranks, join_ranks, part_of
from tests.support.model.interpreter import prepare_interpreter

TIMEOUT_S = 300.0
SHOW_TIMEOUT_S, END_TIMEOUT_S = 5.0, 20.0
IMPORTED = ["pytest", "tests.support.model.ranks", "tests.support.worker.rank_steps"]
"""Imports that most ranks need, made once for all groups of a session: they take as long as most ranks' work."""

MET = None  # the first message of each rank


class Place(Enum):
    """Where the ranks of a group run."""

    CPU = "cpu"
    GPUS = "a GPU each"  # over NCCL
    ONE_GPU = "one GPU"  # NCCL refuses that: sums go through the host


class RankFailed(AssertionError):
    """Names the failed rank, with its traceback; or says that ranks did not end, with the stacks of each on stderr."""


class StagedRanks(Ranks):
    """Ranks whose sums of device tensors go through the host."""

    def sum(self, partial: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        summed = Ranks.sum(self, partial.cpu())
        return (partial if out is None else out).copy_(summed)

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        return Ranks._gather(self, part.cpu()).to(part.device)


def on_ranks(
    size: int,
    work: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    place: Place = Place.CPU,
    timeout_s: float = TIMEOUT_S,
    meet_s: float = TIMEOUT_S,
) -> list[Any]:
    """The results of work(ranks, *arguments) on the ranks of a group, in order of rank.

    work: a function at the top level of a module, so that another process finds it. folder: an empty one. timeout_s:
      bounds the work, counted from when all ranks have met. meet_s: bounds the time until then; a busy machine may take
      long to import what they need.

    Raises RankFailed at the first rank that fails, without waiting for the others, which wait for it. If ranks do not
    end in time, each first writes its stacks to stderr.
    """
    if place is Place.CPU:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
    else:
        context = multiprocessing.get_context("spawn")
    processes, ends = list[BaseProcess](), list[Connection]()
    try:
        for rank in range(size):
            end, theirs = context.Pipe(duplex=False)
            words = (theirs, folder / "meeting", rank, size, place, work, arguments, dict(os.environ), Stderr())
            process = context.Process(target=_one, args=words, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(end)
        return _results(processes, ends, timeout_s, meet_s)
    finally:
        _end(processes)


class Stderr:
    """Passed to a new process, makes the current stderr of this process that of the new one."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any]]:
        return _take_stderr, (reduction.DupFd(2),)


def _take_stderr(its: Any) -> None:
    descriptor = its.detach()
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _results(processes: list[BaseProcess], ends: list[Connection], timeout_s: float, meet_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    met, deadline_s = set[int](), time.monotonic() + meet_s
    while len(found) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in found]
        ready = wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            for process in processes:
                _show(process)
            raise RankFailed(f"{len(found)} of {len(ends)} ranks came to an end in time")
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                if (said := ends[rank].recv()) is MET:
                    met.add(rank)
                    if len(met) == len(ends):
                        deadline_s = time.monotonic() + timeout_s
                    continue
                error, found[rank] = said
            except EOFError:
                processes[rank].join(END_TIMEOUT_S)
                raise RankFailed(f"rank {rank} ended with status {processes[rank].exitcode}") from None
            if error is not None:
                raise RankFailed(f"rank {rank}: {error}")
    return [found[rank] for rank in range(len(ends))]


def _show(process: BaseProcess) -> None:
    """Make the process write the stacks of its threads to stderr and end."""
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGABRT)
        process.join(SHOW_TIMEOUT_S)  # one after the other, since they write to the same file


def _end(processes: list[BaseProcess]) -> None:
    """End the processes, whose results are in: those still alive may wait for another rank."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    for process in processes:
        if sys.exc_info()[0] is None:
            process.join(max(0.0, deadline_s - time.monotonic()))
        elif process.is_alive():
            process.join(1.0)  # lets it finish writing
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _one(
    end: Connection, meeting: Path, rank: int, size: int, place: Place, work: Callable[..., Any],
    arguments: tuple[Any, ...], environment: dict[str, str], _stderr: None,
) -> None:  # fmt: skip
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    torch.set_num_threads(1)
    if "triton" in sys.modules and place is Place.CPU:  # `work` runs kernels, and this process has no fixtures
        prepare_interpreter()
    device = f"cuda:{rank}" if place is Place.GPUS else "cpu"
    try:
        with (
            join_ranks(meeting, rank=rank, size=size, device=device, timeout_s=TIMEOUT_S) as ranks,
            torch.inference_mode(),
        ):
            end.send(MET)
            if place is Place.ONE_GPU:
                ranks = StagedRanks(rank=rank, size=size, group=ranks.group)
            try:
                answer: tuple[str | None, Any] = None, _plain(work(ranks, *arguments))
            except BaseException:
                answer = traceback.format_exc(), None
            end.send(answer)  # before leaving the group, where a failed rank may hang
    except BaseException:
        end.send((traceback.format_exc(), None))


def _plain(value: Any) -> Any:
    """Tensors converted to float32 arrays, since shared memory would end with the process."""
    if isinstance(value, torch.Tensor):
        return value.float().cpu().numpy()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def cut(whole: CausalLM, ranks: Ranks) -> CausalLM:
    """The part of a model that a rank has."""
    if ranks.size == 1:
        return whole
    model = CausalLM(whole.config, dtype=whole.dtype, device=whole.device, ranks=ranks)
    views = destinations(whole)
    for name, view in destinations(model).items():
        view.copy_(views[name][part_of(name, tuple(views[name].shape), whole.config, ranks)])
    return model


def bytes_read() -> int:
    """Bytes that this process has read, as the system counts them."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of work with a single rank."""
    with torch.inference_mode():
        return _plain(work(Ranks(), *arguments))


class FileMemory:
    """Stands for the device memory of model/gpu/peer_sums.py: memory of one shape on every rank, which all ranks map.
    folder: an empty one, the same for all."""

    def __init__(
        self, folder: Path, shape: tuple[int, ...], dtype: torch.dtype, _device: torch.device, ranks: Ranks
    ) -> None:
        number, size = len(list(folder.glob(f"*-{ranks.rank}"))), math.prod(shape)
        ranks.least(0)  # no rank creates files before all have counted them
        names = [str(folder / f"{number}-{rank}") for rank in range(ranks.size)]
        self._all = [torch.from_file(name, shared=True, size=size, dtype=dtype).view(shape) for name in names]
        ranks.least(0)  # and none counts again before all have created theirs

    def of_all(self) -> list[torch.Tensor]:
        return self._all


def summing_shares(ranks: Ranks, shape: tuple[int, int], folder: Path, *, least_rows: int = 1) -> Ranks:
    """These ranks, on CPUs, but summing float32 streams of this shape by shares, through files in the folder."""
    from octavo.model.gpu import divided_sums  # which needs triton
    from octavo.model.kernels.small_batch import divided_sum

    divided_sum.GRAIN = 2
    with (
        mock.patch.object(divided_sums, "SharedMemory", partial(FileMemory, folder)),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        sums = divided_sums.SumsByShares(ranks, shape, torch.float32, torch.device("cpu"))
    sums.least_rows = least_rows
    return replace(ranks, divided=sums)
