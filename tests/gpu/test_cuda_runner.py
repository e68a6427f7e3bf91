"""The CUDA runner with recorded steps on a real device: against the torch runner, under errors, over many steps."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.worker.runners.cuda.graph_runner import Launching
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.scheduler.plan import StepPlan
from tests.support.worker.cuda_runners import SAMPLING, WIDE, Hand, prompt, runner_pair, world
from tests.support.worker.hand_plans import chunk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("num_blocks", [11, 64])
def test_recorded_steps_serve_the_tokens_of_the_torch_runner(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(runner_pair(num_blocks=num_blocks, launching=Launching.GRAPHS), monkeypatch, num_blocks=num_blocks)
    serve(here, count=24, longest_prompt=30, most_tokens=16)
    assert (here.scheduler.counters.num_preemptions > 0) == (num_blocks == 11)


def test_many_rows_of_real_heads_over_a_pool_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_blocks": 300, "max_slots": 20, "max_model_len": 400, "max_batch_tokens": 96}
    runner = runner_pair(WIDE, launching=Launching.GRAPHS, **sizes)
    here = world(runner, monkeypatch, **sizes)
    serve(here, count=40, longest_prompt=200, most_tokens=60)
    assert here.scheduler.counters.num_preemptions > 0


def serve(here: object, *, count: int, longest_prompt: int, most_tokens: int) -> None:
    """Requests with all sampling parameters, some with shared beginnings; every step is compared."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 120, longest_prompt // 2).tolist()
    for handle in range(count):
        ids = (
            shared[: rng.integers(1, len(shared))] + rng.integers(0, 120, rng.integers(1, longest_prompt // 2)).tolist()
        )
        sampling = SAMPLING[handle % len(SAMPLING)]
        here.add(handle, ids, max_tokens=int(rng.integers(3, most_tokens)), ignore_eos=True, **sampling)  # type: ignore[attr-defined]
    here.run()  # type: ignore[attr-defined]
    here.check_quiet()  # type: ignore[attr-defined]
    assert all(stream.finished and not stream.finished.error for stream in here.streams.values())  # type: ignore[attr-defined]


def test_a_step_without_memory_is_that_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(runner_pair(launching=Launching.GRAPHS))
    hand.join(0, prompt(0, 5))
    hand.step(prefill=(chunk(0, 0, 5),))
    fast = hand.runner.fast

    def fail(layout: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(fast.graphs, "run_mixed", fail)  # type: ignore[attr-defined]
        with pytest.raises(RunnerOutOfMemory):
            fast.launch(StepPlan(step=9, prefill=(chunk(0, 0, 4),)))
    with pytest.raises(RunnerError, match="no block"):
        fast.launch(StepPlan(step=9, prefill=(chunk(1, 0, 4),)))
    hand.step(decode={0: 5})
    hand.step(decode={0: 6})


@pytest.mark.alone
def test_memory_stays_where_it_was_after_many_steps() -> None:
    hand = Hand(runner_pair(launching=Launching.GRAPHS))

    def work(rounds: int) -> None:
        for seed in range(rounds):
            hand.free += [block for table in hand.tables.values() for block in table]
            hand.join(0, prompt(seed, 9), temperature=0.5, seed=seed)
            hand.join(1, prompt(seed, 9), temperature=0.5, seed=seed, top_k=5)
            hand.step(prefill=(chunk(0, 0, 9), chunk(1, 0, 9)))
            for position in range(9, 20):
                hand.step(decode={0: position, 1: position})

    work(3)
    before = torch.cuda.mem_get_info()[0]
    work(20)
    assert torch.cuda.mem_get_info()[0] == before


LOST = """
import numpy as np, torch
from tests.support.worker.cuda_runners import Hand, prompt, runner_pair
from tests.support.worker.hand_plans import chunk
from octavo.worker.runners.cuda.runner import DeviceLost
from octavo.worker.runners.cuda.graph_runner import Launching
hand = Hand(runner_pair(launching=Launching.GRAPHS))
hand.join(0, prompt(0, 5))
hand.step(prefill=(chunk(0, 0, 5),))
hand.runner.fast._rows.put_blocks(np.asarray([[0, 0, 2**30]], np.int32))
fast = hand.runner.fast
try:
    for step in range(3):
        fast.launch(type(hand).bare(step, {0: 5 + step}))
        fast.collect()
except DeviceLost as error:
    print("LOST", error)
fast.close()
"""


def test_an_illegal_access_ends_the_process_and_not_the_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert "LOST" in done.stdout, done.stderr
