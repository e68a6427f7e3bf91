"""A worker's start on a CUDA device with weights and a cache of fewer bits."""

import gc
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.worker.config import WorkerConfig
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.loader import load_torch
from octavo.worker.runners.cuda.runner import CudaRunner
from tests.support.model.packed_checkpoints import AWQ_CONFIG, GPTQ_CONFIG, write_packed_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def load(model: str = "folio-chat", **settings: object) -> Loaded:
    config = WorkerConfig(
        **{
            "model": model, "gateway_endpoints": (), "device": "cuda", "max_num_seqs": 8, "max_batch_tokens": 128,
            "max_model_len": 128, **settings,
        }  # type: ignore[arg-type]
    )  # fmt: skip
    return load_torch(config, lambda stage, done, total: None)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("kv_cache_dtype", [None, "fp8"])
def test_a_worker_starts_with_rounded_weights(quantization: str, kv_cache_dtype: str | None) -> None:
    loaded = load(quantization=quantization, kv_cache_dtype=kv_cache_dtype, num_blocks=64)
    assert isinstance(loaded.runner, CudaRunner)
    assert f"{quantization} weights" in loaded.device
    assert ("fp8 cache" in loaded.device) == (kv_cache_dtype == "fp8")


@pytest.mark.parametrize("packing", [GPTQ_CONFIG, GPTQ_CONFIG | {"bits": 8}, AWQ_CONFIG])
def test_a_worker_keeps_packed_weights_as_they_are(packing: dict[str, object], tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, packing | {"group_size": 32})
    loaded = load(str(tmp_path), num_blocks=64)
    assert isinstance(loaded.runner, CudaRunner)
    assert loaded.runner.graphs.step.weights.is_quantized


@pytest.mark.alone  # it looks at free memory
def test_an_fp8_cache_has_twice_the_blocks() -> None:
    # Enough that what is needed besides is small, too little for all that so many requests may hold.
    share = min(0.9, 10 * 2**30 / free_bytes())
    settings = {"memory_fraction": share, "max_num_seqs": 4096, "max_batch_tokens": 4096, "max_model_len": 2048}
    plain = load(**settings).num_blocks
    small = load(kv_cache_dtype="fp8", **settings).num_blocks
    assert small == pytest.approx(2 * plain, rel=0.2)


def free_bytes() -> int:
    """Of the device, without what tests before this one left to the collector and to torch's allocator."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
