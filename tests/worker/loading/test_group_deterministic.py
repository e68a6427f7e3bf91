"""Deterministic mode, weights and caches of few bits on a worker of two processes: what one process can do."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.model import CausalLM, ModelConfig
from octavo.model.attention.interface import get_backend
from octavo.model.attention.paged import paged_logits
from octavo.model.cpu.native import native_library
from octavo.model.invariant import InvarianceUnavailable, make_invariant
from octavo.model.parallel import Ranks, Sums, join_ranks
from octavo.worker.config import Deterministic, WorkerConfig
from octavo.worker.loading.group import load_group
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.loader import load_torch
from octavo.worker.runners.oracle.model import OracleModel
from tests.support.model.checkpoints import QWEN3, tiny_config, write_tiny_checkpoint
from tests.support.model.packed_checkpoints import GPTQ_CONFIG, write_packed_checkpoint
from tests.support.model.ranks import on_ranks
from tests.support.worker.invariance import Limits, check
from tests.support.worker.scheduling import World, WorldConfig, key

needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler here")
LIMITS = Limits(
    num_blocks=120, block_size=4, max_slots=12, max_batch_tokens=48, max_model_len=64, vocab_size=301,
    num_prompt=30, num_output=8, crowd=9, chunk_sizes=(1, 7),
)  # fmt: skip
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 256}
PACKED = GPTQ_CONFIG | {"group_size": 32}
IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(9)).tolist()
CHUNKS = ([40], [1] * 40, [7] * 5 + [5], [33, 1, 6])


@contextmanager
def started(folder: Path, *, size: int = 2, **settings: Any) -> Iterator[Loaded]:
    """A worker's model on so many ranks; one rank is a worker of today."""
    config = WorkerConfig(
        model=str(folder), gateway_endpoints=(), num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size,
        max_num_seqs=LIMITS.max_slots, max_batch_tokens=LIMITS.max_batch_tokens, max_model_len=LIMITS.max_model_len,
        num_threads=1, tensor_parallel_size=size, **settings,
    )  # fmt: skip
    loaded = (load_torch if size == 1 else load_group)(config, lambda _stage, _done, _total: None)
    with closing(loaded.runner):  # type: ignore[type-var]
        yield loaded


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16, packed", "bfloat16, int8"])
def test_an_answer_of_two_ranks_does_not_depend_on_the_batch(kind: str, tmp_path: Path) -> None:
    dtype, _, how = kind.partition(", ")
    if how == "packed":
        write_packed_checkpoint(tmp_path / "model", PACKED, **QWEN3, **WIDE)  # type: ignore[arg-type]
    else:
        write_tiny_checkpoint(tmp_path / "model", **QWEN3, **WIDE)
    settings = {"quantization": "int8"} if how == "int8" else {}
    with started(tmp_path / "model", dtype=dtype, deterministic=Deterministic.ON, **settings) as loaded:
        assert loaded.device.endswith(", 2 ranks, deterministic")
        check(loaded.runner, LIMITS)


def bits_of_chunks(ranks: Ranks) -> list[Any]:
    """Logits of one prompt in chunks of all kinds, on ranks whose partial sums are very different."""
    config = ModelConfig.from_dict(tiny_config(**QWEN3 | WIDE))
    model = CausalLM(config, dtype=torch.bfloat16, ranks=ranks)
    generator = torch.Generator().manual_seed(1 + ranks.rank)
    for name, parameter in model.named_parameters():
        alike = torch.Generator().manual_seed(len(name)) if "norm" in name else generator
        parameter.data.copy_(torch.randn(parameter.shape, generator=alike) * (1 if "norm" in name else 0.3))
    make_invariant(model, max_positions=64)
    backend = get_backend("invariant")
    return [paged_logits(model, backend, IDS, lens) for lens in CHUNKS]


