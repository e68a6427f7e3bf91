"""The CUDA runner of each rank of a group, in Triton's interpreter over gloo, gives what one rank's does: every kind of
step, every way through a layer, every kind of weights, sampled on each rank."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.parallel import Ranks
from tests.support.model.interpreter import WARNINGS
from tests.support.model.packed_checkpoints import GPTQ_CONFIG, write_packed_checkpoint
from tests.support.model.ranks import alone, on_ranks, summing_shares
from tests.support.worker.cuda_runners import CONFIG, DEVICE
from tests.support.worker.rank_steps import SLOTS, sampled_by, steps_of

pytestmark = [
    *WARNINGS,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_gpu_ranks.py has what two ranks on a device can do"),
]


@cache
def plain_alone(shape: str) -> dict[str, Any]:
    """What one rank gives by cuBLAS, in no fewer bits."""
    found: dict[str, Any] = alone(steps_of, shape, "cublas", "bf16", "auto")
    return found


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ("qwen2", "cublas"),
        ("qwen3", "cublas"),
        ("qwen2", "small_batch"),
        ("qwen2", "deterministic"),
        pytest.param("qwen3", "small_batch", marks=pytest.mark.slow),
        pytest.param("qwen2", "split_k-16", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_step_gives_each_rank_what_one_rank_gets(shape: str, way: str, tmp_path: Path) -> None:
    expected = plain_alone(shape)
    found = on_ranks(2, steps_of, tmp_path, shape, way, "bf16", "auto")
    for rank in found:
        assert rank["tokens"] == expected["tokens"]
        assert rank["likely"] == expected["likely"]
        for name in ("chosen", "prompt", "logits"):
            assert len(rank[name]) == len(expected[name]) > 0
            np.testing.assert_allclose(rank[name], expected[name], atol=1e-4, rtol=1e-4)
    assert np.array_equal(found[0]["logits"], found[1]["logits"])


def steps_by_shares(ranks: Ranks, folder: Path, max_rows: int) -> dict[str, Any]:
    """max_rows: of the memory that the ranks share."""
    summing = summing_shares(ranks, (max_rows, CONFIG.hidden_size), folder)
    assert summing.divided is not None
    with mock.patch.object(summing.divided, "add", side_effect=summing.divided.add) as add:
        found: dict[str, Any] = steps_of(summing, "qwen2", "cublas", "bf16", "auto")
    return {**found, "sums": add.call_count}


@pytest.mark.parametrize("has_room", [True, False])
def test_prompts_are_summed_by_shares_where_their_stream_has_room(has_room: bool, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    expected, max_rows = plain_alone("qwen2"), 24 + SLOTS  # of chunks and of decodes
    for rank in on_ranks(2, steps_by_shares, tmp_path, tmp_path / "memory", max_rows if has_room else max_rows - 1):
        assert rank["tokens"] == expected["tokens"]
        np.testing.assert_allclose(rank["prompt"], expected["prompt"], atol=1e-4, rtol=1e-4)
        assert (rank["sums"] > 0) is has_room


@pytest.mark.parametrize("way", ["cublas", "deterministic"])
def test_every_way_to_sample_gives_the_tokens_of_one_rank_and_joins_logits_where_it_must(
    way: str, tmp_path: Path
) -> None:
    expected = alone(sampled_by, way)
    assert len(expected["chosen"]) > 9
    assert not any(expected["widths"])
    candidate, part = 1, CONFIG.vocab_size // 2
    for rank in on_ranks(2, sampled_by, tmp_path, way):
        assert rank["tokens"] == expected["tokens"]
        assert rank["likely"] == expected["likely"]
        np.testing.assert_allclose(rank["chosen"], expected["chosen"], atol=1e-4, rtol=1e-4)
        assert rank["widths"] == [{candidate}] * 2 + [{candidate, part}] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv"), [("int8", "auto"), ("fp8", "auto"), ("bf16", "fp8")])
def test_weights_and_cache_of_8_bits_are_cut_too(weights: str, kv: str, tmp_path: Path) -> None:
    """A rank rounds its own part, so what is as near to the plain numbers is all that can be asked."""
    exact = plain_alone("qwen2")["prompt"]
    whole = alone(steps_of, "qwen2", "cublas", weights, kv)["prompt"]
    found = on_ranks(2, steps_of, tmp_path, "qwen2", "cublas", weights, kv)
    assert found[0]["tokens"] == found[1]["tokens"]
    assert torch.equal(torch.from_numpy(found[0]["logits"]), torch.from_numpy(found[1]["logits"]))
    error = np.abs(whole - exact).max()
    assert 0 < np.abs(found[0]["prompt"] - exact).max() < 3 * error


@pytest.mark.slow
@pytest.mark.parametrize("is_reordered", [False, True], ids=["in order", "reordered"])
def test_packed_matrices_are_cut_too(is_reordered: bool, tmp_path: Path) -> None:
    """Where inputs are reordered, ranks unpack what they cannot cut, and the rest of the layer stays packed."""
    wide = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
    config = GPTQ_CONFIG | {"group_size": 32, "desc_act": is_reordered}
    write_packed_checkpoint(tmp_path / "model", config, permuted=is_reordered, **wide)  # type: ignore[arg-type]
    folder = str(tmp_path / "model")
    expected = alone(steps_of, "", "cublas", folder, "auto")
    (tmp_path / "ranks").mkdir()
    found = on_ranks(2, steps_of, tmp_path / "ranks", "", "cublas", folder, "auto")
    for rank in found:
        assert rank["tokens"] == found[0]["tokens"]
        for name in ("chosen", "prompt"):
            np.testing.assert_allclose(rank[name], expected[name], atol=2e-3)
