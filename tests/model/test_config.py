"""config.json: the published files are read, and every wrong field is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.model import CheckpointError, ConfigError, ModelConfig, YarnScaling, load_config
from tests.support.model.checkpoints import tiny_config


def test_the_published_half_billion(shared: Path) -> None:
    assert load_config(shared / "data/configs/Qwen2.5-0.5B-Instruct") == ModelConfig(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        yarn=None,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        eos_token_ids=(151645,),
    )


@pytest.mark.parametrize(("size", "group", "tied"), [("1.5B", 6, True), ("7B", 7, False), ("72B", 8, False)])
def test_the_other_published_sizes(size: str, group: int, tied: bool, shared: Path) -> None:
    config = load_config(shared / f"data/configs/Qwen2.5-{size}-Instruct")
    assert (config.group_size, config.tie_word_embeddings, config.head_dim) == (group, tied, 128)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("vocab_size", {"vocab_size": None}, "is missing"),
    ("hidden_size", {"hidden_size": 0}, "must be a positive integer, is 0"),
    ("hidden_size", {"hidden_size": "64"}, "must be a positive integer, is '64'"),
    ("hidden_size", {"hidden_size": 65}, "65 is not a multiple of num_attention_heads 4"),
    ("intermediate_size", {"intermediate_size": -1}, "must be a positive integer"),
    ("num_hidden_layers", {"num_hidden_layers": True}, "must be a positive integer, is True"),
    ("num_attention_heads", {"num_attention_heads": 1.5}, "must be a positive integer, is 1.5"),
    ("num_key_value_heads", {"num_key_value_heads": 3}, "3 does not divide num_attention_heads 4"),
    ("head_dim", {"head_dim": 15}, "15 is odd"),
    ("max_position_embeddings", {"max_position_embeddings": []}, "must be a positive integer"),
    ("rms_norm_eps", {"rms_norm_eps": 0}, "must be a finite number above 0"),
    ("rms_norm_eps", {"rms_norm_eps": float("nan")}, "must be a finite number above 0"),
    ("rope_theta", {"rope_theta": float("inf")}, "must be a finite number above 0"),
    ("tie_word_embeddings", {"tie_word_embeddings": "yes"}, "must be true or false, is 'yes'"),
    ("model_type", {"model_type": "llama"}, "'llama' is not supported, only 'qwen2' and 'qwen3'"),
    ("model_type", {"model_type": None}, "is missing"),
    ("architectures", {"architectures": ["Qwen2MoeForCausalLM"]}, "does not name Qwen2ForCausalLM"),
    ("hidden_act", {"hidden_act": "gelu"}, "'gelu' is not supported, only 'silu'"),
    ("is_causal", {"is_causal": False}, "false is not supported"),
    ("use_sliding_window", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 511}, "sliding"),
    ("max_window_layers", {"use_sliding_window": True, "max_window_layers": -1, "sliding_window": 5}, "must be 0 or"),
    ("sliding_window", {"sliding_window": "all"}, "must be a positive integer"),
    ("layer_types", {"layer_types": ["sliding_attention"] * 2}, "only 'full_attention' layers"),
    ("layer_types", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 512}, "only 'full_attention' layers"),
    ("layer_types", {"layer_types": ["linear_attention"] * 2}, "only 'full_attention' layers"),
    ("quantization_config.bits", {"quantization_config": {"quant_method": "gptq"}}, "is missing"),
    ("torch_dtype", {"torch_dtype": "int8"}, "'int8' is not one of float32, float16, bfloat16"),
    ("dtype", {"dtype": 16}, "must be a string, is 16"),
    ("eos_token_id", {"eos_token_id": [1, "2"]}, "must be a token id or a list of them"),
    ("rope_scaling", {"rope_scaling": "yarn"}, "must be an object"),
    ("rope_scaling", {"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_theta": 1.0}}, "besides"),
    ("rope_scaling.type", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported"),
    ("rope_scaling.factor", {"rope_scaling": {"type": "yarn"}}, "is missing"),
    ("rope_scaling.factor", {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "must be at least 1"),
    ("rope_scaling.beta_fast", {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 0.5}}, "is below beta_slow"),
    ("rope_scaling.fator", {"rope_scaling": {"type": "yarn", "factor": 4, "fator": 1}}, "is not a known field"),
    ("rope_scaling.mscale", {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0}}, "is not supported"),
    ("rope_scaling.factor", {"rope_scaling": {"type": "yarn", "factor": 1e308}}, "must be at most"),
    ("rope_scaling.beta_fast", {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1e308}}, "must be from"),
    ("rope_scaling.beta_slow", {"rope_scaling": {"type": "yarn", "factor": 4, "beta_slow": 5e-324}}, "must be from"),
    ("rope_theta", {"rope_theta": 1e-300}, "must be at least 1"),
    ("rope_theta", {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}, "must be above 1"),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "yarn", "factor": 4}}, "YaRN"),
    (
        "original_max_position_embeddings",
        {
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
        },
        "64 is not rope_scaling.original_max_position_embeddings, 32: keep one of them",
    ),
    (
        "rope_parameters.full_attention",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        "RoPE of its own",
    ),
    ("rope_parameters.rope_type", {"rope_parameters": {"rope_type": "llama3"}}, "'llama3' is not supported"),
]


@pytest.mark.parametrize(("field", "changes", "reason"), WRONG, ids=[f"{w[0]}, {w[2]}" for w in WRONG])
def test_a_wrong_field_is_named(field: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny_config(**changes))
    assert caught.value.field == field
    assert f"config.json: {field}: " in str(caught.value)
    assert reason in str(caught.value)


LONG = "a" * 10_000


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [LONG]},
        {"model_type": LONG},
        {"dtype": LONG},
        {"rope_scaling": {"type": LONG}},
        {"rope_scaling": {"type": "yarn", "factor": 4, LONG: 1}},
        {"rope_scaling": {LONG: {}}},
        {"quantization_config": {"quant_method": LONG}},
        {"quantization_config": {"quant_method": "gptq", "checkpoint_format": LONG}},
        {"quantization_config": {"quant_method": "awq", "version": LONG}},
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 8, "modules_to_not_convert": LONG}},
    ],
)
def test_a_value_of_any_length_is_one_short_sentence(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny_config(**changes))
    assert len(str(caught.value)) < 300


YARN = YarnScaling(factor=4.0, original_max_position_embeddings=32768)


@pytest.mark.parametrize(
    ("changes", "theta", "yarn"),
    [
        ({}, 10000.0, None),
        ({"rope_scaling": None}, 10000.0, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 1e4, YARN),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}, 1e4, YARN),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
                                 "original_max_position_embeddings": 32768}}, 5e5, YARN,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768}, 1e4, YARN),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, "original_max_position_embeddings": 32768}, 1e4, YARN),
    ],
)  # fmt: skip
def test_rope_is_read_from_either_layout(changes: dict[str, Any], theta: float, yarn: YarnScaling | None) -> None:
    config = ModelConfig.from_dict(tiny_config(**changes))
    assert (config.rope_theta, config.yarn) == (theta, yarn)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 16},
        {"sliding_window": 16, "max_window_layers": 2},
        {"sliding_window": 16, "max_window_layers": 0, "layer_types": ["full_attention"] * 2},
        {"sliding_window": 512, "max_window_layers": 0},
        {"sliding_window": None, "max_window_layers": 0},
        {"max_window_layers": 0},
        {"sliding_window": 600, "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_a_sliding_window_that_leaves_nothing_out_is_served(changes: dict[str, Any]) -> None:
    raw = tiny_config(use_sliding_window=True, **changes)
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(tiny_config())


def test_a_window_shorter_than_what_yarn_extends_to_leaves_something_out() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    with pytest.raises(ConfigError, match="use_sliding_window"):
        ModelConfig.from_dict(
            tiny_config(use_sliding_window=True, sliding_window=512, max_window_layers=0, rope_scaling=yarn)
        )


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": None, "dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32", "dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"torch_dtype": None}, None),
    ],
)
def test_the_dtype_is_read_under_either_name(changes: dict[str, Any], dtype: torch.dtype | None) -> None:
    assert ModelConfig.from_dict(tiny_config(**changes)).dtype == dtype


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_eos_is_one_id_or_a_list(value: object, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(tiny_config(eos_token_id=value)).eos_token_ids == ids


def test_head_dim_and_kv_heads_default_as_in_transformers() -> None:
    raw = tiny_config()
    del raw["num_key_value_heads"]
    config = ModelConfig.from_dict(raw)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert ModelConfig.from_dict(tiny_config(head_dim=32)).head_dim == 32


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^config\.json: "):
        load_config(tmp_path)


def test_a_missing_config_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"not in {tmp_path}"):
        load_config(tmp_path)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    from transformers import Qwen2Config as TransformersConfig

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    fields = {key: value for key, value in tiny_config(max_position_embeddings=131072).items() if "rope" not in key}
    TransformersConfig(**fields, rope_parameters=yarn).save_pretrained(tmp_path)  # type: ignore[arg-type]
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert load_config(tmp_path).yarn == YARN


def test_without_rope_theta_it_is_that_of_transformers() -> None:
    from transformers import Qwen2Config as TransformersConfig

    for changes in ({}, {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}):
        raw = {name: value for name, value in tiny_config(**changes).items() if name != "rope_theta"}
        theirs = TransformersConfig.from_dict(dict(raw)).rope_parameters["rope_theta"]
        assert ModelConfig.from_dict(raw).rope_theta == theirs == 10_000.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**7),
        ("num_attention_heads", 10**6),
        ("num_key_value_heads", 10**6),
        ("head_dim", 10**5),
        ("hidden_size", 10**9),
        ("intermediate_size", 10**9),
        ("vocab_size", 10**9),
        ("max_position_embeddings", 10**30),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 10**400),
        ("eos_token_id", 10**30),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_made(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: {field}: must be .{{1,200}}$"):
        ModelConfig.from_dict(tiny_config(**{field: value}))
