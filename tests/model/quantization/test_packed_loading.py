"""Checkpoints in the layouts of Qwen's published GPTQ and AWQ ones load into exactly the weights they hold."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.model import load_model
from octavo.model.checkpoint.packed import Packed
from octavo.model.checkpoint.weight_names import destinations
from octavo.model.errors import CheckpointError, ConfigError
from octavo.model.parallel import Ranks
from octavo.model.quantization.grouped import GroupedWeight
from tests.support.model.checkpoints import QWEN3
from tests.support.model.packed_checkpoints import AWQ_CONFIG, GPTQ_CONFIG, change_config, write_packed_checkpoint

G32 = {"group_size": 32}
LAYOUTS = {
    "gptq int4": (GPTQ_CONFIG | G32, {}),
    "gptq int8": (GPTQ_CONFIG | G32 | {"bits": 8}, {}),
    "gptq v2": (GPTQ_CONFIG | G32 | {"checkpoint_format": "gptq_v2"}, {}),
    "gptq v2, as transformers 5 names it": (GPTQ_CONFIG | G32 | {"format": "gptq_v2"}, {}),
    "gptq, some plain": (
        GPTQ_CONFIG
        | G32
        | {"modules_in_block_to_quantize": [[f"self_attn.{x}_proj" for x in "qv"], ["mlp.up_proj", "mlp.gate_proj"]]},
        {"plain": ("k_proj", "o_proj", "down_proj")},
    ),
    "gptq desc_act": (GPTQ_CONFIG | G32 | {"desc_act": True}, {"permuted": True}),
    "gptq one group": (GPTQ_CONFIG | {"group_size": -1}, {}),
    "awq": (AWQ_CONFIG | G32, {}),
    "awq, some plain": (
        AWQ_CONFIG | G32 | {"modules_to_not_convert": ["mlp.down_proj", "k_proj", "lm_head"]},
        {"plain": ("down_proj", "k_proj")},
    ),
    "untied": (GPTQ_CONFIG | G32, {"tie_word_embeddings": False}),
    "qwen3": (GPTQ_CONFIG | G32, QWEN3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_unpacked_weights_are_those_of_the_plain_checkpoint(name: str, tmp_path: Path) -> None:
    config, how = LAYOUTS[name]
    expected = write_packed_checkpoint(tmp_path, config, **how)  # type: ignore[arg-type]
    progress: list[tuple[int, int]] = []
    model = load_model(tmp_path, dtype=torch.float32, on_progress=lambda *done: progress.append(done))
    found = destinations(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[tensor], expected[tensor]) for tensor in expected)
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_kept_weights_compute_what_unpacked_ones_do(name: str, tmp_path: Path) -> None:
    config, how = LAYOUTS[name]
    write_packed_checkpoint(tmp_path, config, **how)  # type: ignore[arg-type]
    plain = load_model(tmp_path, dtype=torch.float32)
    kept = load_model(tmp_path, dtype=torch.float32, packed=Packed.KEPT)
    for ours, theirs in zip(kept.decoder_layers, plain.decoder_layers, strict=True):
        x = torch.randn(3, 64)
        assert torch.equal(ours.mlp(x), theirs.mlp(x))
        assert torch.equal(ours.self_attn.qkv_proj(x), theirs.self_attn.qkv_proj(x))
        is_kept = isinstance(ours.mlp.gate_up_proj.quantized, GroupedWeight)
        assert is_kept == (name != "gptq desc_act")  # gate and up order their inputs differently there
    assert kept.fingerprint != plain.fingerprint


def add_idle_biases(folder: Path, last: float) -> None:
    """As AutoGPTQ writes them for modules to which the model adds none. last: the last element of the last one."""
    tensors = load_file(folder / "model.safetensors")
    scales = [name for name in tensors if name.endswith(("o_proj.scales", "mlp.down_proj.scales"))]
    biases = {name.replace("scales", "bias"): torch.zeros(tensors[name].shape[1]).half() for name in scales}
    biases[max(biases)][-1] = last
    save_file(tensors | biases, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("packed", Packed)
def test_biases_of_zeros_that_the_model_adds_nowhere_are_passed_over(packed: Packed, rank: int, tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, LAYOUTS["gptq int4"][0])
    ranks, told = Ranks(rank=rank, size=2), list[tuple[int, int]]()
    expected = load_model(tmp_path, packed=packed, ranks=ranks)
    add_idle_biases(tmp_path, 0.0)
    found = load_model(tmp_path, packed=packed, ranks=ranks, on_progress=lambda *done: told.append(done))
    assert found.fingerprint == expected.fingerprint
    assert told[-1][0] == told[-1][1]


def test_a_bias_that_would_be_lost_is_refused_by_name(tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, LAYOUTS["gptq int4"][0])
    add_idle_biases(tmp_path, 2.0**-24)
    with pytest.raises(CheckpointError, match=r"o_proj\.bias: is not zero, and the model adds no bias there"):
        load_model(tmp_path)


def test_a_packed_checkpoint_is_computed_in_bf16_unless_told_otherwise(tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, GPTQ_CONFIG | G32)
    assert load_model(tmp_path).dtype == torch.bfloat16


def test_other_codes_have_another_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for seed in range(2):
        write_packed_checkpoint(tmp_path, GPTQ_CONFIG | G32, seed=seed)
        prints |= {load_model(tmp_path, packed=packed).fingerprint for packed in Packed}
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bits", 3, "quantization_config.bits: 3 is not supported, only 4 and 8"),
        ("quant_method", "bitsandbytes", "quantization_config.quant_method: 'bitsandbytes' is not supported"),
        ("checkpoint_format", "marlin", "quantization_config.checkpoint_format: 'marlin' is not supported"),
        ("format", "marlin", "quantization_config.format: 'marlin' is not supported, only 'gptq' and 'gptq_v2'"),
        ("modules_in_block_to_quantize", ["mlp.up_proj"], "modules_in_block_to_quantize: must be a list of lists"),
        ("group_size", 1, "quantization_config.group_size: 1 is odd"),
        ("group_size", 0, "quantization_config.group_size: must be a positive integer"),
        ("group_size", 48, r"quantization_config: model.layers.0.self_attn.q_proj: 64 inputs are no multiple of"),
        ("lm_head", True, "quantization_config.lm_head: true is not supported"),
        ("is_marlin_format", True, "quantization_config.is_marlin_format: true"),
        ("dynamic", {"-:x": {}}, "quantization_config.dynamic: settings of single modules"),
        ("pack_dtype", "int16", "quantization_config.pack_dtype: 'int16' is not supported"),
        ("modules_to_not_convert", "lm_head", "modules_to_not_convert: must be a list of names"),
    ],
)
def test_what_is_not_supported_is_refused_by_field(field: str, value: object, message: str, tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, GPTQ_CONFIG | G32)
    change_config(tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "bits: 8 is not supported, only 4"),
        ({"version": "gemv"}, "version: 'gemv' is not supported"),
        ({"version": None, "format": "gemv"}, "format: 'gemv' is not supported, only 'gemm'"),
        ({"zero_point": False}, "zero_point: false"),
    ],
)
def test_what_awq_cannot_be_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, AWQ_CONFIG | G32)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_wrong_tensors_are_named_with_their_file(tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, GPTQ_CONFIG | G32)
    file, down = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj."
    tensors = load_file(file)
    tensors[down + "qweight"] = tensors[down + "qweight"].long()
    tensors[down + "scales"] = tensors[down + "scales"][:, :-1].clone()
    del tensors[down + "qzeros"]
    tensors[down + "weight"] = torch.zeros(64, 128)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert caught.value.problems == (
        f"{down}qzeros: missing, should have shape [4, 8]",
        f"model.safetensors: {down}qweight: is I64, should be one of I32",
        f"model.safetensors: {down}scales: has shape [4, 63], should have [4, 64]",
        f"model.safetensors: {down}weight: unexpected",
    )


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("g_idx", 1, r"model.safetensors: model.layers.0.mlp.up_proj.g_idx: groups have 0 to 64 inputs, not 32"),
        ("scales", float("nan"), r"model.safetensors: model.layers.0.mlp.up_proj.scales: holds NaN or infinity"),
    ],
)
def test_wrong_values_are_named(tensor: str, value: float, message: str, tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path, GPTQ_CONFIG | G32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{tensor}"].fill_(value)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)
