"""Copies between the tiers by the CUDA runner, kernel by kernel on a GPU or in Triton's interpreter: every step as the
torch runner's, bytes as they were, staging smaller than what is to be copied."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.attention.host_blocks import HostBlocks, gather_rows
from octavo.model.attention.kv_pool import KvPool, kv_block_bytes
from octavo.worker.runners.cuda.host_copies import HostCopies, staging_bytes, staging_rows
from tests.support.model.interpreter import WARNINGS
from tests.support.worker.cuda_runners import CONFIG, DEVICE, SAMPLING, VOCAB, runner_pair, world

pytestmark = [*WARNINGS, pytest.mark.usefixtures("few_items")]
NONE = np.empty((0, 2), np.int32)


def pairs(*wanted: tuple[int, int]) -> np.ndarray:
    return np.array(wanted, np.int32)


def copies(rows: int) -> tuple[KvPool, HostCopies]:
    kv = KvPool(CONFIG, 12, 4, torch.bfloat16, DEVICE)
    for pool in (kv.k_pool_LPKBH, kv.v_pool_LPKBH):
        plain = pool.view(torch.uint8)
        plain.copy_(torch.randint(0, 255, plain.shape, dtype=torch.uint8))
    row_bytes = kv_block_bytes(CONFIG, block_size=4, dtype=torch.bfloat16)
    host = HostBlocks(9, row_bytes, is_pinned=DEVICE == "cuda", part_bytes=4 * row_bytes)
    return kv, HostCopies(kv, host, rows=rows)


def test_what_goes_out_in_several_rounds_comes_back_before_the_next_step() -> None:
    kv, moved = copies(rows=2)
    before = gather_rows(kv, torch.arange(12, device=DEVICE)).clone()
    moved.begin(pairs((5, 7), (1, 2), (9, 8), (0, 3), (11, 0)), NONE)  # in three rounds
    kv.k_pool_LPKBH.view(torch.uint8)[:, [5, 1, 9, 0, 11]] = 0  # their new owner's
    moved.begin(NONE, pairs((7, 1), (3, 5)))
    moved.begin(pairs((2, 7)), pairs((8, 0)))  # what came back arrives, host block 7 is another's
    moved.begin(NONE, NONE)
    moved.wait()
    after = gather_rows(kv, torch.arange(12, device=DEVICE))
    assert torch.equal(after[[1, 5, 0]], before[[5, 0, 9]])
    assert torch.equal(moved.host.get(np.array([7, 2, 0])), before[[2, 1, 11]].cpu())
    num_blocks, seconds = moved.take_times()
    assert num_blocks == 5 + 2 + 1 + 1
    assert seconds > 0
    assert moved.take_times() == (0, 0.0)


def test_a_block_that_went_out_can_come_back_in_the_same_plan() -> None:
    kv, moved = copies(rows=4)
    before = gather_rows(kv, torch.arange(12, device=DEVICE)).clone()
    moved.begin(pairs((5, 7), (6, 2)), pairs((7, 6), (2, 5)))
    moved.begin(NONE, NONE)
    moved.wait()
    assert torch.equal(gather_rows(kv, torch.tensor([6, 5], device=DEVICE)), before[[5, 6]])


def test_more_than_a_buffer_holds_is_refused() -> None:
    _, moved = copies(rows=2)
    with pytest.raises(ValueError, match="3 blocks"):
        moved.begin(NONE, pairs((0, 0), (1, 1), (2, 2)))


def test_the_rate_is_measured_and_staging_is_bounded() -> None:
    _, moved = copies(rows=2)
    assert 0 < moved.measure(12) < 5
    assert staging_rows(1 << 20, 80 << 30) == 128
    assert staging_rows(1 << 20, 8 << 30) == 64
    assert staging_rows(1 << 10, 80 << 30) == 256
    assert staging_rows(1 << 30, 1 << 30) == 1
    assert staging_bytes(128, 1 << 20) == 512 << 20


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_served_requests_get_the_tokens_of_the_torch_runner_over_two_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_blocks": 12, "num_host_blocks": 40, "max_copies_in": 2}
    here = world(runner_pair(**sizes), monkeypatch, **sizes)
    # With some prompts log-probabilities depend on the instructions that sum: the torch runner's own by 0.017 with 0's.
    rng = np.random.default_rng(2)
    openings = [rng.integers(0, VOCAB, 13).tolist() for _ in range(3)]
    for handle in range(9):
        ids = openings[handle % 3] + rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()
        here.add(handle, ids, max_tokens=int(rng.integers(3, 7)), ignore_eos=True, **SAMPLING[handle % len(SAMPLING)])
        for _ in range(4):
            here.step()
        if handle % 4 == 3 and (running := here.scheduler.requests.running):
            while here.plans:
                here.collect()
            here.scheduler.requests.preempt(running[-1], here.now_s)
    here.run()
    here.check_quiet()
    assert all(stream.finished and not stream.finished.error for stream in here.streams.values())
    assert here.scheduler.counters.num_swaps > 0
    assert here.blocks.host.num_copied_in > 10
