"""Loading a checkpoint: what comes in is what the file has, and whatever does not fit is named, all of it at once."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.model import CheckpointError, WeightScan, dense_logits, load_model
from tests.support.model.checkpoints import write_tiny_checkpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def shard(folder: Path, num_shards: int = 3) -> dict[str, str]:
    """Cut the single file into shards with an index; returns the weight map."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map = {tensor: names[i % num_shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name}, folder / name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(folder: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **options)
    return caught.value


def test_the_model_holds_the_tensors_of_the_file(checkpoint: Path) -> None:
    model, tensors = load_model(checkpoint), load_file(checkpoint / SINGLE)
    layer = model.decoder_layers[1]
    q, k, v = (tensors[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv")
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat([q, k, v]))
    gate, up = (tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([gate, up]))
    assert torch.equal(model.norm.weight, tensors[NORM])
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_gives_the_logits_of_transformers(tied: bool, tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    folder = write_tiny_checkpoint(tmp_path, tie_word_embeddings=tied)
    ids_T = torch.arange(20)
    with torch.inference_mode():
        theirs_TV = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids_T[None]).logits[0]
    torch.testing.assert_close(dense_logits(load_model(folder), ids_T), theirs_TV, rtol=0, atol=1e-4)


def test_shards_give_the_same_model_and_fingerprint_as_one_file(checkpoint: Path) -> None:
    single = load_model(checkpoint)
    shard(checkpoint)
    sharded = load_model(checkpoint)
    assert single.fingerprint == sharded.fingerprint
    for (name, left), (_, right) in zip(single.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize(
    ("asked", "in_config", "expected"),
    [
        (None, "float32", torch.float32),
        (None, "float16", torch.float16),
        (None, None, torch.bfloat16),
        (torch.bfloat16, "float32", torch.bfloat16),
    ],
)
def test_the_dtype_is_the_one_asked_for_or_the_configs(
    asked: torch.dtype | None, in_config: str | None, expected: torch.dtype, tmp_path: Path
) -> None:
    model = load_model(write_tiny_checkpoint(tmp_path, torch_dtype=in_config), dtype=asked)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert torch.equal(model.norm.weight, load_file(tmp_path / SINGLE)[NORM].to(expected))


def test_missing_unexpected_misshapen_and_wrongly_typed_tensors_are_named_in_one_error(checkpoint: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[Q]
        tensors[UP] = torch.zeros(64, 128)
        tensors[NORM] = torch.zeros(64, dtype=torch.int32)
        tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(64)

    rewrite(checkpoint, change)
    assert refused(checkpoint).problems == (
        "model.layers.1.self_attn.q_proj.weight: missing, should have shape [64, 64]",
        "model.safetensors: model.layers.0.mlp.up_proj.weight: has shape [64, 128], should have [128, 64]",
        "model.safetensors: model.layers.2.input_layernorm.weight: unexpected",
        "model.safetensors: model.norm.weight: is I32, should be one of F32, F16, BF16",
    )


def test_a_config_of_another_size_names_every_tensor_and_shows_the_first(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"hidden_size": 128, "num_hidden_layers": 6}))
    error = refused(checkpoint)
    assert len(error.problems) == 2 + 6 * 12
    assert str(error).endswith(f"… and {len(error.problems) - error.MAX_SHOWN} more")


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, tie_word_embeddings=False)
    rewrite(folder, lambda tensors: tensors.pop(HEAD))
    assert refused(folder).problems == ("lm_head.weight: missing, should have shape [384, 64]",)


