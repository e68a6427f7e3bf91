"""The reference: greedy generation that recomputes the whole sequence for every token, without any cache.

It runs the family's program of a layer with the serving path's products, norms and MLP, and with an attention of its
own: no pool, no table, no backend.

Legend: T tokens of the sequence · N query heads · K kv heads · G query heads per kv head · H head dim · V vocabulary ·
U the tokens again, as keys · D model dim · C columns of QKV.
Must not know: pools, backends.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from octavo.model.causal_lm import CausalLM
from octavo.model.layers.decoder import DecoderLayer, TorchOps, turn_heads


def generate(
    model: CausalLM,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    """The greedy continuation of one prompt, without the prompt; ends with an EOS token or after max_new_tokens.

    Of equal logits the lowest id wins, as in argmax. Raises ValueError for an empty prompt.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids is empty: there is nothing to continue")
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(dense_logits(model, torch.tensor(ids, device=model.device))[-1].argmax()))
        if ids[-1] in eos_token_ids:
            break
    return ids[len(prompt_ids) :]


class DenseOps(TorchOps):
    """A layer's operations without a cache: what `write_qkv` would write is passed on instead."""

    def write_qkv(self, layer: DecoderLayer, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> Any:
        """See LayerOps: queries, keys and values."""
        return turn_heads(layer, qkv_TC, self.angles)

    def attend(self, layer: DecoderLayer, x_TD: torch.Tensor, heads: Any) -> torch.Tensor:
        """See LayerOps."""
        q_TNH, k_TKH, v_TKH = heads
        return dense_attention(q_TNH, k_TKH, v_TKH, layer.self_attn.scale).flatten(1)


def dense_logits(model: CausalLM, ids_T: torch.Tensor) -> torch.Tensor:
    """float32 logits_TV at every position of one sequence."""
    family = model.config.family
    ops = DenseOps(angles=model.rope.angles(torch.arange(len(ids_T), device=ids_T.device)), ranks=model.ranks)
    hidden_TD = model.embed_tokens(ids_T)
    for layer in model.decoder_layers:
        hidden_TD = family.finish(ops, layer, hidden_TD, family.attend(ops, layer, hidden_TD))
    return model.logits(model.norm(hidden_TD))


def dense_attention(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal self-attention of one sequence; scores in fp32, result in q's dtype."""
    num_tokens, num_kv_heads = k_TKH.shape[:2]
    q_TKGH = q_TNH.unflatten(1, (num_kv_heads, -1)).float()
    scores_KGTU = torch.einsum("tkgh,ukh->kgtu", q_TKGH, k_TKH.float()) * scale
    is_future_TU = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q_TNH.device).triu(1)
    weights_KGTU = scores_KGTU.masked_fill(is_future_TU, -torch.inf).softmax(-1)
    return torch.einsum("kgtu,ukh->tkgh", weights_KGTU, v_TKH.float()).flatten(1, 2).to(q_TNH.dtype)
