"""transformers' `generate` as one of the sides compared on a CPU: all requests as one padded batch.

Must not know: our side, what is measured.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen2Config as TransformersConfig
from transformers import Qwen2ForCausalLM as TransformersQwen2
from transformers.utils import logging

from bench.cpu.workloads import Ask, Clock
from octavo.model.config import ModelConfig


def make_transformers(config: ModelConfig, dtype: torch.dtype) -> Any:
    """transformers' model of the same shape with its own random weights, SDPA attention, and no end token."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    theirs = TransformersConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    model = TransformersQwen2._from_config(theirs, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class TransformersPadded:
    """All requests as one batch, padded on the left, until the longest output is complete."""

    name = "transformers, padded batch"

    def __init__(self, model: Any, *, clock: Clock = time.perf_counter) -> None:
        self._model, self._clock = model, clock

    def serve(self, asks: Sequence[Ask]) -> float:
        """See `Side.serve`."""
        start_s = self._clock()
        _generate(self._model, asks, max(ask.num_output for ask in asks))
        return self._clock() - start_s


def _generate(model: Any, asks: Sequence[Ask], num_output: int) -> None:
    longest = max(len(ask.prompt_ids_T) for ask in asks)
    ids_ST = torch.zeros(len(asks), longest, dtype=torch.long)
    mask_ST = torch.zeros(len(asks), longest, dtype=torch.long)
    for row, ask in enumerate(asks):
        ids_ST[row, longest - len(ask.prompt_ids_T) :] = torch.from_numpy(ask.prompt_ids_T)
        mask_ST[row, longest - len(ask.prompt_ids_T) :] = 1
    with torch.inference_mode():
        out = model.generate(ids_ST, attention_mask=mask_ST, max_new_tokens=num_output, do_sample=False)
    if out.shape[1] != longest + num_output:
        raise RuntimeError(f"asked for {num_output} tokens, got {out.shape[1] - longest}")
