"""A model cut over ranks, processes that sum over gloo, gives what one rank gives; each reads nothing but its part."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.model import CausalLM, ConfigError, ModelConfig, get_backend, load_model
from octavo.model.attention.paged import PagedSequences, paged_generate, paged_logits
from octavo.model.checkpoint.weight_names import destinations
from octavo.model.cpu.products import can_panel
from octavo.model.families.registry import FAMILIES
from octavo.model.layers.linear import WeightFormat
from octavo.model.parallel import Ranks, config_of_rank, part_of
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8
from tests.support.model.checkpoints import QWEN3, tiny_config, write_tiny_checkpoint
from tests.support.model.ranks import bytes_read

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2, untied": {"tie_word_embeddings": False},
    "qwen3": QWEN3,
    "qwen3, untied, no grouping": QWEN3 | {"tie_word_embeddings": False, "num_key_value_heads": 4},
}
IDS = torch.randint(300, (75,), generator=torch.Generator().manual_seed(9)).tolist()
PROMPTS = [IDS[start : start + 3 + 5 * start] for start in range(5)]
CHUNKS = {"whole": [75], "chunks and decodes": [33, 16, 1, 1, 24]}
LIMIT = 1e-5


def compute(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Of every checkpoint: logits, hidden states behind layers, greedy tokens, bytes read, shapes."""
    found: dict[str, Any] = {}
    for name in CHECKPOINTS:
        before = bytes_read()
        model, backend = load_model(folder / name, ranks=ranks), get_backend("sdpa")
        found[name] = {
            "bytes": bytes_read() - before,
            "shapes": {key: tuple(view.shape) for key, view in destinations(model).items()},
            "outputs": paged_generate(model, backend, PROMPTS, max_new_tokens=16),
            "hidden": hidden_states(model),
            "fingerprint": model.fingerprint,
            **{mode: paged_logits(model, backend, IDS, lens) for mode, lens in CHUNKS.items()},
        }
    found["8 bits"] = logits_of_8_bits(folder / "qwen2", ranks)
    return found


def logits_of_8_bits(folder: Path, ranks: Ranks) -> torch.Tensor:
    """Of bfloat16 with weights of 8 bits, where there is a compiler, and an 8-bit cache."""
    model = load_model(folder, dtype=torch.bfloat16, ranks=ranks)
    fold_cache_scales(model)
    model.pack_weights(WeightFormat.INT8 if can_panel(model.lm_head.weight) else WeightFormat.BF16)
    return paged_logits(model, get_backend("sdpa"), IDS, CHUNKS["chunks and decodes"], kv_dtype=FP8)


def hidden_states(model: CausalLM) -> dict[int, torch.Tensor]:
    """Behind each layer, for one whole prompt."""
    taken: dict[int, torch.Tensor] = {}
    sequences = PagedSequences(model, get_backend("reference"), num_sequences=1, max_tokens=len(IDS))
    sequences.model = partial(model, take=taken.__setitem__)  # type: ignore[assignment]
    for name in ("config", "dtype", "device"):
        setattr(sequences.model, name, getattr(model, name))
    sequences.step({0: IDS})
    return taken


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, changes in CHECKPOINTS.items():
        write_tiny_checkpoint(folder / name, seed=3, **changes)
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_and_greedy_tokens_are_those_of_one_rank_on_every_rank(
    name: str, one: dict[str, Any], group: list[Any]
) -> None:
    for rank in group:
        for mode in CHUNKS:
            assert np.abs(rank[name][mode] - one[name][mode]).max() < LIMIT
        assert rank[name]["outputs"] == one[name]["outputs"]
    assert all(np.array_equal(rank[name]["whole"], group[0][name]["whole"]) for rank in group)


def test_weights_and_cache_of_8_bits_are_as_near_as_on_one_rank(one: dict[str, Any], group: list[Any]) -> None:
    exact_TV = one["qwen2"]["whole"]
    error = np.linalg.norm(one["8 bits"] - exact_TV)
    for rank in group:
        assert 0 < np.linalg.norm(rank["8 bits"] - exact_TV) < 1.5 * error < 0.3 * np.linalg.norm(exact_TV)


