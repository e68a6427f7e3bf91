"""Small checkpoints in Hugging Face layout, with random weights and a byte-level BPE tokenizer trained on the spot."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog",
    "héllo wörld",
    "你好，世界",
    "😀👩‍👩‍👧 emoji",
    "def f(x): return x",
)


QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}


def tiny_config(**changes: object) -> dict[str, object]:
    """config.json of a Qwen2 model of about 0.2 M parameters; `changes` replace entries (`QWEN3`: another family)."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_sliding_window": False,
        "vocab_size": 384,
    } | changes


def train_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE tokenizer with Qwen's splitting rule; at most vocab_size ids, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def random_tensors(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the architecture, float32, scaled so that logits differ clearly from token to token."""
    generator = torch.Generator().manual_seed(seed)
    D, I, V = (int(str(config[key])) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    N, K = int(str(config["num_attention_heads"])), int(str(config["num_key_value_heads"]))
    H = int(str(config.get("head_dim", D // N)))

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors = {"model.embed_tokens.weight": normal(V, D, std=0.1), "model.norm.weight": 1 + normal(D, std=0.1)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(V, D, std=D**-0.5)
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", N * H), ("k", K * H), ("v", K * H)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, D, std=D**-0.5)
            if config["model_type"] == "qwen2":
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows, std=0.3)
            elif name != "v":
                tensors[f"{prefix}self_attn.{name}_norm.weight"] = 1 + normal(H, std=0.3)
        tensors[prefix + "self_attn.o_proj.weight"] = normal(D, N * H, std=2 * (N * H) ** -0.5)
        tensors[prefix + "mlp.gate_proj.weight"] = normal(I, D, std=D**-0.5)
        tensors[prefix + "mlp.up_proj.weight"] = normal(I, D, std=D**-0.5)
        tensors[prefix + "mlp.down_proj.weight"] = normal(D, I, std=2 * I**-0.5)
        tensors[prefix + "input_layernorm.weight"] = 1 + normal(D, std=0.1)
        tensors[prefix + "post_attention_layernorm.weight"] = 1 + normal(D, std=0.1)
    return tensors


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into the folder."""
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "temperature": 0.7, "top_k": 20})
    )
    return tokenizer


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """Write a complete, loadable checkpoint; `changes` replace entries of its config.json. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder)
    config = tiny_config(**changes)
    config["eos_token_id"] = tokenizer.token_to_id("<|im_end|>")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(random_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
