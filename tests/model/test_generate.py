"""The oracle, and the paged reference that must give the same."""

import pytest
import torch

from octavo.model import (
    BACKENDS,
    CausalLM,
    KvPool,
    ModelConfig,
    dense_logits,
    generate,
    get_backend,
    make_inputs,
)
from octavo.model.attention.paged import PagedSequences, cut, paged_generate
from tests.support.model.checkpoints import tiny_config


def test_each_token_is_the_most_likely_one_after_all_before_it(tiny_model: CausalLM) -> None:
    prompt = [5, 6, 7]
    output = generate(tiny_model, prompt, max_new_tokens=8)
    logits_TV = dense_logits(tiny_model, torch.tensor(prompt + output))
    assert output == logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_an_end_token_ends_the_output_and_is_part_of_it(tiny_model: CausalLM) -> None:
    full = generate(tiny_model, [5, 6, 7], max_new_tokens=8)
    stop = full[4]
    assert generate(tiny_model, [5, 6, 7], max_new_tokens=8, eos_token_ids={stop}) == full[: full.index(stop) + 1]


def test_no_new_tokens_are_none(tiny_model: CausalLM) -> None:
    assert generate(tiny_model, [5], max_new_tokens=0) == []


def test_an_empty_prompt_is_refused(tiny_model: CausalLM) -> None:
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        generate(tiny_model, [], max_new_tokens=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_from_blocks_gives_what_recomputing_gives(tiny_model: CausalLM, backend: str) -> None:
    prompts = [list(range(1, length + 1)) for length in (1, 15, 16, 17, 40)]
    expected = [generate(tiny_model, prompt, max_new_tokens=20) for prompt in prompts]
    assert paged_generate(tiny_model, get_backend(backend), prompts, max_new_tokens=20) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_read_from_blocks_that_hold_poison(tiny_model: CausalLM, backend: str) -> None:
    sequences = PagedSequences(tiny_model, get_backend(backend), num_sequences=3, max_tokens=50)
    sequences.kv.k_pool_LPKBH.fill_(torch.nan)
    sequences.kv.v_pool_LPKBH.fill_(torch.nan)
    ids = list(range(40))
    sequences.step({0: ids[:17], 1: ids[:1], 2: ids[:16]})
    hidden = sequences.step({0: ids[17:18], 1: ids[1:20], 2: ids[16:17]})
    for s, rows in hidden.items():
        expected_TV = dense_logits(tiny_model, torch.tensor(ids[: sequences.lengths[s]]))
        torch.testing.assert_close(tiny_model.logits(rows), expected_TV[-len(rows) :], rtol=0, atol=1e-4)


def test_a_token_without_a_slot_is_computed_and_not_kept(tiny_model: CausalLM) -> None:
    kv = KvPool(tiny_model.config, 2, 16, torch.float32)
    positions_T, inputs = make_inputs([[1]], [0], [3], block_size=16)
    inputs.slot_mapping_T[2] = -1
    tiny_model(torch.tensor([1, 2, 3]), positions_T, kv, inputs, get_backend("reference"))
    assert bool((kv.k_pool_LPKBH[:, 1, :, :2] != 0).any())
    assert bool((kv.k_pool_LPKBH[:, 1, :, 2:] == 0).all())
    assert bool((kv.k_pool_LPKBH[:, 0] == 0).all())


@pytest.mark.parametrize("wanted", [[], [2], [6, 0, 6], list(range(7))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wanted_rows_are_those_of_the_whole_step_and_the_cache_is_the_same(
    wanted: list[int], dtype: torch.dtype
) -> None:
    model = CausalLM.random(ModelConfig.from_dict(tiny_config()), seed=3, dtype=dtype)
    model.pack_weights()
    positions_T, inputs = make_inputs([[1], [0]], [0, 0], [3, 4], block_size=16)
    outs, pools = [], []
    for wanted_S in (None, torch.tensor(wanted, dtype=torch.int64)):
        kv = KvPool(model.config, 2, 16, dtype)
        outs.append(model(torch.arange(7), positions_T, kv, inputs, get_backend("sdpa"), wanted_S))
        pools.append(kv.k_pool_LPKBH)
    torch.testing.assert_close(outs[1], outs[0][wanted], rtol=2**-6, atol=1e-5)  # other products for fewer rows
    assert torch.equal(*pools)


def test_chunks_add_up() -> None:
    assert [cut(33, 16), cut(32, 16), cut(5, 16), cut(3, 1)] == [[16, 16, 1], [16, 16], [5], [1, 1, 1]]


def test_packing_weights_changes_nothing_that_is_computed() -> None:
    model = CausalLM.random(ModelConfig.from_dict(tiny_config()), seed=3)
    ids_T = torch.arange(10)
    before = dense_logits(model, ids_T)
    model.pack_weights()
    torch.testing.assert_close(dense_logits(model, ids_T), before, rtol=0, atol=1e-4)
