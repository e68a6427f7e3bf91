"""Sizing of the KV pool: whole decisions, and errors whose advice holds."""

import ctypes
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.model.attention.kv_pool import KvPool
from octavo.model.parallel import ALONE
from octavo.worker.config import WorkerConfig
from octavo.worker.loading import loader, memory
from octavo.worker.loading.loader import prepare
from octavo.worker.loading.memory import (
    GIB,
    DoesNotFit,
    MemoryNeeds,
    available_host_bytes,
    is_small,
    size_pool,
    total_host_bytes,
)
from tests.support.model.checkpoints import write_tiny_checkpoint

NEEDS = MemoryNeeds(
    available_bytes=8 * GIB,
    weights_bytes=2 * GIB,
    activation_bytes=GIB,
    reserve_bytes=GIB // 2,
    block_bytes=1 << 20,
    block_size=16,
    max_model_len=4096,
    max_num_seqs=256,
    memory_fraction=0.8,
)


def test_blocks_take_what_the_budget_leaves() -> None:
    assert size_pool(NEEDS) == int(0.8 * 10 * 1024) - 3 * 1024 - 512


def test_no_more_blocks_than_all_requests_together_could_fill() -> None:
    assert size_pool(replace(NEEDS, max_num_seqs=3)) == 3 * 256


def test_the_number_that_was_asked_for_is_taken_as_it_is() -> None:
    assert size_pool(NEEDS, num_blocks=7) == 7


def test_a_request_that_does_not_fit_is_refused_in_three_lines() -> None:
    with pytest.raises(DoesNotFit) as error:
        size_pool(replace(NEEDS, available_bytes=3 * GIB, max_model_len=16384))
    assert str(error.value).splitlines() == [
        "the KV cache of one request of 16384 tokens (1.00 GiB) does not fit in memory",
        "weights 2.00 GiB + activations 1.00 GiB + reserve 0.50 GiB leave 0.50 GiB of the budget 4.00 GiB "
        "(0.8 of 5.00 GiB free); need 0.50 GiB more",
        "try --memory-fraction 0.90 or --max-model-len 8192",
    ]


def test_a_small_pool_takes_an_eighth_of_what_is_free_at_most() -> None:
    assert is_small(NEEDS, 1024)
    assert not is_small(NEEDS, 1025)


@pytest.mark.parametrize(("share", "touched"), [(1.0, []), (0.0, [24])])
def test_a_pool_that_is_not_small_takes_its_memory_at_the_start(
    share: float, touched: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(memory, "SMALL_SHARE", share)
    monkeypatch.setattr(KvPool, "touch", lambda kv: told.append(kv.num_blocks))
    model = str(write_tiny_checkpoint(tmp_path))
    prepare(WorkerConfig(model=model, gateway_endpoints=(), device="cpu", num_blocks=24), lambda *_: None, ranks=ALONE)
    assert told == touched


@given(
    available=st.integers(0, 16 * GIB),
    weights=st.integers(1, 8 * GIB),
    fraction=st.floats(0.1, 0.95),
    max_model_len=st.integers(1, 131072),
)
def test_the_pool_stays_in_its_budget_and_the_advice_holds(
    available: int, weights: int, fraction: float, max_model_len: int
) -> None:
    needs = replace(
        NEEDS,
        available_bytes=available,
        weights_bytes=weights,
        memory_fraction=fraction,
        max_model_len=max_model_len,
    )
    num_blocks = size_or_refusal(needs)
    if isinstance(num_blocks, DoesNotFit):
        assert len(str(num_blocks).splitlines()) == 3
        for advised in advised_changes(needs, num_blocks.change):
            assert size_pool(advised) >= advised.blocks_per_request
    else:
        assert num_blocks >= needs.blocks_per_request
        assert num_blocks * needs.block_bytes + needs.fixed_bytes <= needs.budget_bytes


def size_or_refusal(needs: MemoryNeeds) -> int | DoesNotFit:
    try:
        return size_pool(needs)
    except DoesNotFit as error:
        return error


def advised_changes(needs: MemoryNeeds, change: str) -> list[MemoryNeeds]:
    changes = []
    if found := re.search(r"--memory-fraction ([0-9.]+)", change):
        changes.append(replace(needs, memory_fraction=float(found.group(1))))
    if found := re.search(r"--max-model-len (\d+)", change):
        changes.append(replace(needs, max_model_len=int(found.group(1))))
    return changes


@pytest.mark.parametrize("num_blocks", [0, -1, 8 * 1024])
def test_a_number_of_blocks_that_cannot_be_is_refused_in_three_lines(num_blocks: int) -> None:
    with pytest.raises(DoesNotFit) as error:
        size_pool(NEEDS, num_blocks=num_blocks)
    assert len(str(error.value).splitlines()) == 3
    if num_blocks > 0:
        assert error.value.change == "try --num-blocks 7168, or leave it out"


def test_a_step_that_leaves_no_room_for_a_block_is_told_as_such_and_not_as_a_number_of_blocks() -> None:
    with pytest.raises(DoesNotFit, match=r"the largest step .* does not fit beside the weights") as error:
        size_pool(replace(NEEDS, activation_bytes=NEEDS.available_bytes), num_blocks=256)
    assert error.value.change == "try a smaller --max-batch-tokens or --max-num-seqs, or a smaller model"


def test_blocks_beyond_all_memory_are_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "load_model", None)
    config = WorkerConfig(
        model=str(write_tiny_checkpoint(tmp_path)), gateway_endpoints=("ipc:///a",), device="cpu", num_blocks=2**26
    )
    with pytest.raises(DoesNotFit, match=r"^67108864 KV blocks of 16 tokens .* do not fit in memory") as error:
        prepare(config, lambda *progress: None)
    assert "for weights as well" in error.value.numbers
    assert "--num-blocks, or leave it out" in error.value.change


def test_all_memory_is_that_of_the_container(tmp_path: Path) -> None:
    assert total_host_bytes(tmp_path) > 1 << 24
    (tmp_path / "memory.max").write_text("1000000\n")
    assert total_host_bytes(tmp_path) == 1_000_000


def test_a_container_limit_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert available_host_bytes(tmp_path) == 400_000


@pytest.mark.parametrize("limit", ["max\n", None])
def test_without_a_container_limit_the_host_decides(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("5")
    assert available_host_bytes(tmp_path) > 1 << 24


def test_a_limit_of_the_first_version_of_cgroups_counts_too(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000000\n")
    (folder / "memory.usage_in_bytes").write_text("700000\n")
    (folder / "memory.stat").write_text("inactive_file 5\ntotal_inactive_file 100000\n")
    assert available_host_bytes(tmp_path) == 400_000
    (folder / "memory.limit_in_bytes").write_text(f"{0x7FFFFFFFFFFFF000}\n")  # none
    assert available_host_bytes(tmp_path) > 1 << 24


_FAULTS_OF_A_TENSOR = """
import resource, torch
from octavo.worker.loading.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(min(faults() for _ in range(6)))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_memory_that_a_step_freed_is_there_for_the_next() -> None:
    done = subprocess.run([sys.executable, "-c", _FAULTS_OF_A_TENSOR], capture_output=True, text=True, check=True)
    # Given back and had again they are 20 huge pages, or 9,766 small ones. What lies in the room of the one
    # before moves the next one, once.
    assert int(done.stdout) < 10
