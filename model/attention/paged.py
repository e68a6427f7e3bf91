"""A few sequences in a pool of their own, stepped by hand: for `verify`, the examples and the tests.

Every sequence has as many blocks as it can ever need, dealt out once in a shuffled order (a table in ascending order
would hide mistakes). A server uses a block manager and a scheduler instead.

Legend: T tokens in this step · Q new tokens of one sequence · D model dim · V vocabulary.
Must not know: requests, checkpoints.
"""

from collections.abc import Mapping, Sequence

import torch

from octavo.model.attention.interface import AttentionBackend, make_inputs
from octavo.model.attention.kv_pool import KvPool
from octavo.model.causal_lm import CausalLM


class PagedSequences:
    """Sequences 0 to num_sequences - 1, each with room for max_tokens, all empty at first.

    lengths: cached tokens of each. tables: their block ids. kv: the pool; kv_dtype None: of the model's dtype.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        *,
        num_sequences: int,
        max_tokens: int,
        block_size: int = 16,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.backend = model, backend
        width = -(-max_tokens // block_size)
        order = torch.randperm(num_sequences * width, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = [order[start : start + width] for start in range(0, len(order), width)]
        self.lengths = [0] * num_sequences
        self.kv = KvPool(model.config, len(order), block_size, kv_dtype or model.dtype, model.device)

    def step(self, new_ids: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """One forward pass: sequence -> its next token ids, one or many. Returns its hidden states [Q, D]."""
        sequences = list(new_ids)
        query_lens = [len(new_ids[s]) for s in sequences]
        positions_T, inputs = make_inputs(
            [self.tables[s] for s in sequences],
            [self.lengths[s] for s in sequences],
            query_lens,
            block_size=self.kv.block_size,
            device=self.model.device,
        )
        ids_T = torch.tensor([token for s in sequences for token in new_ids[s]], device=self.model.device)
        hidden_TD = self.model(ids_T, positions_T, self.kv, inputs, self.backend)
        for s, length in zip(sequences, query_lens, strict=True):
            self.lengths[s] += length
        return dict(zip(sequences, hidden_TD.split(query_lens), strict=True))

    def next_tokens(self, new_ids: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """One step, then the most likely token after each sequence."""
        hidden = self.step(new_ids)
        logits_SV = self.model.logits(torch.stack([rows[-1] for rows in hidden.values()]))
        return dict(zip(hidden, logits_SV.argmax(-1).tolist(), strict=True))


def paged_logits(
    model: CausalLM,
    backend: AttentionBackend,
    ids: Sequence[int],
    chunk_lens: Sequence[int],
    *,
    kv_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """float32 [T, V] at every position of one sequence that is fed in chunks, whose lengths must add up to its own."""
    sequences = PagedSequences(model, backend, num_sequences=1, max_tokens=len(ids), kv_dtype=kv_dtype)
    rows, start = [], 0
    for length in chunk_lens:
        rows.append(sequences.step({0: ids[start : start + length]})[0])
        start += length
    return model.logits(torch.cat(rows))


def cut(num_tokens: int, chunk_len: int) -> list[int]:
    """Lengths of chunks of at most chunk_len that add up to num_tokens."""
    return [min(chunk_len, num_tokens - start) for start in range(0, num_tokens, chunk_len)]


def paged_generate(
    model: CausalLM,
    backend: AttentionBackend,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    kv_dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """The greedy continuations of all prompts, decoded as one batch; nothing ends early. Reference of `generate`."""
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    sequences = PagedSequences(model, backend, num_sequences=len(prompts), max_tokens=longest, kv_dtype=kv_dtype)
    last = sequences.next_tokens(dict(enumerate(prompts)))
    outputs = [[last[s]] for s in range(len(prompts))]
    for _ in range(max_new_tokens - 1):
        last = sequences.next_tokens({s: [token] for s, token in last.items()})
        for s, token in last.items():
            outputs[s].append(token)
    return outputs
