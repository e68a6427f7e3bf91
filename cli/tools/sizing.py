"""`octavo sizing`: how many streams of a context fit beside a model into the memory of a device, before it is bought.

The arithmetic is that of a worker's start (worker/loading/memory.py) on the model's shape alone: nothing is downloaded
and no device is asked. A worker on a GPU measures what a step takes instead of estimating it, and says at its start
how many blocks it has.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from octavo.cli.errors import did_you_mean, usage

if TYPE_CHECKING:
    from octavo.model.config import ModelConfig

GIB = 1 << 30
BATCH_TOKENS, NUM_SEQS = 8192, 256  # what `octavo serve` takes on a GPU
_QWEN2 = {"vocab_size": 151_936, "max_position_embeddings": 32_768}
_WIDE = {"vocab_size": 152_064, "max_position_embeddings": 32_768}
_QWEN3 = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "head_dim": 128}


def _shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, *, has_own_head: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": not has_own_head,
    }  # fmt: skip


# The config.json of each, as far as memory goes.
PUBLISHED: dict[str, dict[str, object]] = {
    "Qwen2.5-0.5B": {"model_type": "qwen2", **_QWEN2, **_shape(24, 896, 4864, 14, 2, has_own_head=0)},
    "Qwen2.5-1.5B": {"model_type": "qwen2", **_QWEN2, **_shape(28, 1536, 8960, 12, 2, has_own_head=0)},
    "Qwen2.5-3B": {"model_type": "qwen2", **_QWEN2, **_shape(36, 2048, 11_008, 16, 2, has_own_head=0)},
    "Qwen2.5-7B": {"model_type": "qwen2", **_WIDE, **_shape(28, 3584, 18_944, 28, 4, has_own_head=1)},
    "Qwen2.5-14B": {"model_type": "qwen2", **_WIDE, **_shape(48, 5120, 13_824, 40, 8, has_own_head=1)},
    "Qwen2.5-32B": {"model_type": "qwen2", **_WIDE, **_shape(64, 5120, 27_648, 40, 8, has_own_head=1)},
    "Qwen2.5-72B": {"model_type": "qwen2", **_WIDE, **_shape(80, 8192, 29_568, 64, 8, has_own_head=1)},
    "Qwen3-0.6B": {"model_type": "qwen3", **_QWEN3, **_shape(28, 1024, 3072, 16, 8, has_own_head=0)},
    "Qwen3-1.7B": {"model_type": "qwen3", **_QWEN3, **_shape(28, 2048, 6144, 16, 8, has_own_head=0)},
    "Qwen3-4B": {"model_type": "qwen3", **_QWEN3, **_shape(36, 2560, 9728, 32, 8, has_own_head=0)},
    "Qwen3-8B": {"model_type": "qwen3", **_QWEN3, **_shape(36, 4096, 12_288, 32, 8, has_own_head=1)},
    "Qwen3-14B": {"model_type": "qwen3", **_QWEN3, **_shape(40, 5120, 17_408, 40, 8, has_own_head=1)},
    "Qwen3-32B": {"model_type": "qwen3", **_QWEN3, **_shape(64, 5120, 25_600, 64, 8, has_own_head=1)},
}


CONTEXT = 4096
"""Tokens of a stream where nobody says how many, or as many as the shortest model takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What should fit. memory_gib: of one device; one column each. context: tokens of a stream, prompt and output."""

    memory_gib: tuple[float, ...] = (16, 24, 48, 80, 141)
    context: int = CONTEXT
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    memory_fraction: float = 0.9
    block_size: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """One model. streams: whole contexts that fit at once, by memory in GiB; 0: the model does not fit."""

    model: str
    weights_bytes: int
    kv_bytes_per_token: int
    streams: dict[float, int]


def size(model: str, asked: Asked) -> Sized:
    """Raises CliError, CheckpointError, ConfigError for something that is not a model, or has a shorter context."""
    return _size(*_config_of(model), asked)


def _size(name: str, config: "ModelConfig", asked: Asked) -> Sized:
    import torch

    from octavo.model import CausalLM
    from octavo.model.attention.kv_pool import kv_block_bytes
    from octavo.model.checkpoint.packed import PackedWeights
    from octavo.model.layers.linear import Linear
    from octavo.worker.loading.memory import DoesNotFit, MemoryNeeds, activation_bytes, size_pool, weights_bytes

    if asked.context > config.context_len:
        numbers = f"--context is {asked.context:,}, and {name} has {config.context_len:,} positions"
        raise usage("the context is longer than the model's", numbers, "give a smaller --context")
    dtype = config.computed_in(None)
    plain = CausalLM(config, dtype=dtype, device="meta")
    taken = PackedWeights.of(plain).kept_bytes(weights_bytes(plain), dtype.itemsize)
    if asked.quantization != "none":  # of a layer's matrix a byte an element, and a scale an output
        if config.quantization is not None:
            numbers = f"--quantization is {asked.quantization}, and {name} is quantised already"
            raise usage("the weights cannot be had in that form", numbers, "leave --quantization out")
        layers = (module for layer in plain.decoder_layers for module in layer.modules())
        matrices = [module.weight for module in layers if isinstance(module, Linear)]
        taken -= sum((dtype.itemsize - 1) * weight.numel() - 4 * len(weight) for weight in matrices)
    cache = torch.float8_e4m3fn if asked.kv_cache_dtype == "fp8" else dtype
    block_bytes = kv_block_bytes(config, block_size=asked.block_size, dtype=cache)
    streams = {}
    for gib in asked.memory_gib:
        needs = MemoryNeeds(
            available_bytes=int(gib * GIB) - taken,
            weights_bytes=taken,
            activation_bytes=activation_bytes(
                config, dtype=dtype, max_batch_tokens=BATCH_TOKENS, max_num_seqs=NUM_SEQS
            ),
            block_bytes=block_bytes,
            block_size=asked.block_size,
            max_model_len=asked.context,
            max_num_seqs=1 << 30,  # the memory decides, not a setting
            memory_fraction=asked.memory_fraction,
        )
        try:
            streams[gib] = size_pool(needs) // needs.blocks_per_request
        except DoesNotFit:
            streams[gib] = 0
    return Sized(model=name, weights_bytes=taken, kv_bytes_per_token=block_bytes // asked.block_size, streams=streams)


def _config_of(model: str) -> "tuple[str, ModelConfig]":
    """(name in the table, ModelConfig): of a checkpoint on this machine if `octavo serve` would use it, or of a
    published model by its name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from octavo.model.checkpoint.source import embedded_names, resolve_checkpoint
    from octavo.model.config import ModelConfig, load_config

    if model in embedded_names() or Path(model).expanduser().is_dir():
        return model, load_config(resolve_checkpoint(model))
    short = model.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-base")
    for name, fields in PUBLISHED.items():
        if name.lower() == short:
            return name, ModelConfig.from_dict(fields)
    with contextlib.suppress(HFValidationError):  # no id of a hub: a misspelt folder
        if isinstance(cached := try_to_load_from_cache(model, "config.json"), str):
            return model, load_config(Path(cached).parent)
    advice = did_you_mean(model, PUBLISHED, otherwise="give a folder, or fetch it first with `octavo pull`")
    raise usage("the shape of this model is not known", f"{model} is not on this machine", advice)


