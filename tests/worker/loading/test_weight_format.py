"""What a worker's `quantization` does to the weights."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from octavo.model import load_model, resolve_checkpoint
from octavo.model.cpu.products import can_panel, multiplies_integers
from octavo.model.errors import ConfigError
from octavo.model.layers import linear
from octavo.model.layers.linear import FormatUnavailable, WeightFormat
from octavo.worker.config import Deterministic, WorkerConfig
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.loader import load_torch
from octavo.worker.loading.memory import weights_bytes
from octavo.worker.loading.weight_format import check_format, check_kernels, rounding_of, with_rounding
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.model.packed_checkpoints import AWQ_CONFIG, GPTQ_CONFIG, write_packed_checkpoint

needs_panels = pytest.mark.skipif(not can_panel(torch.empty(1, 2, dtype=torch.bfloat16)), reason="no C compiler here")


def load(
    quantization: str | None,
    *,
    dtype: str | None = None,
    model: str = "folio-chat",
    kv_cache_dtype: str | None = None,
    deterministic: Deterministic = Deterministic.OFF,
) -> Loaded:
    config = WorkerConfig(
        model=model,
        kv_cache_dtype=kv_cache_dtype,
        deterministic=deterministic,
        gateway_endpoints=(),
        num_blocks=64,
        max_num_seqs=4,
        max_batch_tokens=64,
        dtype=dtype,
        quantization=quantization,
    )
    return load_torch(config, lambda stage, done, total: None)


@needs_panels
def test_a_worker_runs_on_integers() -> None:
    assert load("int8").card.fingerprint != load(None).card.fingerprint


def test_what_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(FormatUnavailable, match="bf16 model"):
        load("int8", dtype="float32")
    with pytest.raises(ValueError, match="'int4' is none of int8, int8-weights, fp8"):
        load("int4")
    with pytest.raises(FormatUnavailable, match="fp8 weights need a GPU; on a CPU, --quantization int8"):
        load("fp8")


@pytest.mark.parametrize(
    ("wanted", "is_packed", "has_cuda_runner", "message"),
    [
        (WeightFormat.FP8, False, False, "need triton"),
        (WeightFormat.INT8, True, True, "quantised already: leave out --quantization int8"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(
    wanted: WeightFormat, is_packed: bool, has_cuda_runner: bool, message: str
) -> None:
    with pytest.raises(FormatUnavailable, match=message):
        check_format(wanted, torch.device("cuda"), is_packed=is_packed, has_cuda_runner=has_cuda_runner)
    check_format(WeightFormat.BF16, torch.device("cuda"), is_packed=True, has_cuda_runner=False)


def test_each_rounding_is_another_model() -> None:
    """On a GPU int8 rounds nothing but the weights; on a CPU inputs, too, where it has the instructions."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    said = [rounding_of("int8", cpu), rounding_of("int8", gpu), rounding_of("fp8", gpu), b""]
    assert len({with_rounding(b"model", rounding) for rounding in said}) == 4
    assert rounding_of("int8-weights", gpu) == rounding_of("int8", gpu)
    assert (rounding_of("int8-weights", cpu) != rounding_of("int8", cpu)) is multiplies_integers()
    assert with_rounding(b"model", b"") == with_rounding(b"model", rounding_of(None, gpu), b"") == b"model"


@needs_panels
def test_integers_take_half_the_bytes() -> None:
    sizes = []
    for wanted in (WeightFormat.BF16, WeightFormat.INT8):
        model = load_model(resolve_checkpoint("folio-chat"), dtype=torch.bfloat16)
        model.pack_weights(wanted)
        kept = model.embed_tokens.weight.numel() * 2
        sizes.append(weights_bytes(model) - kept)
    assert 0.5 <= sizes[1] / sizes[0] < 0.52


@pytest.mark.parametrize("runner", ["cpu kernels", "float32"])
def test_an_fp8_cache_holds_twice_the_tokens_in_the_same_bytes(runner: str) -> None:
    dtype = "float32" if runner == "float32" else None
    plain, small = load(None, dtype=dtype), load(None, dtype=dtype, kv_cache_dtype="fp8")
    sizes = [loaded.runner.kv.num_bytes for loaded in (plain, small)]  # type: ignore[attr-defined]
    assert sizes[0] == sizes[1] * (4 if runner == "float32" else 2)
    assert small.fingerprint != plain.fingerprint
    assert (plain.device, small.device) == ("cpu", "cpu, fp8 cache")
    assert (plain.card.kv_cache_dtype, small.card.kv_cache_dtype) == ("auto", "fp8")


def test_what_an_fp8_cache_cannot_be_had_with_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp4' is not fp8"):
        load(None, kv_cache_dtype="fp4")
    with pytest.raises(FormatUnavailable, match="deterministic mode keeps keys and values in the model's dtype"):
        load(None, kv_cache_dtype="fp8", deterministic=Deterministic.ON)


@pytest.mark.parametrize("quantization", [GPTQ_CONFIG | {"group_size": 32}, AWQ_CONFIG | {"group_size": 32}])
def test_a_worker_serves_packed_checkpoints_on_a_cpu(quantization: dict[str, object], tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, quantization)
    loaded = load(None, model=str(tmp_path))
    assert loaded.card.dtype == "bfloat16"
    assert loaded.device == f"cpu, int4 weights ({quantization['quant_method']})"
    assert loaded.fingerprint == load_model(tmp_path).fingerprint


@pytest.mark.parametrize("deterministic", Deterministic)
def test_heads_that_the_cuda_kernels_have_no_tiles_for_are_refused_with_what_serves_them(
    deterministic: Deterministic, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    folder = write_tiny_checkpoint(tmp_path, head_dim=48)
    config = WorkerConfig(model=str(folder), gateway_endpoints=(), device="cuda", deterministic=deterministic)
    with pytest.raises(ConfigError, match=r"head_dim: 48 is none of .*16, 32, 64, 128, 256.*--attention-backend sdpa"):
        load_torch(config, lambda stage, done, total: None)
    check_kernels(48, torch.device("cuda"), has_cuda_runner=False)


@pytest.mark.parametrize(("capability", "is_served"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_a_gpu_that_is_too_old_for_the_kernels_is_refused_with_what_serves_it(
    capability: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    refused = pytest.raises(FormatUnavailable, match=r"compute capability 8.0 or more; --attention-backend sdpa")
    with nullcontext() if is_served else refused:
        check_kernels(64, torch.device("cuda"), has_cuda_runner=True)
    check_kernels(64, torch.device("cuda"), has_cuda_runner=False)


@pytest.mark.parametrize(
    ("dtype", "inputs", "reason", "message"),
    [
        (torch.float32, 8, None, "need a bf16 model, and this one computes in float32: --dtype bfloat16"),
        (torch.bfloat16, 8, "/x cannot be written", "need compiled kernels: /x cannot be written"),
        (torch.bfloat16, 8, None, "need compiled kernels: OCTAVO_NATIVE is off"),
        (torch.bfloat16, 7, "", "need even numbers of inputs, and a matrix has 7"),
    ],
)
def test_why_a_cpu_cannot_have_int8_weights_is_told(
    dtype: torch.dtype, inputs: int, reason: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_panel", lambda weight: False)
    monkeypatch.setattr(linear, "why_missing", lambda: reason)
    monkeypatch.setattr(linear, "native_library", lambda: None if reason != "" else object(), raising=False)
    with pytest.raises(FormatUnavailable, match=message):
        linear.packed(torch.zeros(4, inputs, dtype=dtype), None, WeightFormat.INT8)
