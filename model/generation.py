"""The oracle: greedy generation that recomputes the whole sequence for every token, without any cache.

It shares weights, norms and the MLP with the serving path, and nothing of its attention: no pool, no table, no backend.

Legend: T tokens of the sequence · N query heads · K kv heads · G query heads per kv head · H head dim · V vocabulary.
Must not know: pools, backends.
"""

from collections.abc import Collection, Sequence

import torch

from octavo.model.causal_lm import CausalLM


def generate(
    model: CausalLM,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    """The greedy continuation of one prompt, without the prompt; it ends with an EOS token or after max_new_tokens.

    Equal logits: the lowest id wins, as argmax has it. Raises ValueError for an empty prompt.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids is empty: there is nothing to continue")
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(dense_logits(model, torch.tensor(ids, device=model.device))[-1].argmax()))
        if ids[-1] in eos_token_ids:
            break
    return ids[len(prompt_ids) :]


def dense_logits(model: CausalLM, ids_T: torch.Tensor) -> torch.Tensor:
    """float32 logits_TV at every position of one sequence."""
    angles = model.rope.angles(torch.arange(len(ids_T), device=ids_T.device))
    hidden_TD = model.embed_tokens(ids_T)
    for layer in model.decoder_layers:
        q_TNH, k_TKH, v_TKH = layer.self_attn.project(layer.input_layernorm(hidden_TD), angles)
        out_TNH = dense_attention(q_TNH, k_TKH, v_TKH, model.config.scale)
        hidden_TD = hidden_TD + layer.self_attn.o_proj(out_TNH.flatten(1))
        hidden_TD = hidden_TD + layer.mlp(layer.post_attention_layernorm(hidden_TD))
    return model.logits(model.norm(hidden_TD))


def dense_attention(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one sequence with itself, scores in fp32, in q's dtype out."""
    num_tokens, num_kv_heads = k_TKH.shape[:2]
    q_TKGH = q_TNH.unflatten(1, (num_kv_heads, -1)).float()
    scores_KGTU = torch.einsum("tkgh,ukh->kgtu", q_TKGH, k_TKH.float()) * scale
    is_future_TU = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q_TNH.device).triu(1)
    weights_KGTU = scores_KGTU.masked_fill(is_future_TU, -torch.inf).softmax(-1)
    return torch.einsum("kgtu,ukh->tkgh", weights_KGTU, v_TKH.float()).flatten(1, 2).to(q_TNH.dtype)
