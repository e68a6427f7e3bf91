"""GPTQ and AWQ checkpoints cut over ranks: each reads its part of the packed integers and gives what one rank gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.model import ConfigError, ModelConfig, get_backend, load_model
from octavo.model.attention.paged import paged_generate, paged_logits
from octavo.model.checkpoint.packed import Packed
from octavo.model.checkpoint.weight_names import destinations
from octavo.model.layers.linear import Linear
from octavo.model.parallel import Ranks, config_of_rank, part_of
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8
from tests.support.model.checkpoints import QWEN3, tiny_config
from tests.support.model.packed_checkpoints import AWQ_CONFIG, GPTQ_CONFIG, write_packed_checkpoint
from tests.support.model.ranks import bytes_read

G16 = {"group_size": 16}  # four ranks have 16 inputs of the output matrix each
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gptq int4": (GPTQ_CONFIG | G16, {}),
    "gptq int8, untied": (GPTQ_CONFIG | G16 | {"bits": 8}, {"tie_word_embeddings": False}),
    "gptq v2, qwen3": (GPTQ_CONFIG | G16 | {"checkpoint_format": "gptq_v2"}, QWEN3),
    "gptq one group": (GPTQ_CONFIG | {"group_size": -1}, {}),
    "gptq desc_act": (GPTQ_CONFIG | {"group_size": 32, "desc_act": True}, {"permuted": True}),
    "gptq permuted in silence": (GPTQ_CONFIG | G16, {"permuted": True}),
    "awq": (AWQ_CONFIG | G16, {}),
    "awq, some plain": (
        AWQ_CONFIG | G16 | {"modules_to_not_convert": ["mlp.down_proj", "k_proj", "lm_head"]},
        {"plain": ("down_proj", "k_proj")},
    ),
}
REORDERED = ("gptq desc_act", "gptq permuted in silence")
IDS = torch.randint(300, (60,), generator=torch.Generator().manual_seed(9)).tolist()
PROMPTS = [IDS[start : start + 3 + 5 * start] for start in range(5)]


def compute(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Of every layout: the values of all weights, logits of weights that stay packed, greedy tokens, bytes read."""
    found: dict[str, Any] = {}
    for name in LAYOUTS:
        progress: list[tuple[int, int]] = []
        before = bytes_read()
        kept = load_model(
            folder / name, dtype=torch.float32, packed=Packed.KEPT, ranks=ranks,
            on_progress=lambda *done, into=progress: into.append(done),
        )  # fmt: skip
        num_bytes, plain = bytes_read() - before, load_model(folder / name, dtype=torch.float32, ranks=ranks)
        backend = get_backend("sdpa")
        found[name] = {
            "bytes": num_bytes,
            "progress": progress,
            "packed": [path for path, part in kept.named_modules() if isinstance(part, Linear) and part.quantized],
            "weights": {key: view.clone() for key, view in destinations(plain).items()},
            "logits": paged_logits(plain, backend, IDS, [60]),
            "kept": paged_logits(kept, backend, IDS, [33, 1, 26]),
            "outputs": paged_generate(kept, backend, PROMPTS, max_new_tokens=12),
        }
        fold_cache_scales(kept)
        found[name]["8 bits"] = paged_logits(kept, backend, IDS, [33, 1, 26], kv_dtype=FP8)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each layout."""
    folder = tmp_path_factory.mktemp("packed")
    for name, (quantization, how) in LAYOUTS.items():
        write_packed_checkpoint(folder / name, quantization, **how)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_has_its_part_of_the_unpacked_values_to_the_bit(
    name: str, folder: Path, one: dict[str, Any], group: list[Any]
) -> None:
    config = load_model(folder / name, dtype=torch.float32).config
    for rank, found in enumerate(group):
        assert found[name]["weights"].keys() == one[name]["weights"].keys()
        for key, whole in one[name]["weights"].items():
            part = part_of(key, whole.shape, config, Ranks(rank=rank, size=len(group)))
            assert np.array_equal(found[name]["weights"][key], whole[part]), key


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_and_greedy_tokens_are_those_of_one_rank(name: str, one: dict[str, Any], group: list[Any]) -> None:
    scale = np.abs(one[name]["logits"]).max()
    for found in group:
        assert np.abs(found[name]["logits"] - one[name]["logits"]).max() < 1e-5 * scale
        assert np.abs(found[name]["kept"] - one[name]["kept"]).max() < 1e-5 * scale
        assert found[name]["outputs"] == one[name]["outputs"]
        assert np.array_equal(found[name]["kept"], group[0][name]["kept"])
        assert np.linalg.norm(found[name]["8 bits"] - one[name]["8 bits"]) < 0.05 * np.linalg.norm(one[name]["logits"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_matrices_stay_packed_where_a_rank_has_whole_groups(name: str, one: dict[str, Any], group: list[Any]) -> None:
    for found in group:
        if name in REORDERED:
            assert not any(path.endswith(("o_proj", "down_proj")) for path in found[name]["packed"])
        else:
            assert found[name]["packed"] == one[name]["packed"]
            assert len(found[name]["packed"]) >= 4


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in REORDERED])
def test_a_rank_reads_its_part_and_nothing_else(name: str, folder: Path, group: list[Any]) -> None:
    header = 8 + int.from_bytes((folder / name / "model.safetensors").read_bytes()[:8], "little")
    for found in group:
        (*_, (done, total)) = found[name]["progress"]
        assert found[name]["progress"] == sorted(found[name]["progress"])
        assert done == total < 0.75 * (folder / name / "model.safetensors").stat().st_size
        assert 0 <= found[name]["bytes"] - total - header < 16_384


@pytest.mark.parametrize(
    ("quantization", "changes", "size", "reason"),
    [
        (
            GPTQ_CONFIG | {"group_size": 64}, {}, 2,
            "quantization_config.group_size: groups of 64 do not divide the 32 inputs of self_attn.o_proj that each of "
            "2 tensor-parallel ranks would have",
        ),
        (
            AWQ_CONFIG | {"group_size": 32, "modules_to_not_convert": ["o_proj"]}, {"intermediate_size": 192}, 4,
            "quantization_config.group_size: groups of 32 do not divide the 48 inputs of mlp.down_proj that each of 4 "
            "tensor-parallel ranks would have",
        ),
        (
            GPTQ_CONFIG | {"group_size": 4}, {"intermediate_size": 136}, 2,
            "quantization_config.bits: 8 integers of 4 bits make a word, and each of 2 tensor-parallel ranks would "
            "have 68 rows or columns of gate_proj",
        ),
    ],
)  # fmt: skip
def test_cuts_through_groups_and_words_are_refused_by_size(
    quantization: dict[str, Any], changes: dict[str, Any], size: int, reason: str
) -> None:
    config = ModelConfig.from_dict(tiny_config(quantization_config=quantization, **changes))
    with pytest.raises(ConfigError) as caught:
        config_of_rank(config, size)
    assert str(caught.value) == f"config.json: {reason}"
    assert config_of_rank(config, 1) is config


def test_groups_that_are_no_neighbours_need_not_be_divided() -> None:
    quantization = GPTQ_CONFIG | {"group_size": 64, "desc_act": True}
    config = ModelConfig.from_dict(tiny_config(quantization_config=quantization))
    assert config_of_rank(config, 2).num_attention_heads == 2
