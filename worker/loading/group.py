"""A worker that is a tensor-parallel group: how its processes start, load and end together.

Rank 0 is the worker itself. It starts the others (followers) as `python -m octavo.worker.loading.group` and sends them
their settings, then each step's orders (defined in worker/runners/group.py, sent by worker/runners/orders.py). All
ranks load at once, each its part of the model. On GPUs, rank r has the r-th that CUDA_VISIBLE_DEVICES names.

A follower ends when its orders end. If one ends earlier, rank 0 ends too, and the supervisor restarts the group. A
thread for each follower notices that and aborts rank 0's sums, since a GPU waits for its peers forever; if that does
not end rank 0, which may have no step to do, it ends the process. A follower that hangs is left to the watchdog.
Followers ignore signals: they have nothing to drain.

Must not know: the scheduler, sockets to gateways.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import psutil
import structlog
import torch

from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.config import load_config
from octavo.model.errors import ConfigError
from octavo.model.parallel import JOIN_TIMEOUT_S, Ranks, abort, config_of_rank, has_device_sums, join_ranks
from octavo.wire.host import die_with, ending_signals, usable_cores
from octavo.wire.logs import configure_logs
from octavo.wire.run_dir import temporary_folder
from octavo.worker.config import RunnerKind, WorkerConfig
from octavo.worker.loading.agreement import build_name, check_agreement, check_unchanged, checkpoint_name
from octavo.worker.loading.loaded import Loaded, Meanwhile
from octavo.worker.loading.loader import load_torch, prepare
from octavo.worker.loading.model_card import served_name
from octavo.worker.loading.progress import OnProgress, staged
from octavo.worker.runners.group import EXIT_LOST, LOST_WAIT_S, GroupLost, GroupRunner, follow
from octavo.worker.runners.orders import OrderReader, OrderRing
from octavo.worker.runners.rank_figures import MeasuredRunner, RankBoard

log = structlog.get_logger(__name__)

END_TIMEOUT_S, END_LOADING_S = 10.0, 1.0
"""Time for a follower to end after its orders have, and if there were none yet: it might load for minutes in vain."""
LOST_EXIT_S = 5.0
"""Time for rank 0 to notice that a follower has ended: a GPU's sum that reads its peers' memory cannot be aborted."""
DISMISSED_WAIT_S = 0.5
"""Time for rank 0 to say that it ends, which it may do after it has left the group."""
READ_TIMEOUT_S = 60.0
"""Time for followers to read orders once the ring is full."""
TIMEOUTS = "wait timeout", "timed out"
"""How messages of torch and gloo, which have no exception type for it, say that a rank has not joined in time."""
VISIBLE = "CUDA_VISIBLE_DEVICES"

MEETING, BOARD = "meeting", "figures"
"""Names of a group's files."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a follower. parent: rank 0's pid. meeting: see `join_ranks`. board: file of the RankBoard."""

    config: WorkerConfig
    rank: int
    parent: int
    meeting: str
    board: str


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Task)


class FollowerProcesses:
    """Ranks 1 and up of a group, started by rank 0. Implements `worker.runners.group.Followers`. on_lost: called from a
    thread if one ends before `dismiss`. end_s: how long `close` waits for them to end by themselves."""

    def __init__(self, config: WorkerConfig, folder: Path) -> None:
        """folder: used by this group alone; its ranks meet and write figures there."""
        self.board = RankBoard.create(folder / BOARD, size=config.tensor_parallel_size)
        self.on_lost: Callable[[], None] = self.end_meeting
        self.end_s = END_LOADING_S
        self._dismissed = threading.Event()
        self._ring = OrderRing(config.tensor_parallel_size - 1)
        self._processes = [self._start(config, rank) for rank in range(1, config.tensor_parallel_size)]
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), name="rank", daemon=True).start()
        try:
            self._tell(config, meeting=str(folder / MEETING), board=str(folder / BOARD))
        except BaseException:  # for example, because one has ended already
            self.close()
            raise

    def send(self, frame: bytes) -> None:
        """See Followers."""
        deadline_s = time.monotonic() + READ_TIMEOUT_S
        for bell in self._ring.put(frame, wait=lambda: self._wait_for_room(deadline_s)):
            for rank in range(1, len(self._processes) + 1):
                self._write(rank, bell)

    def check(self, *, wait_s: float) -> None:
        """See Followers."""
        for rank, process in enumerate(self._processes, start=1):
            status = process.poll()
            if status is None and wait_s:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(wait_s)
            if status is None:
                continue
            raise GroupLost(f"rank {rank} of {len(self._processes) + 1} ended with status {status}; its log says why")

    def dismiss(self) -> None:
        """Send no more orders, so that followers end by themselves. Idempotent."""
        self._dismissed.set()
        for process in self._processes:
            with suppress(OSError):  # it may have ended without reading everything
                cast(BinaryIO, process.stdin).close()

    def end_sums(self, ranks: Ranks) -> None:
        """Abort rank 0's sums on GPUs that wait for a follower that has ended; end the process if it does not leave
        them in time, or is in none. From any thread."""
        if has_device_sums(ranks):
            # In another thread: NCCL aborts sums at once, but returns only once the graphs that hold them have ended.
            threading.Thread(target=abort, args=(ranks,), name="abort", daemon=True).start()
        self._end_process("has no step to do, or waits for it in one")

    def end_meeting(self) -> None:
        """End the process if a follower ends before all ranks have met: nothing else would end rank 0's wait for it.
        From any thread."""
        self._end_process("waits for it to come")

    def close(self) -> None:
        """End all followers. Idempotent."""
        self.dismiss()
        deadline_s = time.monotonic() + self.end_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ring.close()

    def _tell(self, config: WorkerConfig, *, meeting: str, board: str) -> None:
        """Send the followers their settings, without those that only rank 0 needs."""
        told = replace(config, gateway_endpoints=(), gateway_endpoints_file=None, registration_token="", curve=None)
        for rank in range(1, config.tensor_parallel_size):
            device, _ = place_of_rank(config.device, rank, os.environ)
            told_rank = replace(told, device=device)
            task = Task(config=told_rank, rank=rank, parent=os.getpid(), meeting=meeting, board=board)
            frame = _ENCODER.encode(task)
            self._write(rank, len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    def _start(self, config: WorkerConfig, rank: int) -> "subprocess.Popen[bytes]":
        _, changes = place_of_rank(config.device, rank, os.environ)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(self._ring.descriptor)],
            stdin=subprocess.PIPE,
            env={**os.environ, **changes},
            pass_fds=(self._ring.descriptor,),
            start_new_session=True,
        )

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        if not self._dismissed.is_set():
            self.on_lost()

    def _end_process(self, waits: str) -> None:
        """End the process unless rank 0 dismisses its followers in time."""
        if self._dismissed.wait(LOST_EXIT_S):
            return
        try:
            self.check(wait_s=0.0)
        except GroupLost as lost:
            log.error("group_lost", error=f"{lost}, and rank 0 {waits}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_LOST)

    def _wait_for_room(self, deadline_s: float) -> None:
        self.check(wait_s=0.001)
        if time.monotonic() > deadline_s:
            raise GroupLost(f"a rank of {len(self._processes) + 1} has taken no orders for {READ_TIMEOUT_S:g} s")

    def _write(self, rank: int, data: bytes) -> None:
        pipe = cast(BinaryIO, self._processes[rank - 1].stdin)
        try:
            pipe.write(data)
            pipe.flush()
        except OSError:
            self.check(wait_s=END_TIMEOUT_S)
            raise


_LENGTH_BYTES = 4


def place_of_rank(device: str, rank: int, environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """A rank's device, and the variables in which its environment differs from rank 0's. A process sees at most one MIG
    part of a GPU, so each rank is shown its own."""
    if torch.device(device).type != "cuda":
        return device, {}
    entries = visible_entries(environment)
    if entries and entries[0].startswith("MIG-"):
        return "cuda:0", {VISIBLE: entries[rank]}
    return f"cuda:{rank}", {}


def visible_entries(environment: Mapping[str, str]) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES; empty if it is not set."""
    return [entry.strip() for entry in environment.get(VISIBLE, "").split(",") if entry.strip()]


