"""A worker's start on a CUDA device with the embedded model: which runner, which tokens, and what does not fit."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.worker.config import Deterministic, WorkerConfig
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.loader import load_torch
from octavo.worker.loading.memory import DoesNotFit
from octavo.worker.runners.cuda.runner import CudaRunner
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.runners.torch.runner import TorchRunner
from tests.support.worker.scheduling import World, WorldConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def load(**settings: object) -> tuple[Loaded, dict[str, list[tuple[int | None, int | None]]]]:
    """The embedded model in float32, and the progress by stage."""
    stages: dict[str, list[tuple[int | None, int | None]]] = {}
    config = WorkerConfig(
        **{
            "model": "folio-chat", "gateway_endpoints": (), "device": "cuda", "dtype": "float32", "max_num_seqs": 16,
            "max_batch_tokens": 256, "max_model_len": 256, **settings,
        }  # type: ignore[arg-type]
    )  # fmt: skip
    return load_torch(config, lambda stage, done, total: stages.setdefault(stage, []).append((done, total))), stages


def serve(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Greedy outputs of 24 prompts."""
    limits = loaded.scheduler
    config = WorldConfig(
        num_blocks=loaded.num_blocks,
        block_size=loaded.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=limits.max_batch_tokens,
        max_model_len=limits.max_model_len,
        max_in_flight=limits.max_in_flight,
        model=OracleModel(vocab_size=limits.vocab_size, eos_token_ids=()),
    )
    with monkeypatch.context() as patch:
        patch.setattr(WorldConfig, "runner", lambda self: loaded.runner)
        here = World(config)
    rng = np.random.default_rng(5)
    keys = [
        here.add(handle, rng.integers(0, limits.vocab_size, rng.integers(1, 150)).tolist(), max_tokens=40)
        for handle in range(24)
    ]
    here.run()
    here.check_quiet()
    return [here.streams[which].tokens for which in keys]


def test_the_device_picks_the_runner_and_both_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, stages = load()
    assert isinstance(fast.runner, CudaRunner)
    assert fast.scheduler.max_in_flight == 2
    num_compiled, num_kernels = stages["compiling_kernels"][-1]
    assert num_compiled == num_kernels is not None
    assert stages["recording_steps"][-1] == (fast.runner.graphs.num_shapes, fast.runner.graphs.num_shapes)
    slow, _ = load(attention_backend="sdpa")
    assert isinstance(slow.runner, TorchRunner)
    assert (slow.fingerprint, slow.card) == (fast.fingerprint, fast.card)
    got, wanted = serve(fast, monkeypatch), serve(slow, monkeypatch)
    same = sum(one == other for one, other in zip(got, wanted, strict=True))
    assert same >= 23, f"{same} of 24 outputs agree"  # one may meet a tie


def test_deterministic_mode_is_a_model_of_its_own_with_the_same_answers_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, _ = load(deterministic=Deterministic.ON, dtype="bfloat16")
    assert isinstance(fixed.runner, CudaRunner)
    assert fixed.device.endswith(", deterministic")
    first = serve(fixed, monkeypatch)
    del fixed
    again, _ = load(deterministic=Deterministic.ON, dtype="bfloat16", max_num_seqs=5, max_batch_tokens=64)
    assert serve(again, monkeypatch) == first
    plain, _ = load(dtype="bfloat16")
    assert plain.fingerprint != again.fingerprint


def test_what_does_not_fit_says_so_in_three_lines() -> None:
    with pytest.raises(DoesNotFit, match=r"--memory-fraction|--max-model-len|smaller model") as refused:
        load(memory_fraction=0.001)
    assert len(str(refused.value).splitlines()) == 3
    with pytest.raises(DoesNotFit, match="--num-blocks"):
        load(num_blocks=10**9)


def test_the_pool_leaves_what_the_fraction_promises() -> None:
    free = torch.cuda.mem_get_info()[0]
    loaded, _ = load(memory_fraction=0.5, max_num_seqs=4096, max_batch_tokens=4096, max_model_len=2048)
    taken = free - torch.cuda.mem_get_info()[0]
    assert 0.40 * free < taken < 0.52 * free, f"{taken / free:.2f} of what was free, {loaded.num_blocks} blocks"
