"""The processes of a worker with several ranks end together, however one of them ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from octavo.wire.messages import SamplingParams
from octavo.worker.config import CurveConfig, WorkerConfig
from octavo.worker.loading import group
from octavo.worker.loading.group import load_group
from octavo.worker.loading.loaded import Loaded
from octavo.worker.runners.group import EXIT_LOST, GroupLost
from octavo.worker.runners.interface import Runner
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepPlan
from tests.support.children import live_children
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.services.service import wait_for

LONG_S = 100.0


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Loaded]:
    config = WorkerConfig(
        model=str(write_tiny_checkpoint(tmp_path / "model")), gateway_endpoints=(), num_blocks=64, num_threads=1,
        max_num_seqs=4, max_batch_tokens=16, max_model_len=48, tensor_parallel_size=2,
    )  # fmt: skip
    loaded = load_group(config, lambda _stage, _done, _total: None)
    yield loaded
    loaded.runner.close()
    loaded.runner.close()
    assert followers() == []


def followers() -> list[psutil.Process]:
    """Children of this process that are ranks."""
    return live_children("octavo.worker.loading.group")


def step(runner: Runner) -> None:
    """A prompt of five tokens."""
    join = NewRequest(
        slot=Slot(0), request_id="x", token_ids_T=np.arange(5, dtype=np.int32), num_prompt_tokens=5,
        sampling=SamplingParams(temperature=0.0),
    )  # fmt: skip
    chunk = Chunk(slot=Slot(0), start=0, num_tokens=5, is_last=True)
    updates = np.array([[0, 0, 1]], np.int32)
    runner.launch(StepPlan(step=1, new_requests=(join,), block_updates_U3=updates, prefill=(chunk,)))
    runner.collect()


def test_signals_are_the_business_of_rank_0(loaded: Loaded) -> None:
    (follower,) = followers()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(follower.pid, number)
    step(loaded.runner)
    step(loaded.runner)
    assert follower.is_running()


def test_a_follower_that_is_killed_between_steps_ends_the_group(loaded: Loaded) -> None:
    (follower,) = followers()
    step(loaded.runner)
    follower.kill()
    with pytest.raises(GroupLost, match=r"rank 1 of 2 ended with status -9; its log says why"):
        step(loaded.runner)


@pytest.mark.parametrize("has_device_sums", [True, False], ids=["on GPUs", "on CPUs"])
def test_rank_0_ends_where_there_is_no_step_or_a_sum_of_a_gpu_does_not_let_it_out(
    has_device_sums: bool, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else notices between requests, and a sum on a GPU waits for its peers forever."""
    statuses, ended = list[int](), threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(group.os, "_exit", end)
    monkeypatch.setattr(group, "has_device_sums", lambda ranks: has_device_sums)
    monkeypatch.setattr(group, "abort", lambda ranks: None)
    monkeypatch.setattr(group, "LOST_EXIT_S", 0.05)
    (follower,) = followers()
    follower.kill()
    assert ended.wait(60)
    assert statuses == [EXIT_LOST]


def test_followers_are_told_nothing_of_gateways(tmp_path: Path) -> None:
    """Endpoints in a file, as on a cluster, and keys: they go to rank 0 alone, and could not be sent."""
    config = WorkerConfig(
        model=str(write_tiny_checkpoint(tmp_path / "model")), gateway_endpoints=(), num_blocks=64, num_threads=1,
        gateway_endpoints_file=tmp_path / "gateways", registration_token="a word",
        curve=CurveConfig(secret_key_file=tmp_path / "a", gateway_public_key_file=tmp_path / "b"),
        max_num_seqs=4, max_batch_tokens=16, max_model_len=48, tensor_parallel_size=2,
    )  # fmt: skip
    loaded = load_group(config, lambda _stage, _done, _total: None)
    try:
        step(loaded.runner)
    finally:
        loaded.runner.close()