def sizing(models: Sequence[str], asked: Asked, *, context: int | None, form: str) -> int:
    """Print the table. context: instead of `asked`'s; None: CONTEXT, or what the shortest of the models takes. form:
    table, markdown or json."""
    shapes = [_config_of(model) for model in models or PUBLISHED]
    shortest = min(CONTEXT, *(config.context_len for _, config in shapes))
    asked = replace(asked, context=shortest if context is None else context)
    found = [_size(name, config, asked) for name, config in shapes]
    if form == "json":
        named = [asdict(each) | {"streams": {f"{gib:g}": num for gib, num in each.streams.items()}} for each in found]
        print(json.dumps(named))  # noqa: T201
    elif form == "markdown":
        print(markdown(found, asked), end="")  # noqa: T201
    else:
        Console(markup=False).print(_rich_table(found, asked))
    return 0


def cells(found: Sequence[Sized], asked: Asked) -> tuple[list[str], list[list[str]]]:
    """Heading and rows."""
    heading = ["model", "weights", "cache of 1,000 tokens", *(f"{gib:g} GiB" for gib in asked.memory_gib)]
    rows = [
        [
            each.model,
            f"{each.weights_bytes / GIB:.1f} GiB",
            f"{1000 * each.kv_bytes_per_token / (1 << 20):.0f} MiB",
            *(f"{num:,}" if num else "—" for num in each.streams.values()),
        ]
        for each in found
    ]
    return heading, rows


def markdown(found: Sequence[Sized], asked: Asked) -> str:
    """The table as in docs/sizing.md."""
    heading, rows = cells(found, asked)
    lines = [heading, ["---"] + ["---:"] * (len(heading) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rich_table(found: Sequence[Sized], asked: Asked) -> Table:
    heading, rows = cells(found, asked)
    title = f"streams of {asked.context:,} tokens at once, {asked.memory_fraction:.0%} of the memory; — does not fit"
    table = Table(title=title, box=None, title_justify="left")
    for number, name in enumerate(heading):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table