def test_a_tied_checkpoint_may_carry_an_equal_head_and_no_other(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    load_model(checkpoint)
    rewrite(checkpoint, lambda tensors: tensors[HEAD][3, 3].add_(1))
    assert "lm_head.weight: differs from model.embed_tokens.weight" in str(refused(checkpoint))


def test_a_truncated_file_is_refused_with_file_and_tensor_wherever_it_ends(checkpoint: Path) -> None:
    content = (checkpoint / SINGLE).read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    lengths = [*range(0, len(content), len(content) // 100), header_end, header_end + 1, len(content) - 1]
    for length in lengths:
        (checkpoint / SINGLE).write_bytes(content[:length])
        message = str(refused(checkpoint))
        assert message.startswith("model.safetensors: ")
        assert length < header_end or "model." in message.removeprefix("model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", ".x.safetensors", 7,
        "\ud800.safetensors", "\x1b[2J.safetensors",
    ],
)  # fmt: skip
def test_an_index_that_leads_out_of_the_folder_is_refused(name: object, checkpoint: Path) -> None:
    weight_map = shard(checkpoint)
    write_index(checkpoint, weight_map | {Q: name})
    assert refused(checkpoint).problems == (f"{Q}: {name!r} is not the plain name of a .safetensors file",)


def test_an_index_with_a_tensor_that_cannot_be_named_is_refused(checkpoint: Path) -> None:
    weight_map = shard(checkpoint)
    write_index(checkpoint, weight_map | {"\x1b[2J": weight_map[Q]})
    assert r"weight_map has '\x1b[2J', which is no name of a tensor" in str(refused(checkpoint))


@pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors"])
def test_an_index_without_a_map_is_refused(weight_map: object, checkpoint: Path) -> None:
    shard(checkpoint)
    write_index(checkpoint, weight_map)
    assert "model.safetensors.index.json: weight_map" in str(refused(checkpoint))


def test_where_index_and_shards_disagree_both_sides_are_named(checkpoint: Path) -> None:
    weight_map = shard(checkpoint, 2)
    first, second = sorted(set(weight_map.values()))
    moved = next(name for name, file in weight_map.items() if file == first)
    left_out = next(name for name, file in weight_map.items() if file == second)
    write_index(checkpoint, {k: v for k, v in weight_map.items() if k != left_out} | {moved: second, "ghost": first})
    assert set(refused(checkpoint).problems) == {
        f"{second}: {moved}: the index says that it is there, and it is not",
        f"{first}: ghost: the index says that it is there, and it is not",
        f"{first}: {moved}: the index does not put it there",
        f"{second}: {left_out}: the index does not put it there",
    }


def test_missing_extra_and_broken_shards_are_all_named(checkpoint: Path) -> None:
    shard(checkpoint, 3)
    (checkpoint / "model-00001-of-00003.safetensors").unlink()
    broken = checkpoint / "model-00002-of-00003.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    save_file({"x": torch.zeros(1)}, checkpoint / "model-00004-of-00003.safetensors")
    problems = refused(checkpoint).problems
    assert [problem.split(":")[0] for problem in problems] == [
        "model-00004-of-00003.safetensors",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
    ]
    assert "truncated" in problems[2]


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_pickled_weights_and_remote_code_are_never_touched(checkpoint: Path) -> None:
    canary = checkpoint / "ran"
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    (checkpoint / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')")
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    load_model(checkpoint)
    (checkpoint / SINGLE).unlink()
    assert "pickled weights are there; they are never loaded" in str(refused(checkpoint))
    assert not canary.exists()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_found_where_asked_for(value: float, checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors[UP][5, :2].fill_(value))
    load_model(checkpoint)
    error = refused(checkpoint, weight_scan=WeightScan.FINITE)
    assert error.problems == (f"{UP}: 2 of 8192 values are NaN or infinite in torch.float32",)


def test_the_scan_finds_what_does_not_fit_into_float16(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors[NORM][0].fill_(1e6))
    load_model(checkpoint, weight_scan=WeightScan.FINITE)
    error = refused(checkpoint, dtype=torch.float16, weight_scan=WeightScan.FINITE)
    assert error.problems == (f"{NORM}: 1 of 64 values are NaN or infinite in torch.float16",)


def test_progress_counts_every_byte_once_and_ends_full(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(checkpoint, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.numel() * 4 for tensor in load_file(checkpoint / SINGLE).values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_no_weight_is_read_before_everything_fits(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop(NORM))
    seen: list[tuple[int, int]] = []
    refused(checkpoint, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == []
