"""The ranks of a tensor-parallel group as processes of this machine, on one thread each."""

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from octavo.model import CausalLM
from octavo.model.checkpoint.weight_names import destinations
from octavo.model.parallel import Ranks, join_ranks, part_of
from tests.support.model.interpreter import let_comparisons_be_booleans

TIMEOUT_S = 300.0


class Place(Enum):
    """Where the ranks of a group are."""

    CPU = "cpu"
    GPUS = "a GPU each"  # over NCCL
    ONE_GPU = "one GPU"  # NCCL refuses that: sums go by way of the host


class StagedRanks(Ranks):
    """Ranks whose sums of device's tensors go by way of the host."""

    def sum(self, partial: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        summed = Ranks.sum(self, partial.cpu())
        return (partial if out is None else out).copy_(summed)

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        return Ranks._gather(self, part.cpu()).to(part.device)


def on_ranks(size: int, work: Callable[..., Any], folder: Path, *arguments: Any, place: Place = Place.CPU) -> list[Any]:
    """What work(ranks, *arguments) gives on each rank of a group, in their order. work: of a module, so that another
    process finds it. folder: an empty one. Raises what any of them raises."""
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_one, folder / "meeting", rank, size, place, work, arguments) for rank in range(size)]
        return [future.result(TIMEOUT_S) for future in futures]


def _one(
    meeting: Path, rank: int, size: int, place: Place, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    if "triton" in sys.modules and place is Place.CPU:  # what `work` computes with; this process has no fixtures
        let_comparisons_be_booleans()
    device = f"cuda:{rank}" if place is Place.GPUS else "cpu"
    with (
        join_ranks(meeting, rank=rank, size=size, device=device, timeout_s=TIMEOUT_S) as ranks,
        torch.inference_mode(),
    ):
        if place is Place.ONE_GPU:
            ranks = StagedRanks(rank=rank, size=size, group=ranks.group)
        return _plain(work(ranks, *arguments))


def _plain(value: Any) -> Any:
    """Tensors as arrays: shared memory would end with the process."""
    if isinstance(value, torch.Tensor):
        return value.float().cpu().numpy()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def cut(whole: CausalLM, ranks: Ranks) -> CausalLM:
    """What a rank has of a model."""
    if ranks.size == 1:
        return whole
    model = CausalLM(whole.config, dtype=whole.dtype, device=whole.device, ranks=ranks)
    views = destinations(whole)
    for name, view in destinations(model).items():
        view.copy_(views[name][part_of(name, tuple(views[name].shape), whole.config, ranks)])
    return model


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """What work gives where there is one rank."""
    with torch.inference_mode():
        return _plain(work(Ranks(), *arguments))
