"""Deterministic mode: the same ids and log-probabilities whatever else is in the batch, on a CPU, and on a GPU's steps
in Triton's interpreter (the GPU itself: tests/gpu/test_gpu_deterministic.py)."""

import pytest
import torch

from octavo.model import CausalLM
from octavo.model.cpu.native import native_library
from octavo.model.invariant import make_invariant
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig
from tests.support.model.interpreter import sum_products_in_one_order
from tests.support.model.invariant_model import random_model
from tests.support.worker.invariance import Invariance, Limits, check

LIMITS = Limits(num_blocks=400, block_size=4, max_slots=40, max_batch_tokens=96, max_model_len=120, vocab_size=301)


def torch_runner(model: CausalLM, backend: str) -> TorchRunner:
    runner = TorchRunner(
        model,
        TorchRunnerConfig(
            num_blocks=LIMITS.num_blocks,
            block_size=LIMITS.block_size,
            max_slots=LIMITS.max_slots,
            max_model_len=LIMITS.max_model_len,
            vocab_size=LIMITS.vocab_size,
            backend=backend,
        ),
    )
    runner.kv.k_pool_LPKBH.fill_(torch.nan)
    runner.kv.v_pool_LPKBH.fill_(torch.nan)
    return runner


@pytest.mark.skipif(native_library() is None, reason="no C compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_an_answer_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    model = random_model(dtype)
    make_invariant(model, max_positions=LIMITS.max_model_len + 1)
    check(torch_runner(model, "invariant"), LIMITS)


def test_without_the_mode_it_does() -> None:
    """The control: what the others would find. Of which dtype depends on the CPU: on one with no more than AVX2, a row
    in bf16 has the same bits in any batch."""

    def depends_on_the_batch(dtype: torch.dtype) -> bool:
        here = Invariance(runner=torch_runner(random_model(dtype), "sdpa"), limits=LIMITS)
        wanted = here.alone()
        return any(outcomes != wanted for _, outcomes in here.ways())

    assert any(map(depends_on_the_batch, (torch.float32, torch.bfloat16)))


@pytest.mark.slow
@pytest.mark.timeout(1500)  # a minute where nobody else works
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_the_steps_of_a_gpu_give_an_answer_that_does_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu does it on the device")
    sum_products_in_one_order(monkeypatch)
    from tests.support.worker.cuda_runners import CONFIG as TINY
    from tests.support.worker.cuda_runners import cuda_runner

    limits = Limits(
        num_blocks=60, block_size=4, max_slots=6, max_batch_tokens=24, max_model_len=48, vocab_size=120,
        num_prompt=13, num_output=3, crowd=4, chunk_sizes=(5,),
    )  # fmt: skip
    check(cuda_runner(TINY, limits), limits)
