"""Blocks on two tiers on a real device: streams that wait for each other by events alone, steps from graphs, and the
same bits in deterministic mode."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.attention.host_blocks import HostBlocks, gather_rows
from octavo.model.attention.kv_pool import KvPool, kv_block_bytes
from octavo.model.gpu.weights import GpuWeights
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig, Launching
from octavo.worker.runners.cuda.host_copies import HostCopies
from octavo.worker.runners.cuda.runner import CudaRunner
from octavo.worker.runners.oracle.model import OracleModel
from tests.support.worker.cuda_runners import SAMPLING, VOCAB, WIDE, random_model, runner_pair, world
from tests.support.worker.host_traffic import drive
from tests.support.worker.scheduling import World, WorldConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_hundreds_of_plans_that_nobody_waits_for_move_every_byte(dtype: torch.dtype) -> None:
    """Beside work that keeps the steps' stream behind. What each block holds is known by a model on the host."""
    num_blocks, num_host, row_bytes = 64, 200, kv_block_bytes(WIDE, block_size=16, dtype=dtype)
    kv = KvPool(WIDE, num_blocks, 16, dtype, "cuda")
    for pool in (kv.k_pool_LPKBH, kv.v_pool_LPKBH):
        pool.view(torch.uint8).random_(0, 255)
    content = [*gather_rows(kv, torch.arange(num_blocks, device="cuda")).cpu()]
    host = HostBlocks(num_host, row_bytes, is_pinned=True, part_bytes=33 * row_bytes)
    moved, on_host, rng = HostCopies(kv, host, rows=24), {}, np.random.default_rng(0)
    load = torch.randn(2048, 2048, device="cuda")
    arriving: list[tuple[int, torch.Tensor]] = []
    for _ in range(300):
        load = torch.tanh(load @ load)
        for block, row in arriving:
            content[block] = row
        outs = list(
            zip(rng.permutation(num_blocks)[:30].tolist(), rng.permutation(num_host)[:30].tolist(), strict=True)
        )
        on_host |= {place: content[block] for block, place in outs}
        known = rng.permutation(list(on_host))[:24].tolist()
        ins = list(zip(known, rng.permutation(num_blocks)[: len(known)].tolist(), strict=True))
        moved.begin(np.array(outs, np.int32), np.array(ins, np.int32))
        arriving = [(block, on_host[place]) for place, block in ins]
    moved.begin(np.empty((0, 2), np.int32), np.empty((0, 2), np.int32))
    moved.wait()
    for block, row in arriving:
        content[block] = row
    assert torch.equal(gather_rows(kv, torch.arange(num_blocks, device="cuda")).cpu(), torch.stack(content))
    places = sorted(on_host)
    assert torch.equal(host.get(np.array(places)), torch.stack([on_host[place] for place in places]))
    num_copied, seconds = moved.take_times()
    assert num_copied == 300 * (30 + 24)
    assert seconds > 0


def test_recorded_steps_over_two_tiers_serve_the_tokens_of_the_torch_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_blocks": 14, "num_host_blocks": 80, "max_copies_in": 3}
    here = world(runner_pair(launching=Launching.GRAPHS, **sizes), monkeypatch, **sizes)
    rng = np.random.default_rng(0)
    openings = [rng.integers(0, VOCAB, 17).tolist() for _ in range(4)]
    for handle in range(24):
        ids = openings[handle % 4] + rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
        here.add(handle, ids, max_tokens=int(rng.integers(3, 14)), ignore_eos=True, **SAMPLING[handle % len(SAMPLING)])
        for _ in range(5):
            here.step()
        if handle % 3 == 2 and (running := here.scheduler.requests.running):
            while here.plans:
                here.collect()
            here.scheduler.requests.preempt(running[-1], here.now_s)
    here.run()
    here.check_quiet()
    assert all(stream.finished and not stream.finished.error for stream in here.streams.values())
    assert here.scheduler.counters.num_swaps > 0
    assert here.blocks.host.num_copied_in > 20


@pytest.mark.parametrize("seed", range(3))
def test_deterministic_mode_gives_the_same_bits_over_two_tiers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any traffic over a small pool, against a pool that never evicts; bf16 and weights that amplify every bit."""
    small = _deterministic_world(monkeypatch, num_blocks=14, num_host_blocks=60, max_copies_in=2)
    drive(small, seed, num_events=90, vocab_size=VOCAB)
    assert small.blocks.host.num_copied_in > 0
    ample = _deterministic_world(monkeypatch, num_blocks=400, num_host_blocks=0)
    for which, asked in small.asked.items():
        sampling: dict[str, Any] = {
            "temperature": asked.sampling.temperature, "max_tokens": asked.sampling.max_tokens,
            "seed": asked.sampling.seed,
        }  # fmt: skip
        ample.add(which.handle, asked.prompt_ids_T.tolist(), **sampling)
        ample.run()
        got, wanted = small.streams[which].tokens, ample.streams[which].tokens
        is_whole = small.streams[which].finished.reason.name == "LENGTH"  # type: ignore[union-attr]
        assert got == (wanted if is_whole else wanted[: len(got)]), which


def _deterministic_world(
    monkeypatch: pytest.MonkeyPatch, *, num_blocks: int, num_host_blocks: int, max_copies_in: int = 64
) -> World:
    weights = GpuWeights.take(random_model(WIDE, torch.bfloat16), max_positions=64)
    config = CudaRunnerConfig(
        num_blocks=num_blocks, block_size=4, max_slots=4, max_model_len=48, vocab_size=VOCAB, max_batch_tokens=20,
        deterministic=Deterministic.ON, max_copies_in=max_copies_in,
    )  # fmt: skip
    row_bytes = kv_block_bytes(WIDE, block_size=4, dtype=torch.bfloat16)
    host = HostBlocks(num_host_blocks, row_bytes, is_pinned=True, part_bytes=9 * row_bytes)
    runner = CudaRunner(weights, config, host_blocks=host if num_host_blocks else None)
    runner.record()
    monkeypatch.setattr(WorldConfig, "runner", lambda self: runner)
    limits = WorldConfig(
        num_blocks=num_blocks, num_host_blocks=num_host_blocks, max_copies_in=max_copies_in, block_size=4,
        max_num_seqs=4, max_batch_tokens=20, max_model_len=48, max_in_flight=2,
        model=OracleModel(vocab_size=VOCAB, eos_token_ids=()),
    )  # fmt: skip
    return World(limits)