@needs_compiler
def test_bits_of_four_ranks_do_not_depend_on_chunks_and_are_the_same_on_every_rank(tmp_path: Path) -> None:
    first, *others = on_ranks(4, bits_of_chunks, tmp_path)
    for found in (first, *others):
        for logits_TV in found:
            assert torch.equal(torch.as_tensor(logits_TV), torch.as_tensor(first[0]))


def sums_by_rank(ranks: Ranks) -> torch.Tensor:
    """Of numbers whose sum depends on the order in which they are added."""
    ordered = Ranks(rank=ranks.rank, size=ranks.size, group=ranks.group, sums=Sums.BY_RANK)
    return ordered.sum(torch.tensor([[1.0, 1e8, -1e8, 1.0][ranks.rank]] * 3))


def test_ranks_are_added_in_their_order(tmp_path: Path) -> None:
    for found in on_ranks(4, sums_by_rank, tmp_path):
        assert found.tolist() == [1.0] * 3  # (1 + 1e8 - 1e8) is 0 in float32


def test_a_width_that_the_kernels_do_not_take_is_told_with_the_number_of_ranks() -> None:
    model = CausalLM(ModelConfig.from_dict(tiny_config(**QWEN3, intermediate_size=160)), ranks=Ranks(size=2))
    reason = r"sizes \(64, 80, 32\) of each of 2 ranks must be multiples of 32"
    if native_library() is None:
        reason = "needs kernels"
    with pytest.raises(InvarianceUnavailable, match=reason):
        make_invariant(model, max_positions=16)


def scored(loaded: Loaded) -> list[float]:
    """Log-probabilities of a prompt's tokens, in chunks beside other requests."""
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(WorldConfig, "runner", lambda _self: loaded.runner)
        world = World(
            WorldConfig(
                num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, max_num_seqs=LIMITS.max_slots,
                max_batch_tokens=LIMITS.max_batch_tokens, max_model_len=LIMITS.max_model_len,
                model=OracleModel(vocab_size=LIMITS.vocab_size, eos_token_ids=()),
            )
        )  # fmt: skip
        for handle in range(4):
            world.add(handle, IDS[handle:], max_tokens=6, temperature=0.0, num_prompt_logprobs=1)
        world.run()
        world.check_quiet()
    found = [each.logprob for each in world.streams[key(0)].prompt_logprobs]
    assert len(found) == len(IDS) - 1
    return found


@needs_compiler
def test_weights_and_cache_of_8_bits_are_chosen_at_the_start_as_on_one_rank(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", **WIDE)
    few_bits = {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "fp8"}
    with started(tmp_path / "model", size=1, dtype="float32") as exact:
        wanted = scored(exact)
    found = {}
    for size in (1, 2):
        with started(tmp_path / "model", size=size, **few_bits) as loaded:
            assert loaded.device.startswith("cpu, int8 weights, fp8 cache")
            found[size] = scored(loaded)
    error = {size: sum(abs(a - b) for a, b in zip(each, wanted, strict=True)) for size, each in found.items()}
    assert 0 < error[2] < 2 * error[1]


def test_a_packed_checkpoint_is_served_by_two_ranks(tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path / "model", PACKED, **WIDE)  # type: ignore[arg-type]
    scores = []
    for size in (1, 2):
        with started(tmp_path / "model", size=size, dtype="float32") as loaded:
            assert loaded.device.startswith("cpu, int4 weights (gptq)")
            scores.append(scored(loaded))
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_a_packed_checkpoint_whose_groups_do_not_divide_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_packed_checkpoint(tmp_path / "model", GPTQ_CONFIG | {"group_size": 64})
    reason = "tensor_parallel_size 2 does not fit the model: config.json: quantization_config.group_size: groups of 64"
    with pytest.raises(ValueError, match=reason), started(tmp_path / "model"):
        pass


def test_sums_of_a_group_stay_as_the_library_likes_them_without_the_mode(tmp_path: Path) -> None:
    with join_ranks(tmp_path / "meeting", rank=0, size=1) as ranks:
        assert CausalLM(ModelConfig.from_dict(tiny_config()), ranks=ranks).ranks.sums is Sums.FAST
