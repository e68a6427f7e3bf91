"""Logits and greedy tokens equal transformers' in the real shapes, however the tokens are fed and attended to."""

import random
from collections.abc import Iterator

import pytest
import torch

from octavo.model import BACKENDS, dense_logits, generate, get_backend
from octavo.model.attention.paged import PagedSequences, cut, paged_generate, paged_logits
from tests.support.model.qwen import NARROW, SHAPES, YARN, Pair, make_pair, random_ids, raw_config

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
    prompts = random_ids([3 + s % 30 for s in range(50)], seed=4)
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