def load_group(config: WorkerConfig, on_progress: OnProgress, meanwhile: Meanwhile = lambda described: None) -> Loaded:
    """`load_torch` for a worker with any number of ranks, of which this process is rank 0. The runner's `close` ends
    the others. Raises what `load_torch` raises, RanksDiffer, and GroupLost if a follower ends meanwhile."""
    if config.tensor_parallel_size == 1:
        return load_torch(config, on_progress, meanwhile=meanwhile)
    check_group(config)
    build = build_name()
    folder = resolve_checkpoint(
        config.model,
        revision=config.revision,
        on_progress=staged("downloading", on_progress),
    )
    check_cut(folder, config.tensor_parallel_size, config.model)
    config = replace(config, served_name=config.served_name or served_name(config.model), model=str(folder))
    ending = ExitStack()
    with ExitStack() as stack:
        place = stack.enter_context(temporary_folder("octavo-ranks-"))
        followers = FollowerProcesses(config, place)
        stack.callback(followers.close)
        device, _ = place_of_rank(config.device, 0, os.environ)
        try:
            ranks = stack.enter_context(
                join_ranks(place / MEETING, rank=0, size=config.tensor_parallel_size, device=device)
            )
            stack.callback(followers.dismiss)  # lets them leave the group together with this rank
            followers.on_lost = lambda: followers.end_sums(ranks)
            checkpoint = checkpoint_name(folder)
            check_agreement(ranks, build=build, checkpoint=checkpoint)

            def grouped(runner: Any) -> GroupRunner:
                check_unchanged(ranks, folder, checkpoint=checkpoint)
                own = measured(runner, followers.board, ranks, config.device)
                return GroupRunner(own, followers, close=ending.close)

            loaded = load_torch(
                replace(config, device=device), on_progress, ranks=ranks, wrap=grouped, meanwhile=meanwhile
            )
        except RuntimeError as error:  # from a sum whose other rank is gone, or does not come
            followers.check(wait_s=LOST_WAIT_S)
            if any(words in str(error).lower() for words in TIMEOUTS):
                others = f"the other ranks of {config.tensor_parallel_size} have not come in {JOIN_TIMEOUT_S:g} s"
                raise GroupLost(f"{others}, and none has ended: one stands still, or its disk is very slow") from error
            raise
        followers.end_s = END_TIMEOUT_S
        ending.enter_context(stack.pop_all())
    notes = loaded.notes
    if torch.device(config.device).type == "cpu":
        notes += notes_on_cores(config.tensor_parallel_size)
    return replace(loaded, notes=notes, read_ranks=followers.board.read)


