"""The ranks of a tensor-parallel group as processes of this machine, on one thread each."""

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from octavo.model import CausalLM
from octavo.model.checkpoint.weight_names import destinations
from octavo.model.parallel import Ranks, join_ranks, part_of
from tests.support.model.interpreter import let_comparisons_be_booleans

TIMEOUT_S = 300.0


def on_ranks(size: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What work(ranks, *arguments) gives on each rank of a group, in their order. work: of a module, so that another
    process finds it. folder: an empty one. Raises what any of them raises."""
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_one, folder / "meeting", rank, size, work, arguments) for rank in range(size)]
        return [future.result(TIMEOUT_S) for future in futures]


def _one(meeting: Path, rank: int, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    if "triton" in sys.modules:  # what `work` computes with; this process has no fixtures
        let_comparisons_be_booleans()
    with join_ranks(meeting, rank=rank, size=size, timeout_s=TIMEOUT_S) as ranks, torch.inference_mode():
        return _plain(work(ranks, *arguments))


def _plain(value: Any) -> Any:
    """Tensors as arrays: shared memory would end with the process."""
    if isinstance(value, torch.Tensor):
        return value.float().numpy()
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
