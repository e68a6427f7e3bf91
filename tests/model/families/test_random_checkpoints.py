"""Checkpoints that nobody has seen: random shapes and fields, written by transformers itself, give its logits.

A config is drawn from a seed: heads and groups of odd numbers, widths that no tile divides, RoPE in either layout,
windows that leave nothing out, weights of several dtypes, one file or shards. A seed that fails is enough to repeat it.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.model import ConfigError, get_backend, load_config, load_model
from octavo.model.attention.paged import paged_logits

NUM_TOKENS = 40
LIMIT = 1e-4
"""Of the largest logit."""
SEEDS = range(40)


def drawn_rope(dice: random.Random, positions: int) -> dict[str, Any]:
    """Fields of config.json, in transformers 4's layout or 5's."""
    theta = dice.choice([10_000.0, 1_000_000, 500.5])
    kind = dice.choice(["none", "default", "yarn", "yarn"])
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "yarn":
        scaling |= {"factor": dice.choice([1.0, 2, 3.7, 40.0])}
        scaling |= {"original_max_position_embeddings": dice.choice([positions, 32])} if dice.random() < 0.7 else {}
        scaling |= {"attention_factor": 0.8} if dice.random() < 0.3 else {}
        scaling |= {"beta_fast": dice.choice([2, 64.0]), "beta_slow": 0.5} if dice.random() < 0.3 else {}
    if kind == "none":
        return {"rope_theta": theta, "rope_scaling": None}
    if dice.random() < 0.5:
        return {"rope_parameters": scaling | {"rope_theta": theta}}
    name = dice.choice(["type", "rope_type"])
    return {"rope_theta": theta, "rope_scaling": {name: scaling.pop("rope_type"), **scaling}}


def drawn_window(dice: random.Random, layers: int, positions: int) -> dict[str, Any]:
    """Of which no layer sees less than the context, but in a seed here and there."""
    window = {"sliding_window": dice.choice([None, 16, 64 * positions]), "max_window_layers": dice.choice([0, layers])}
    window |= {"layer_types": ["full_attention"] * layers} if dice.random() < 0.3 else {}
    return window | {"use_sliding_window": dice.random() < 0.4}


def drawn_config(dice: random.Random) -> dict[str, Any]:
    """config.json, but for what transformers adds."""
    family = dice.choice(["qwen2", "qwen3"])
    kv_heads, group, head_dim = dice.choice([1, 2, 3]), dice.choice([1, 2, 5, 7]), dice.choice([2, 6, 16, 34, 64])
    heads, layers, positions = kv_heads * group, dice.choice([1, 2, 3]), dice.choice([64, 100, 512])
    hidden = heads * head_dim if family == "qwen2" and dice.random() < 0.5 else dice.choice([8, 33, 63, 72, 129])
    shape: dict[str, Any] = {
        "model_type": family, "vocab_size": dice.choice([101, 384]), "hidden_size": hidden,
        "intermediate_size": dice.choice([1, 7, 40, 66, 130]), "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": positions,
        "rms_norm_eps": dice.choice([1e-6, 1e-3]), "tie_word_embeddings": dice.random() < 0.5, "head_dim": head_dim,
    }  # fmt: skip
    return shape | drawn_rope(dice, positions) | drawn_window(dice, layers, positions)


def write_drawn(folder: Path, seed: int) -> Any:
    """A checkpoint, and transformers' model of it as it reads it."""
    dice = random.Random(seed)
    raw = drawn_config(dice)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    if dice.random() < 0.5:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dice.choice([torch.float32, torch.float16, torch.bfloat16]))
    model.save_pretrained(folder, max_shard_size=dice.choice(["5KB", "50KB", "5GB"]))
    if dice.random() < 0.5:  # as transformers was asked, not as it says it again
        (folder / "config.json").write_text(json.dumps(raw | {"architectures": [type(model).__name__]}))
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_checkpoint_has_transformers_logits(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "drawn"
    theirs = write_drawn(folder, seed)
    if "sliding_attention" in theirs.config.layer_types and theirs.config.sliding_window < context_len(theirs):
        with pytest.raises(ConfigError, match=r"layer_types|use_sliding_window"):
            load_config(folder)
        return
    ours = load_model(folder, dtype=torch.float32)
    assert ours.config.context_len == context_len(theirs)
    ids = torch.randint(ours.config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        expected_TV = theirs(ids[None]).logits[0]
        ours_TV = paged_logits(ours, get_backend("sdpa"), ids.tolist(), [17, 1, 1, NUM_TOKENS - 19])
    assert float((ours_TV - expected_TV).abs().max()) < LIMIT * max(1.0, float(expected_TV.abs().max()))


def context_len(theirs: Any) -> int:
    """Positions, as YaRN extends them."""
    rope, positions = theirs.config.rope_parameters, int(theirs.config.max_position_embeddings)
    original = rope.get("original_max_position_embeddings", positions)
    return max(positions, int(original * rope.get("factor", 1)))


def test_seeds_differ_in_what_matters() -> None:
    seen = set[object]()
    for seed in SEEDS:
        raw = drawn_config(random.Random(seed))
        rope = raw.get("rope_parameters") or raw["rope_scaling"] or {}
        seen |= {raw["model_type"], rope.get("rope_type", rope.get("type", "none")), raw["use_sliding_window"]}
        seen |= {f"layout {5 if 'rope_parameters' in raw else 4}", f"tied {raw['tie_word_embeddings']}"}
    assert seen >= {"qwen2", "qwen3", "none", "default", "yarn", True, False, "layout 4", "layout 5", "tied True"}
