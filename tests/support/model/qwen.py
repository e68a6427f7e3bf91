"""The real shapes of Qwen2.5, cut to a few layers, with the same random weights here and in transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen2Config as TransformersConfig
from transformers import Qwen2ForCausalLM as TransformersQwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from octavo.model import CausalLM, ModelConfig
from octavo.model.checkpoint.weight_names import destinations

VOCAB = 1000

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B: 14 heads on 2, of 64, tied": {
        "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "head_dim": 64, "num_hidden_layers": 2, "tie_word_embeddings": True,
    },
    "1.5B: 12 heads on 2, of 128, tied": {
        "hidden_size": 1536, "intermediate_size": 1024, "num_attention_heads": 12, "num_key_value_heads": 2,
        "head_dim": 128, "num_hidden_layers": 2, "tie_word_embeddings": True,
    },
    "7B: 28 heads on 4, of 128, untied": {
        "hidden_size": 3584, "intermediate_size": 512, "num_attention_heads": 28, "num_key_value_heads": 4,
        "head_dim": 128, "num_hidden_layers": 2, "tie_word_embeddings": False,
    },
    "no grouping: 16 heads on 16": {
        "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 64, "num_hidden_layers": 3, "tie_word_embeddings": False,
    },
    "one KV head: 8 heads on 1": {
        "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 64, "num_hidden_layers": 4, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What differs between the published sizes, with fewer layers and (but for 0.5B) a narrower MLP."""

NARROW: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
"""The same heads on a thin residual stream: for tests with thousands of tokens."""

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def raw_config(shape: str, **changes: Any) -> dict[str, Any]:
    """config.json of a shape; `changes` replace entries."""
    common = {"model_type": "qwen2", "vocab_size": VOCAB, "rope_theta": 1e6, "max_position_embeddings": 32768}
    return common | SHAPES[shape] | changes


@dataclass(frozen=True)
class Pair:
    """The same weights twice; transformers' model shares our memory."""

    ours: CausalLM
    theirs: Any

    def their_logits(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """float32 [T, V] of each sequence, as one batch padded on the right (nothing attends to what follows)."""
        longest = max(len(ids) for ids in sequences)
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])
        with torch.inference_mode():
            logits = self.theirs(padded).logits.float()
        return [rows[: len(ids)] for rows, ids in zip(logits, sequences, strict=True)]


def make_pair(raw: dict[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Pair:
    """Random weights by a seed in both implementations."""
    ours = CausalLM.random(ModelConfig.from_dict(raw), seed=seed, dtype=dtype)
    config = TransformersConfig(**raw, attn_implementation="sdpa")
    with torch.device("meta"):
        theirs = TransformersQwen2(config)
    weights = destinations(ours)
    theirs.load_state_dict(weights | {"lm_head.weight": ours.lm_head.weight.data}, assign=True)
    theirs.model.rotary_emb = Qwen2RotaryEmbedding(config)
    return Pair(ours, theirs.eval())


def random_ids(lengths: Sequence[int], *, seed: int) -> list[list[int]]:
    """Sequences of uniform token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
