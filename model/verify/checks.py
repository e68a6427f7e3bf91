"""The comparisons that `verify` is made of: each gives rows of (what, backend, how it was fed, errors, limit).

Legend: T tokens · N query heads · K kv heads · H head dim · D model dim · V vocabulary.
Must not know: checkpoints on disk, how rows are printed.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from octavo.model.attention.interface import AttentionBackend
from octavo.model.attention.paged import PagedSequences, cut, paged_generate, paged_logits
from octavo.model.causal_lm import CausalLM
from octavo.model.layers.decoder import rotate

CHUNK_LENS = (1, 7, 16, 33)
NUM_ROPE_POSITIONS = 256

ROPE_LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest absolute error of q and k that start as N(0, 1): a few units in the last place."""

STATE_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error of hidden states and logits. Two correct bf16 paths are 0.02 to 0.04 apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """One comparison.

    mode: how the tokens were fed. max_abs_error: largest absolute difference. relative_error: norm of the difference
    over norm of transformers' values. limit: of the error that decides; each check says which.
    For greedy tokens the errors are of the logits: how far transformers finds our token below its own, absolutely and
    against its largest logit; num_equal of num_compared tokens agree exactly.
    """

    check: str
    backend: str
    mode: str
    max_abs_error: float
    relative_error: float
    limit: float
    is_ok: bool
    num_equal: int | None = None
    num_compared: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The two models, in the same dtype, the prompts, and how far positions go."""

    ours: CausalLM
    theirs: Any
    prompts: list[list[int]]
    context_len: int

    @property
    def longest(self) -> list[int]:
        """The prompt that single-sequence checks use: the longest, and up to five times over to cross many blocks."""
        prompt = max(self.prompts, key=len)
        return (prompt * 5)[: max(100, len(prompt))][: self.ours.config.max_position_embeddings]


def state_row(
    check: str, backend: str, mode: str, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype
) -> VerifyRow:
    """Judged by the relative error."""
    difference = ours.double() - theirs.double()
    relative = float(difference.norm() / theirs.double().norm())
    return VerifyRow(
        check=check,
        backend=backend,
        mode=mode,
        max_abs_error=float(difference.abs().max()),
        relative_error=relative,
        limit=STATE_LIMITS[dtype],
        is_ok=relative <= STATE_LIMITS[dtype],
    )


def compare_rope(comparison: Comparison) -> list[VerifyRow]:
    """q and k with positions turned in, from the start to the end of the context; judged by the absolute error."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    ours, config = comparison.ours, comparison.ours.config
    positions_T = torch.linspace(0, comparison.context_len - 1, NUM_ROPE_POSITIONS, dtype=torch.float64).long()
    generator = torch.Generator().manual_seed(0)
    heads = config.num_attention_heads + config.num_key_value_heads
    x_TNH = torch.randn(len(positions_T), heads, config.head_dim, generator=generator).to(ours.dtype)
    turned_TNH = rotate(x_TNH, ours.rope.angles(positions_T))
    cos, sin = comparison.theirs.model.rotary_emb(x_TNH, positions_T[None])
    q, k = x_TNH[None].transpose(1, 2).split([config.num_attention_heads, config.num_key_value_heads], dim=1)
    expected = [heads[0].transpose(0, 1) for heads in apply_rotary_pos_emb(q, k, cos, sin)]
    found = turned_TNH.split([config.num_attention_heads, config.num_key_value_heads], dim=1)
    rows = []
    for name, left, right in zip("qk", found, expected, strict=True):
        row = state_row(f"RoPE {name}", "-", f"positions 0 to {positions_T[-1]}", left, right, ours.dtype)
        limit = ROPE_LIMITS[ours.dtype]
        rows.append(replace(row, limit=limit, is_ok=row.max_abs_error <= limit))
    return rows


def compare_hidden_states(comparison: Comparison, backend: AttentionBackend) -> list[VerifyRow]:
    """The residual stream after the embedding and after every layer (the last one after the final norm, as
    transformers gives it), for a whole prefill."""
    ours, ids = comparison.ours, comparison.longest
    expected = comparison.theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    watched: list[nn.Module] = [ours.embed_tokens, *ours.decoder_layers[:-1], ours.norm]
    names = ["embedding", *(f"layer {i}" for i in range(len(watched) - 2)), f"layer {len(watched) - 2} + norm"]
    captured: list[torch.Tensor] = []
    handles = [module.register_forward_hook(lambda _m, _i, output: captured.append(output)) for module in watched]
    try:
        PagedSequences(ours, backend, num_sequences=1, max_tokens=len(ids)).step({0: ids})
    finally:
        for handle in handles:
            handle.remove()
    return [
        state_row(f"hidden states, {name}", backend.name, "whole", left, right[0], ours.dtype)
        for name, left, right in zip(names, captured, expected, strict=True)
    ]


def compare_logits(comparison: Comparison, backend: AttentionBackend) -> list[VerifyRow]:
    """Logits at every position of one sequence, fed whole and in chunks."""
    ours, ids = comparison.ours, comparison.longest
    expected_TV = comparison.theirs(torch.tensor([ids])).logits[0]
    modes = {"whole": [len(ids)]} | {f"chunks of {n}": cut(len(ids), n) for n in CHUNK_LENS if n < len(ids)}
    return [
        state_row("logits", backend.name, mode, paged_logits(ours, backend, ids, lens), expected_TV, ours.dtype)
        for mode, lens in modes.items()
    ]


def compare_greedy(comparison: Comparison, backend: AttentionBackend, max_new_tokens: int) -> list[VerifyRow]:
    """Greedy tokens, all prompts decoded as one batch: each must be the one that transformers finds most likely after
    the same tokens, or so near to it that the dtype cannot tell them apart. num_equal counts exact agreement."""
    room = comparison.ours.config.max_position_embeddings - max(len(prompt) for prompt in comparison.prompts)
    num_new = max(min(max_new_tokens, room), 1)
    outputs = paged_generate(comparison.ours, backend, comparison.prompts, max_new_tokens=num_new)
    gaps, shares = [], []
    for prompt, output in zip(comparison.prompts, outputs, strict=True):
        logits_TV = comparison.theirs(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
        gaps_T = logits_TV.amax(-1) - logits_TV.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps.append(gaps_T)
        shares.append(gaps_T / logits_TV.abs().amax(-1))
    worst_share, limit = float(torch.cat(shares).max()), STATE_LIMITS[comparison.ours.dtype]
    return [
        VerifyRow(
            check="greedy tokens",
            backend=backend.name,
            mode=f"{len(outputs)} prompts × {num_new}",
            max_abs_error=float(torch.cat(gaps).max()),
            relative_error=worst_share,
            limit=limit,
            is_ok=worst_share <= limit,
            num_equal=int((torch.cat(gaps) == 0).sum()),
            num_compared=len(outputs) * num_new,
        )
    ]
