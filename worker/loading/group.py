"""A worker that is a tensor-parallel group: how its processes start, load and end together.

Rank 0 is the worker itself. It starts the others as `python -m octavo.worker.loading.group`, writes them their settings
and then each step's orders (worker/runners/group.py) to standard input, and all of them load at once, each its part of
the model. A follower ends when its input does; one that ends before makes rank 0 end, and the supervisor starts all
anew. Followers ignore signals: they would drain nothing.

Must not know: the scheduler, sockets to gateways.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import structlog
import torch

from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.config import load_config
from octavo.model.errors import ConfigError
from octavo.model.parallel import config_of_rank, join_ranks
from octavo.wire.host import die_with
from octavo.wire.logs import configure_logs
from octavo.worker.config import RunnerKind, WorkerConfig
from octavo.worker.loading.agreement import build_name, check_agreement, checkpoint_name
from octavo.worker.loading.loaded import Loaded, served_name
from octavo.worker.loading.loader import load_torch, prepare
from octavo.worker.loading.progress import OnProgress
from octavo.worker.runners.group import LOST_WAIT_S, GroupLost, GroupRunner, follow, read_frame, write_frame

log = structlog.get_logger(__name__)

END_TIMEOUT_S = 10.0
"""For a follower to end after its input has."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a follower is told first. parent: rank 0's pid. meeting: see `join_ranks`."""

    config: WorkerConfig
    rank: int
    parent: int
    meeting: str


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Task)


class FollowerProcesses:
    """Ranks 1 and up of a group, started by rank 0. Implements `worker.runners.group.Followers`."""

    def __init__(self, config: WorkerConfig, meeting: Path) -> None:
        self._processes = [
            subprocess.Popen([sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, start_new_session=True)
            for _ in range(1, config.tensor_parallel_size)
        ]
        told = replace(config, gateway_endpoints=(), registration_token="", curve=None)
        for rank in range(1, config.tensor_parallel_size):
            self._write(rank, _ENCODER.encode(Task(config=told, rank=rank, parent=os.getpid(), meeting=str(meeting))))

    def send(self, frame: bytes) -> None:
        """See Followers."""
        for rank in range(1, len(self._processes) + 1):
            self._write(rank, frame)

    def check(self, *, wait_s: float) -> None:
        """See Followers."""
        for rank, process in enumerate(self._processes, start=1):
            try:
                status = process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
            raise GroupLost(f"rank {rank} of {len(self._processes) + 1} ended with status {status}; its log says why")

    def close(self) -> None:
        """End all of them. Idempotent."""
        for process in self._processes:
            with suppress(OSError):  # what it did not read is lost with it
                cast(BinaryIO, process.stdin).close()
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write(self, rank: int, frame: bytes) -> None:
        try:
            write_frame(cast(BinaryIO, self._processes[rank - 1].stdin), frame)
        except OSError:
            self.check(wait_s=END_TIMEOUT_S)
            raise


def load_group(config: WorkerConfig, on_progress: OnProgress) -> Loaded:
    """`load_torch` of a worker with any number of ranks, of which this process is rank 0. The runner's `close` ends the
    others. Raises what `load_torch` raises, RanksDiffer, and GroupLost where a follower ends on the way."""
    if config.tensor_parallel_size == 1:
        return load_torch(config, on_progress)
    check_group(config)
    build = build_name()
    folder = resolve_checkpoint(
        config.model,
        revision=config.revision,
        on_progress=lambda done, total: on_progress("downloading", done, total),
    )
    check_cut(folder, config.tensor_parallel_size)
    config = replace(config, served_name=config.served_name or served_name(config.model), model=str(folder))
    ending = ExitStack()
    with ExitStack() as stack:
        meeting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-ranks-"))) / "meeting"
        followers = FollowerProcesses(config, meeting)
        stack.callback(followers.close)
        try:
            ranks = stack.enter_context(join_ranks(meeting, rank=0, size=config.tensor_parallel_size))
            check_agreement(ranks, build=build, checkpoint=checkpoint_name(folder))
            loaded = load_torch(
                config,
                on_progress,
                ranks=ranks,
                wrap=lambda runner: GroupRunner(runner, followers, close=ending.close),
            )
        except RuntimeError:  # of a sum whose other end is gone
            followers.check(wait_s=LOST_WAIT_S)
            raise
        ending.enter_context(stack.pop_all())
    return replace(loaded, notes=loaded.notes + notes_on_cores(config.tensor_parallel_size))


def check_group(config: WorkerConfig) -> None:
    """Raises ValueError for what a group cannot be had together with."""
    size = config.tensor_parallel_size
    if config.runner is RunnerKind.ORACLE:
        raise ValueError(f"tensor_parallel_size {size} is for models: the oracle has nothing to cut")
    if torch.device(config.device).type != "cpu":
        raise ValueError(f"tensor_parallel_size {size} is served on CPUs so far, and the device is {config.device}")


def notes_on_cores(size: int) -> tuple[str, ...]:
    """What an operator should know of ranks on CPUs, in a sentence."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if size <= cores:
        return ()
    return (f"{size} tensor-parallel ranks share {cores} cores: steps wait for each other, fewer ranks are faster",)


def check_cut(folder: Path, size: int) -> None:
    """Raises ValueError where the checkpoint cannot be cut into so many parts."""
    model_config = load_config(folder)
    try:
        config_of_rank(model_config, size)
    except ConfigError as error:
        raise ValueError(f"tensor_parallel_size {size} does not fit the model: {error}") from error


def main() -> int:
    """A follower. Returns 0 where rank 0 has ended, 1 where something failed here."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    frame = read_frame(sys.stdin.buffer)
    if frame is None:
        return 0
    task = _DECODER.decode(frame)
    die_with(task.parent)  # also where it stands still and does not see its input end
    config, size = task.config, task.config.tensor_parallel_size
    configure_logs(config.log_format, config.log_level)
    try:
        build = build_name()
        with join_ranks(Path(task.meeting), rank=task.rank, size=size) as ranks:
            check_agreement(ranks, build=build, checkpoint=checkpoint_name(Path(config.model)))
            follow(prepare(config, lambda _stage, _done, _total: None, ranks=ranks).runner, sys.stdin.buffer)
    except Exception as error:
        log.error("follower_failed", rank=task.rank, num_ranks=size, error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
