"""The hyper-parameters of a model of any served family, read from config.json and checked field by field.

Must not know: tensors on disk, devices, attention backends.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.model.config_fields import ConfigFields, shown
from octavo.model.dtypes import DTYPES
from octavo.model.errors import CheckpointError, ConfigError
from octavo.model.families.interface import Family
from octavo.model.families.qwen2 import QWEN2
from octavo.model.families.registry import family_of
from octavo.model.layers.rope_scaling import DEFAULT_THETA, YarnScaling, parse_rope
from octavo.model.quantization.settings import GroupSettings, parse_quantization
from octavo.wire.checkpoint_files import FileRefused, find_file, read_small_file

MOST_JSON_BYTES = 64 << 20
"""Of config.json, and of the index of the shards: a published one has a megabyte for the largest models there are."""

MOST_LAYERS, MOST_HEADS, MOST_WIDTH = 1_000, 4_096, 1 << 20
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW, DEFAULT_FULL_LAYERS = 4096, 28
"""What transformers takes for sliding_window and max_window_layers where a config has none."""
MOST_POSITIONS = 1 << 24
"""Beyond it float32, in which angles are computed, cannot tell positions apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a dense model. Names are those of config.json.

    rope_theta: base of the rotary frequencies. yarn: the long-context recipe; None without it.
    dtype: what the checkpoint says it should be computed in; None if it does not say.
    eos_token_ids: of config.json alone; generation_config.json may name more.
    quantization: how the checkpoint's matrices are packed; None if they are plain.
    family: what the shape alone does not say (model/families).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = DEFAULT_THETA
    yarn: YarnScaling | None = None
    tie_word_embeddings: bool = False
    dtype: torch.dtype | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: GroupSettings | None = None
    family: Family = QWEN2

    def __post_init__(self) -> None:
        """Check constraints between fields. Raises ConfigError."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "num_key_value_heads",
                f"{self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}",
            )
        if self.head_dim % 2:
            raise ConfigError("head_dim", f"{self.head_dim} is odd: RoPE turns pairs")

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def context_len(self) -> int:
        """Positions that the model supports, YaRN included."""
        if self.yarn is None:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.yarn.original_max_position_embeddings * self.yarn.factor))

    @property
    def attended_share(self) -> float:
        """Cost of attending to one token, as a share of a token's other operations."""
        queries, both = self.num_attention_heads * self.head_dim, 2 * self.num_key_value_heads * self.head_dim
        weights = self.hidden_size * (2 * queries + both + 3 * self.intermediate_size)
        return 2 * queries / weights

    @property
    def scale(self) -> float:
        """Factor applied to attention scores."""
        return self.head_dim**-0.5

    def computed_in(self, asked: torch.dtype | None) -> torch.dtype:
        """The dtype to compute in. asked: None takes the config's; bf16 if it has none or the checkpoint is packed
        (those name float16 for the sake of their kernels; Qwen2.5 was made in bf16)."""
        return asked or (None if self.quantization else self.dtype) or torch.bfloat16

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a config.json, in the layout of transformers 4 or 5. Raises ConfigError naming the field.

        Fields irrelevant to inference are ignored, including `auto_map` (remote code).
        """
        fields = ConfigFields(raw)
        family = family_of(fields)
        refuse_what_is_not_supported(fields, family)
        heads = fields.positive_int("num_attention_heads", most=MOST_HEADS)
        hidden_size = fields.positive_int("hidden_size", most=MOST_WIDTH)
        head_dim = default_head_dim(fields, family, hidden_size, heads)
        max_positions = fields.positive_int("max_position_embeddings", 32768, most=MOST_POSITIONS)
        rope = parse_rope(fields, max_positions)
        config = cls(
            vocab_size=fields.positive_int("vocab_size", most=MOST_WIDTH << 4),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size", most=MOST_WIDTH),
            num_hidden_layers=fields.positive_int("num_hidden_layers", most=MOST_LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=fields.positive_int("num_key_value_heads", heads, most=MOST_HEADS),
            head_dim=fields.positive_int("head_dim", head_dim, most=MOST_HEADS),
            max_position_embeddings=max_positions,
            rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
            rope_theta=rope.theta,
            yarn=rope.yarn,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            dtype=checkpoint_dtype(fields),
            eos_token_ids=fields.token_ids("eos_token_id"),
            quantization=parse_quantization(fields),
            family=family,
        )
        refuse_sliding_layers(fields, config)
        return config


def load_config(folder: Path) -> ModelConfig:
    """Read config.json of a checkpoint folder. Raises CheckpointError, ConfigError."""
    return ModelConfig.from_dict(read_json_object(folder, "config.json"))


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of the folder that holds an object. Raises CheckpointError naming the file."""
    try:
        path = find_file(folder, name)
        if path is None:
            raise CheckpointError(f"{name}: not in {folder}")
        content = json.loads(read_small_file(path, most_bytes=MOST_JSON_BYTES))
    except FileRefused as error:
        raise CheckpointError(str(error)) from None
    except RecursionError:
        raise CheckpointError(f"{name}: cannot be read as JSON: objects and lists are nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: holds {type(content).__name__}, not an object")
    return content


def default_head_dim(fields: ConfigFields, family: Family, hidden_size: int, heads: int) -> int:
    """head_dim if the config does not have it. Raises ConfigError if it is not an integer."""
    if family.head_dim is not None:
        return family.head_dim
    if not fields.has("head_dim") and hidden_size % heads:
        raise ConfigError("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {heads}")
    return hidden_size // heads


def checkpoint_dtype(fields: ConfigFields) -> torch.dtype | None:
    """`dtype` (transformers 5) or `torch_dtype` (4), None where neither is set."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(name):
        return None
    text = fields.text(name).removeprefix("torch.")
    if text not in DTYPES:
        raise ConfigError(name, f"{shown(text)} is not one of {', '.join(DTYPES)}")
    return DTYPES[text]


def refuse_what_is_not_supported(fields: ConfigFields, family: Family) -> None:
    """Fields that would change the result if they were ignored. Raises ConfigError."""
    if fields.has("hidden_act"):
        fields.must_be_one_of("hidden_act", ("silu",))
    for flag in family.must_be_false:
        if fields.boolean(flag, False):
            raise ConfigError(flag, f"true is not supported for {family.model_type}")
    if not fields.boolean("is_causal", True):
        raise ConfigError("is_causal", "false is not supported: a token sees those before it and none behind")


def refuse_sliding_layers(fields: ConfigFields, config: ModelConfig) -> None:
    """Layers that attend to less than the whole context: those named by layer_types, else those from max_window_layers
    on. A window as long as the context leaves nothing out. Raises ConfigError."""
    slides = fields.boolean("use_sliding_window", False)
    window = None if fields.is_null("sliding_window") else fields.positive_int("sliding_window", DEFAULT_WINDOW)
    is_narrow = window is not None and window < config.context_len
    if fields.has("layer_types"):
        kinds = fields.value("layer_types")
        if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
            raise ConfigError("layer_types", f"only {FULL!r} layers are supported")
        if SLIDING in kinds and (is_narrow or not slides):
            raise ConfigError("layer_types", f"only {FULL!r} layers are supported, and {SLIDING!r} is among them")
    elif slides and is_narrow and fields.count("max_window_layers", DEFAULT_FULL_LAYERS) < config.num_hidden_layers:
        raise ConfigError("use_sliding_window", "sliding-window attention is not supported, only full attention")
