"""A worker that is a tensor-parallel group: how its processes start, load and end together.

Rank 0 is the worker itself. It starts the others as `python -m octavo.worker.loading.group`, tells them their settings
and then each step's orders (worker/runners/orders.py; what orders are, worker/runners/group.py), and all of them load
at once, each its part of the model. Where the model goes to GPUs, rank r has the r-th that CUDA_VISIBLE_DEVICES names.

A follower ends when its orders do; one that ends before makes rank 0 end, and the supervisor starts all anew. A thread
for each follower sees that and lets rank 0's sums end, since a GPU waits for its peers forever, or else the process,
which may have no step to do; one that stands still is the watchdog's business. Followers ignore signals: they would
drain nothing.

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
from octavo.worker.loading.loaded import Loaded, Meanwhile, served_name
from octavo.worker.loading.loader import load_torch, prepare
from octavo.worker.loading.progress import OnProgress, staged
from octavo.worker.runners.group import EXIT_LOST, LOST_WAIT_S, GroupLost, GroupRunner, follow
from octavo.worker.runners.orders import OrderReader, OrderRing
from octavo.worker.runners.rank_figures import MeasuredRunner, RankBoard

log = structlog.get_logger(__name__)

END_TIMEOUT_S, END_LOADING_S = 10.0, 1.0
"""For a follower to end after its orders have, and before there were any: it may load for minutes, for nobody."""
LOST_EXIT_S = 5.0
"""After a follower has ended, for rank 0's thread to notice: nothing ends a GPU's sum that reads its peers' memory."""
DISMISSED_WAIT_S = 0.5
"""For rank 0 to say that it ends, which it may do after it has left the group."""
READ_TIMEOUT_S = 60.0
"""For followers to take what fills the memory that orders go through."""
TIMEOUTS = "wait timeout", "timed out"
"""How torch and gloo say, without a type for it, that a rank has not come."""
VISIBLE = "CUDA_VISIBLE_DEVICES"

MEETING, BOARD = "meeting", "figures"
"""Files of a group."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a follower is told first. parent: rank 0's pid. meeting: see `join_ranks`. board: file of the RankBoard."""

    config: WorkerConfig
    rank: int
    parent: int
    meeting: str
    board: str


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Task)


class FollowerProcesses:
    """Ranks 1 and up of a group, started by rank 0. Implements `worker.runners.group.Followers`. on_lost: called from a
    thread when one has ended before `dismiss`. end_s: what `close` gives them to end by themselves."""

    def __init__(self, config: WorkerConfig, folder: Path) -> None:
        """folder: of this group alone, where its ranks meet and write figures."""
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
        except BaseException:  # one may have ended already
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
        """There are no more orders: they end by themselves. Idempotent."""
        self._dismissed.set()
        for process in self._processes:
            with suppress(OSError):  # what it did not read is lost with it
                cast(BinaryIO, process.stdin).close()

    def end_sums(self, ranks: Ranks) -> None:
        """Let rank 0 out of sums on GPUs that wait for one who has ended; where it does not come out, or is in none,
        end the process. From any thread."""
        if has_device_sums(ranks):
            # Beside this thread: NCCL lets sums go at once, but ends after the graphs that hold them have.
            threading.Thread(target=abort, args=(ranks,), name="abort", daemon=True).start()
        self._end_process("has no step to do, or waits for it in one")

    def end_meeting(self) -> None:
        """Before all ranks have met: rank 0 waits for one that will not come, and nothing lets it out. From any
        thread."""
        self._end_process("waits for it to come")

    def close(self) -> None:
        """End all of them. Idempotent."""
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
        """Their settings, without what is rank 0's alone."""
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
        """Unless rank 0 goes on in time."""
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
    """A rank's device, and how its environment must differ from rank 0's. A process sees one part of a GPU at most
    (MIG), so each rank is shown its own."""
    if torch.device(device).type != "cuda":
        return device, {}
    entries = visible_entries(environment)
    if entries and entries[0].startswith("MIG-"):
        return "cuda:0", {VISIBLE: entries[rank]}
    return f"cuda:{rank}", {}


