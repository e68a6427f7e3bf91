"""Logits and greedy tokens equal transformers' in the real shapes, however the tokens are fed and attended to."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Qwen2Config as TransformersConfig
from transformers import Qwen2ForCausalLM as TransformersQwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from octavo.model import BACKENDS, CausalLM, ModelConfig, dense_logits, generate, get_backend
from octavo.model.attention.paged import PagedSequences, cut, paged_generate, paged_logits
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


LIMIT = 1e-4
NUM_TOKENS = 50


@pytest.fixture(scope="module", params=SHAPES)
def thin_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with torch.inference_mode():
        yield make_pair(raw_config(request.param, **NARROW))


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with torch.inference_mode():
        yield make_pair(raw_config(request.param))


def largest_difference(ours_TV: torch.Tensor, theirs_TV: torch.Tensor) -> float:
    assert ours_TV.shape == theirs_TV.shape
    assert ours_TV.dtype == torch.float32
    return float((ours_TV - theirs_TV).abs().max())


def test_the_oracle_without_a_cache_gives_the_same_logits(pair: Pair) -> None:
    ids = random_ids([NUM_TOKENS], seed=1)[0]
    assert largest_difference(dense_logits(pair.ours, torch.tensor(ids)), pair.their_logits([ids])[0]) < LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_len", [NUM_TOKENS, 1, 7, 16, 33])
def test_logits_are_the_same_at_every_position_whole_and_in_chunks(pair: Pair, backend: str, chunk_len: int) -> None:
    ids = random_ids([NUM_TOKENS], seed=2)[0]
    ours_TV = paged_logits(pair.ours, get_backend(backend), ids, cut(len(ids), chunk_len))
    assert largest_difference(ours_TV, pair.their_logits([ids])[0]) < LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_batches_of_32_chunks_and_decodes_give_the_same_logits(thin_pair: Pair, backend: str) -> None:
    dice = random.Random(3)
    prompts = random_ids([dice.choice([1, 15, 16, 17, 31, 33, 60, 75]) for _ in range(32)], seed=3)
    sequences = PagedSequences(thin_pair.ours, get_backend(backend), num_sequences=32, max_tokens=75)
    hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
    num_mixed = 0
    while waiting := [s for s, ids in enumerate(prompts) if sequences.lengths[s] < len(ids)]:
        sizes = {s: dice.choice([1, 1, 1, 7, 16, 33]) for s in waiting}
        chunks = {s: prompts[s][sequences.lengths[s] :][:size] for s, size in sizes.items()}
        num_mixed += len({len(chunk) == 1 for chunk in chunks.values()}) == 2
        for s, rows in sequences.step(chunks).items():
            hidden[s].append(rows)
    ours = thin_pair.ours.logits(torch.cat([rows for parts in hidden for rows in parts]))
    assert num_mixed >= 5
    assert largest_difference(ours, torch.cat(thin_pair.their_logits(prompts))) < LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_are_the_same_for_64_tokens_on_50_prompts(thin_pair: Pair, backend: str) -> None:
    # Ten by the backend that goes through tokens one by one, of lengths as different.
    prompts = random_ids([3 + s % 30 for s in range(0, 50, 5 if backend == "reference" else 1)], seed=4)
    outputs = paged_generate(thin_pair.ours, get_backend(backend), prompts, max_new_tokens=64)
    # By induction: given our tokens so far, transformers finds our next one most likely.
    logits = thin_pair.their_logits([prompt + output for prompt, output in zip(prompts, outputs, strict=True)])
    for prompt, output, logits_TV in zip(prompts, outputs, logits, strict=True):
        assert output == logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len({token for output in outputs for token in output}) > 100  # they are not all the same


def test_the_oracle_and_transformers_generate_the_same(thin_pair: Pair) -> None:
    prompt = random_ids([21], seed=5)[0]
    theirs = thin_pair.theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert generate(thin_pair.ours, prompt, max_new_tokens=12) == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_lens", [[200], [33] * 6 + [2], [7] * 20 + [1] * 60], ids=["whole", "33", "7, then 1"])
@pytest.mark.parametrize("shape", ["0.5B: 14 heads on 2, of 64, tied", "1.5B: 12 heads on 2, of 128, tied"])
def test_yarn_gives_the_same_logits_past_the_original_length(shape: str, chunk_lens: list[int], backend: str) -> None:
    raw = raw_config(shape, rope_scaling=dict(YARN), max_position_embeddings=256, **NARROW)
    pair = make_pair(raw)
    ids = random_ids([200], seed=6)[0]
    with torch.inference_mode():
        ours_TV = paged_logits(pair.ours, get_backend(backend), ids, chunk_lens)
    assert largest_difference(ours_TV, pair.their_logits([ids])[0]) < LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_half_precision_stays_near_transformers_in_float32(dtype: torch.dtype, limit: float, backend: str) -> None:
    raw = raw_config("0.5B: 14 heads on 2, of 64, tied", num_hidden_layers=2)
    wide, narrow = make_pair(raw), make_pair(raw, dtype=dtype)
    ids = random_ids([50], seed=7)[0]
    with torch.inference_mode():
        ours_TV = paged_logits(narrow.ours, get_backend(backend), ids, [33, 16, 1])
    expected_TV = wide.their_logits([ids])[0]
    assert float((ours_TV - expected_TV).norm() / expected_TV.norm()) < limit


def test_bfloat16_prefill_by_sdpa_is_as_near_to_transformers_as_fused_matrices_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "octavo.model.attention.sdpa.takes_chunks", lambda pool_PKBH: False
    )  # transformers' own attention
    pair = make_pair(raw_config("0.5B: 14 heads on 2, of 64, tied", num_hidden_layers=2), dtype=torch.bfloat16)
    ids = random_ids([40], seed=8)[0]
    with torch.inference_mode():
        ours_TV = paged_logits(pair.ours, get_backend("sdpa"), ids, [len(ids)])
    # 0 where the CPU sums fused matrices in the same order: everything else rounds where transformers rounds.
    assert largest_difference(ours_TV, pair.their_logits([ids])[0]) <= 0.03


def test_bfloat16_prefill_is_as_near_to_float32_as_transformers_bfloat16() -> None:
    raw = raw_config("0.5B: 14 heads on 2, of 64, tied", num_hidden_layers=2)
    wide, narrow = make_pair(raw), make_pair(raw, dtype=torch.bfloat16)
    ids = random_ids([40], seed=8)[0]
    with torch.inference_mode():
        ours_TV = paged_logits(narrow.ours, get_backend("sdpa"), ids, [len(ids)])
    expected_TV, theirs_TV = wide.their_logits([ids])[0], narrow.their_logits([ids])[0]
    assert float((ours_TV - expected_TV).norm()) <= 1.1 * float((theirs_TV - expected_TV).norm())