def measured(runner: Any, board: RankBoard, ranks: Ranks, device: str) -> Any:
    """The runner of a rank, wrapped so that its figures are written to the board."""
    is_device = torch.device(device).type == "cuda"
    process = psutil.Process()
    return MeasuredRunner(
        runner,
        board,
        ranks.rank,
        exchange_s=lambda: ranks.exchanges.seconds,
        memory_bytes=lambda: torch.cuda.memory_reserved() if is_device else int(process.memory_info().rss),
    )


def check_group(config: WorkerConfig) -> None:
    """Raises ValueError for settings that do not work with several ranks."""
    size = config.tensor_parallel_size
    if config.runner is RunnerKind.ORACLE:
        raise ValueError(f"tensor_parallel_size {size} is for models: the oracle has nothing to cut")
    if torch.device(config.device).type == "cuda":
        check_gpus(config.device, size)


def notes_on_cores(size: int) -> tuple[str, ...]:
    """What an operator should know about ranks on CPUs, in sentences."""
    cores = usable_cores()
    if size <= cores:
        return ()
    share = f"{cores} core{'s' * (cores > 1)}"
    return (f"{size} tensor-parallel ranks share {share}: steps wait for each other, fewer ranks are faster",)


def check_gpus(device: str, size: int) -> None:
    """Raises ValueError if there are fewer GPUs than ranks, or the device names one GPU."""
    if torch.device(device).index is not None:
        raise ValueError(
            f"the device is {device}, and {size} ranks take the first {size} GPUs: give cuda, and {VISIBLE} to choose"
        )
    entries = visible_entries(os.environ)
    count = len(entries) if entries and entries[0].startswith("MIG-") else torch.cuda.device_count()
    if count < size:
        raise ValueError(f"tensor_parallel_size {size} needs a GPU for each rank, and torch sees {count}")