START = """import sys
from octavo.worker.config import WorkerConfig
from octavo.worker.loading.group import load_group
load_group(
    WorkerConfig(model=sys.argv[1], gateway_endpoints=(), device="cpu", tensor_parallel_size=4, num_threads=1),
    lambda *_: None,
)
"""


def test_a_follower_that_ends_before_all_have_met_ends_the_start(tmp_path: Path) -> None:
    """It is killed before it has loaded torch; the others would wait for it for two minutes."""
    folder = str(write_tiny_checkpoint(tmp_path / "model", num_key_value_heads=4))
    with (tmp_path / "log").open("wb") as log:
        start = subprocess.Popen([sys.executable, "-c", START, folder], stdout=log, stderr=log)
    ranks: list[psutil.Process] = []

    def are_there() -> bool:
        assert start.poll() is None, (tmp_path / "log").read_text()
        ranks[:] = psutil.Process(start.pid).children()
        return len(ranks) == 3

    wait_for(are_there)
    ranks[1].kill()
    assert start.wait(LONG_S) == EXIT_LOST
    assert (
        "of 4 ended with status -9; its log says why, and rank 0 waits for it to come" in (tmp_path / "log").read_text()
    )
    _, alive = psutil.wait_procs(ranks, timeout=LONG_S)
    assert alive == []


def test_a_start_that_is_given_up_waits_for_nobody_who_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SIGTERM does to it. The follower waits for a sum, or reads weights for minutes."""

    def asked(*_: object, **__: object) -> Loaded:
        sys.exit(0)

    monkeypatch.setattr(group, "load_torch", asked)
    monkeypatch.setattr(group, "END_TIMEOUT_S", LONG_S)
    config = WorkerConfig(
        model=str(write_tiny_checkpoint(tmp_path / "model")), gateway_endpoints=(), num_threads=1,
        tensor_parallel_size=2,
    )  # fmt: skip
    start_s = time.monotonic()
    with pytest.raises(SystemExit):
        load_group(config, lambda _stage, _done, _total: None)
    assert time.monotonic() - start_s < LONG_S
    assert followers() == []


def test_a_follower_complains_of_nothing_where_rank_0_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = group.Task(
        config=WorkerConfig(model="m", gateway_endpoints=(), tensor_parallel_size=2), rank=1, parent=1, meeting="",
        board="",
    )  # fmt: skip
    own, theirs = os.pipe()
    with os.fdopen(own) as orders:
        monkeypatch.setattr(sys, "stdin", orders)
        assert group._status(task, RuntimeError("no sum")) == 1
        assert "follower_failed" in capsys.readouterr().out
        os.close(theirs)
        assert group._status(task, RuntimeError("Connection closed by peer")) == 0
        assert "follower_failed" not in capsys.readouterr().out


IDLE = """import subprocess
from functools import partial
from octavo.worker.loading import group
group.join_ranks = partial(group.join_ranks, timeout_s=0.2)
group.FollowerProcesses._start = lambda *_: subprocess.Popen(
    [sys.executable, "-c", "import sys; sys.stdin.buffer.read()"], stdin=subprocess.PIPE
)
"""


def test_ranks_that_do_not_come_in_time_are_told_as_such(tmp_path: Path) -> None:
    """In a process of its own: torch does not meet again where it has met nobody."""
    folder = str(write_tiny_checkpoint(tmp_path / "model", num_key_value_heads=4))
    start = [sys.executable, "-c", "import sys\n" + IDLE + START, folder]
    done = subprocess.run(start, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert "GroupLost: the other ranks of 4 have not come in 120 s, and none has ended" in done.stderr


def test_a_follower_that_is_killed_in_a_step_ends_the_group(loaded: Loaded) -> None:
    """It stands still when the step begins, so that rank 0 waits for its sums."""
    (follower,) = followers()
    follower.suspend()
    os.kill(follower.pid, signal.SIGKILL)
    with pytest.raises(GroupLost, match="rank 1 of 2 ended with status -9"):
        step(loaded.runner)