def test_hidden_states_can_be_taken_behind_every_layer(one: dict[str, Any], group: list[Any]) -> None:
    assert list(one["qwen2"]["hidden"]) == [0, 1]
    for rank in group:
        for index, expected_TD in one["qwen2"]["hidden"].items():
            assert np.abs(rank["qwen2"]["hidden"][index] - expected_TD).max() < LIMIT


def test_a_rank_has_its_part_of_each_large_matrix_and_reads_nothing_else(
    folder: Path, one: dict[str, Any], group: list[Any]
) -> None:
    size, name = len(group), "qwen2, untied"
    whole, part = one[name]["shapes"], group[-1][name]["shapes"]
    layer = "model.layers.0."
    for key in ("model.embed_tokens.weight", "lm_head.weight", f"{layer}self_attn.q_proj.weight"):
        assert part[key] == (whole[key][0] // size, whole[key][1])
    for key in (f"{layer}self_attn.o_proj.weight", f"{layer}mlp.down_proj.weight"):
        assert part[key] == (whole[key][0], whole[key][1] // size)
    assert part[f"{layer}self_attn.k_proj.bias"] == (16,)  # one of two heads, also where there are four ranks
    kept = sum(4 * int(np.prod(shape)) for shape in part.values())
    file = folder / name / "model.safetensors"
    assert file.stat().st_size > 1.8 * kept
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    for rank in group:
        assert 0 <= rank[name]["bytes"] - kept - header < 16_384  # config.json, and what a buffer reads with the header


def test_ranks_of_a_group_are_told_apart_from_one_another_and_from_the_whole(
    one: dict[str, Any], group: list[Any]
) -> None:
    prints = {found["qwen3"]["fingerprint"] for found in [one, *group]}
    assert len(prints) == len(group) + 1


@pytest.mark.parametrize(
    ("field", "size", "changes", "reason"),
    [
        ("num_attention_heads", 3, {}, "4 cannot be divided among 3 tensor-parallel ranks"),
        ("intermediate_size", 4, {"intermediate_size": 130}, "130 cannot be divided among 4 tensor-parallel ranks"),
        ("vocab_size", 2, {"vocab_size": 383}, "383 cannot be divided among 2 tensor-parallel ranks"),
        (
            "num_key_value_heads", 2, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
            "3 can neither be divided among 2 tensor-parallel ranks nor repeated",
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_by_name(
    field: str, size: int, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        CausalLM(ModelConfig.from_dict(tiny_config(**changes)), device="meta", ranks=Ranks(size=size))
    assert caught.value.field == field
    assert str(caught.value) == f"config.json: {field}: {reason}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_parts_of_all_ranks_are_the_whole_tensor_in_order(family: str, size: int) -> None:
    changes = {"num_attention_heads": 8, "num_key_value_heads": 2} | (QWEN3 if family == "qwen3" else {})
    config = ModelConfig.from_dict(tiny_config(tie_word_embeddings=False, **changes))
    for name, view in destinations(CausalLM(config, device="meta")).items():
        parts = [part_of(name, tuple(view.shape), config, Ranks(rank=rank, size=size)) for rank in range(size)]
        element = torch.arange(view.numel()).view(view.shape)
        if name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")):
            parts = parts[:: max(size // 2, 1)]  # the others repeat heads
        is_whole = "norm" in name
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        found = element[parts[0]] if is_whole else torch.cat([element[part] for part in parts], dim)
        assert torch.equal(found, element), name
    assert config_of_rank(config, size).num_attention_heads * size == 8


def test_a_weight_of_which_the_family_does_not_say_how_it_is_cut_is_refused() -> None:
    config, ranks = ModelConfig.from_dict(tiny_config()), Ranks(size=2)
    for name in ("model.layers.0.mlp.router.weight", "model.layers.0.self_attn.o_proj.bias"):
        with pytest.raises(ValueError, match="does not say how it is cut"):
            part_of(name, (64,), config, ranks)
