"""A checkpoint folder with random weights in the shape of a published model, and a tokenizer made of plain JSON: what a
speed measurement needs, without a download. `python -m bench.random_checkpoint 0.5B FOLDER`.

Letters: D model dim · I intermediate · N query heads · K kv heads · H head dim · V embedding rows.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.shapes import MAX_POSITIONS, SHAPES, Shape
from octavo.worker.runners.oracle.tokenizer import END_TOKEN_ID, oracle_tokenizer_files

_STD = 0.02
_SHARD_BYTES = 4 << 30


def write_checkpoint(folder: Path, shape: Shape, *, seed: int = 0, max_model_len: int = MAX_POSITIONS) -> Path:
    """Write config.json, bf16 safetensors (one file, or several with an index) and a tokenizer. Returns the folder."""
    write_description(folder, shape, max_model_len=max_model_len)
    _write_weights(folder, shape, seed)
    return folder


def write_description(folder: Path, shape: Shape, *, max_model_len: int = MAX_POSITIONS) -> Path:
    """Write all but the weights, for `--load-format random`, which draws them. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape, max_model_len), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKEN_ID}))
    for name, data in oracle_tokenizer_files(shape.num_ids).items():
        (folder / name).write_bytes(data)
    return folder


def _config(shape: Shape, max_model_len: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
        "eos_token_id": END_TOKEN_ID,
    }


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of the architecture, in the order of the layers."""
    D, I, H = shape.hidden_size, shape.intermediate_size, shape.head_dim
    N, K = shape.num_heads, shape.num_kv_heads
    yield "model.embed_tokens.weight", (shape.vocab_size, D)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", N * H), ("k", K * H), ("v", K * H)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, D)
            yield f"{prefix}self_attn.{name}_proj.bias", (rows,)
        yield f"{prefix}self_attn.o_proj.weight", (D, N * H)
        yield f"{prefix}mlp.gate_proj.weight", (I, D)
        yield f"{prefix}mlp.up_proj.weight", (I, D)
        yield f"{prefix}mlp.down_proj.weight", (D, I)
        yield f"{prefix}input_layernorm.weight", (D,)
        yield f"{prefix}post_attention_layernorm.weight", (D,)
    yield "model.norm.weight", (D,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab_size, D)


def _write_weights(folder: Path, shape: Shape, seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}]
    num_bytes = 0
    for name, size in tensor_shapes(shape):
        tensor = _random(name, size, generator).to("cpu")
        if shards[-1] and num_bytes + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _random(name: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    tensor.normal_(0.0, _STD, generator=generator)
    return tensor + 1 if name.endswith("norm.weight") else tensor


def main() -> None:
    """Write a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(write_checkpoint(arguments.folder, SHAPES[arguments.shape]))


if __name__ == "__main__":
    main()