def visible_entries(environment: Mapping[str, str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES names; empty where it is not set."""
    return [entry.strip() for entry in environment.get(VISIBLE, "").split(",") if entry.strip()]


def load_group(config: WorkerConfig, on_progress: OnProgress, meanwhile: Meanwhile = lambda described: None) -> Loaded:
    """`load_torch` of a worker with any number of ranks, of which this process is rank 0. The runner's `close` ends the
    others. Raises what `load_torch` raises, RanksDiffer, and GroupLost where a follower ends on the way."""
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
            stack.callback(followers.dismiss)  # they leave the group when this rank does, not after it
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
        except RuntimeError as error:  # of a sum whose other end is gone, or does not come
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
    """The runner of a rank, whose figures are written down."""
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
    """Raises ValueError for what a group cannot be had together with."""
    size = config.tensor_parallel_size
    if config.runner is RunnerKind.ORACLE:
        raise ValueError(f"tensor_parallel_size {size} is for models: the oracle has nothing to cut")
    if torch.device(config.device).type == "cuda":
        check_gpus(config.device, size)


def notes_on_cores(size: int) -> tuple[str, ...]:
    """What an operator should know of ranks on CPUs, in a sentence."""
    cores = usable_cores()
    if size <= cores:
        return ()
    share = f"{cores} core{'s' * (cores > 1)}"
    return (f"{size} tensor-parallel ranks share {share}: steps wait for each other, fewer ranks are faster",)


def check_gpus(device: str, size: int) -> None:
    """Raises ValueError where there are fewer GPUs than ranks, or one is named."""
    if torch.device(device).index is not None:
        raise ValueError(
            f"the device is {device}, and {size} ranks take the first {size} GPUs: give cuda, and {VISIBLE} to choose"
        )
    entries = visible_entries(os.environ)
    count = len(entries) if entries and entries[0].startswith("MIG-") else torch.cuda.device_count()
    if count < size:
        raise ValueError(f"tensor_parallel_size {size} needs a GPU for each rank, and torch sees {count}")


class CannotBeCut(ValueError):
    """A model has no whole part for each rank. In three parts, as command lines show errors."""

    exit_code = 2

    def __init__(self, model: str, size: int, why: str, sizes: Sequence[int]) -> None:
        """sizes: those that it can be cut into."""
        super().__init__(f"tensor_parallel_size {size} does not fit the model: {why}")
        self.what = "a model cannot be cut into so many parts"
        self.numbers = f"--tensor-parallel-size is {size}, and of {model} {why.removeprefix('config.json: ')}"
        self.change = f"give {' or '.join(map(str, sizes))}"


def check_cut(folder: Path, size: int, model: str) -> None:
    """Raises CannotBeCut where the checkpoint cannot be cut into so many parts. model: as it was asked for."""
    model_config = load_config(folder)

    def why_not(size: int) -> str:
        try:
            config_of_rank(model_config, size)
        except ConfigError as error:
            return str(error)
        return ""

    if why := why_not(size):
        sizes = [each for each in range(model_config.num_attention_heads, 0, -1) if not why_not(each)]
        raise CannotBeCut(model, size, why, sizes)


def main() -> int:
    """A follower. Returns 0 where rank 0 has ended, 1 where something failed here."""
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)
    told = sys.stdin.buffer.read(_LENGTH_BYTES)
    frame = sys.stdin.buffer.read(int.from_bytes(told, "little"))
    if len(told) < _LENGTH_BYTES or len(frame) < int.from_bytes(told, "little"):
        return 0
    task = _DECODER.decode(frame)
    die_with(task.parent)  # also where it stands still and does not see its input end
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
                os._exit(_status(task, error))  # rank 0 waits: it need not wait for what NCCL does at an end
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
        runner.close()  # what has sums in it must go before the group does


def _status(task: Task, error: Exception) -> int:
    """0 where rank 0 has ended, so that there is nobody to sum with; else 1, and why this rank ends is told; where, for
    those who look for a mistake (--log-level debug)."""
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