class IndivisibleModel(ValueError):
    """A model cannot be divided among so many ranks. what, numbers, change: parts of a command line's error."""

    exit_code = 2

    def __init__(self, model: str, size: int, why: str, sizes: Sequence[int]) -> None:
        """sizes: numbers of ranks that are possible."""
        super().__init__(f"tensor_parallel_size {size} does not fit the model: {why}")
        self.what = "a model cannot be cut into so many parts"
        self.numbers = f"--tensor-parallel-size is {size}, and of {model} {why.removeprefix('config.json: ')}"
        self.change = f"give {' or '.join(map(str, sizes))}"


def check_cut(folder: Path, size: int, model: str) -> None:
    """Raises IndivisibleModel if the checkpoint cannot be divided among so many ranks. model: as the user named it."""
    model_config = load_config(folder)

    def why_not(size: int) -> str:
        try:
            config_of_rank(model_config, size)
        except ConfigError as error:
            return str(error)
        return ""

    if why := why_not(size):
        sizes = [each for each in range(model_config.num_attention_heads, 0, -1) if not why_not(each)]
        raise IndivisibleModel(model, size, why, sizes)


def main() -> int:
    """Run a follower. Returns 0 if rank 0 has ended, 1 if something failed here."""
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)
    told = sys.stdin.buffer.read(_LENGTH_BYTES)
    frame = sys.stdin.buffer.read(int.from_bytes(told, "little"))
    if len(told) < _LENGTH_BYTES or len(frame) < int.from_bytes(told, "little"):
        return 0
    task = _DECODER.decode(frame)
    die_with(task.parent)  # even if it hangs and does not notice the end of its input
    config, size = task.config, task.config.tensor_parallel_size
    configure_logs(config.log_format, config.log_level)
    try:
        build = build_name()
        with join_ranks(Path(task.meeting), rank=task.rank, size=size, device=config.device) as ranks:
            try:
                checkpoint = checkpoint_name(Path(config.model))
                check_agreement(ranks, build=build, checkpoint=checkpoint)
                _follow_rank_0(task, ranks, checkpoint)
            except Exception as error:
                os._exit(_status(task, error))  # rank 0 waits for this process; skip NCCL's slow shutdown
    except Exception as error:
        return _status(task, error)
    return 0


def _follow_rank_0(task: Task, ranks: Ranks, checkpoint: str) -> None:
    config = task.config
    board = RankBoard.open(Path(task.board), size=config.tensor_parallel_size)
    runner = prepare(config, lambda _stage, _done, _total: None, ranks=ranks).runner
    check_unchanged(ranks, Path(config.model), checkpoint=checkpoint)
    reader = OrderReader(int(sys.argv[1]), task.rank - 1, sys.stdin.buffer)
    try:
        follow(measured(runner, board, ranks, config.device), reader.take)
    finally:
        runner.close()  # graphs that hold sums must be freed before the group ends


def _status(task: Task, error: Exception) -> int:
    """The exit status: 0 if rank 0 has ended, which explains the error; else 1, after logging the error (with a
    traceback for --log-level debug)."""
    news, _, _ = select.select([sys.stdin], [], [], DISMISSED_WAIT_S)
    if news and not os.read(sys.stdin.fileno(), 1):
        return 0
    size = task.config.tensor_parallel_size
    if task.config.log_level == "debug":
        traceback.print_exception(error)
    log.error("follower_failed", rank=task.rank, num_ranks=size, error=f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    return 1


if __name__ == "__main__":
    sys.exit(main())
