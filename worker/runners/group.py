"""The runner of a worker that is a tensor-parallel group: rank 0, which the engine drives, and followers, which do the
same with parts of their own (model/parallel.py).

    engine -> GroupRunner -> the runner of rank 0
                   |---- orders ----> follower: the runner of rank 1, and so on

A follower only needs each step's plan and masks: every rank computes the same tokens by itself. Scheduler, block
manager and gateways know nothing of it. If a rank ends, or a step fails, the whole group ends: the other ranks may have
finished the step, and would wait for this one in the next.

Must not know: models, devices, how a follower was started, how orders reach it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np

from octavo.worker.runners.interface import Runner, RunnerError
from octavo.worker.scheduler.plan import StepMasks, StepPlan, StepResult

LOST_WAIT_S = 2.0
"""Time for a follower to end after a step has failed: what fails on one rank alone ends that rank."""
EXIT_LOST = 75
"""Exit code of rank 0 if another rank has ended."""


class GroupLost(ConnectionError):
    """A follower has ended. The worker must end too: no rank can continue alone."""


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """See Runner.launch."""

    plan: StepPlan


class Constrain(msgspec.Struct, frozen=True, tag="constrain"):
    """See Runner.constrain."""

    masks: StepMasks


Order = Launch | Constrain


class Followers(Protocol):
    """The other ranks, as rank 0 sees them."""

    def send(self, frame: bytes) -> None:
        """Send to all of them. Raises GroupLost."""

    def check(self, *, wait_s: float) -> None:
        """Raises GroupLost if one has ended, or ends within wait_s seconds."""


class GroupRunner:
    """Implements `Runner` for the engine of rank 0. close: ends the group, after rank 0's own runner."""

    def __init__(self, runner: Any, followers: Followers, *, close: Callable[[], None]) -> None:
        self.max_in_flight: int = runner.max_in_flight
        self.config = runner.config  # every rank has the same
        self.host_blocks = runner.host_blocks  # each rank has its part of every block
        self.max_copies_in = runner.max_copies_in
        self.max_chunks = runner.max_chunks
        self.measure_copies = runner.measure_copies
        self._runner, self._followers, self._close = runner, followers, close

    def launch(self, plan: StepPlan) -> None:
        """See Runner.launch. Raises GroupLost instead."""
        self._followers.send(encode(Launch(plan)))
        with self._together():
            self._runner.launch(plan)

    def constrain(self, masks: StepMasks) -> None:
        """See Runner.constrain. Raises GroupLost too."""
        self._followers.send(encode(Constrain(masks)))
        self._runner.constrain(masks)

    def collect(self) -> StepResult:
        """See Runner.collect. Raises GroupLost instead, also if a sum ended because a rank is missing."""
        with self._together():
            result: StepResult = self._runner.collect()
        self._followers.check(wait_s=0.0)
        return result

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except (RunnerError, ConnectionError) as error:
            self._followers.check(wait_s=LOST_WAIT_S)
            raise GroupLost(f"a step failed on rank 0, and the other ranks wait for it: {error}") from error

    def close(self) -> None:
        """Release the device and end the followers. Idempotent."""
        self._runner.close()
        self._close()


def follow(runner: Runner, take: Callable[[], bytes | None]) -> None:
    """Do what rank 0 does until it ends. take: returns the next order. A step's result equals rank 0's; it is collected
    when its place is needed for another step. Raises RunnerError for a failed step, which ends the group."""
    num_in_flight = 0
    while (frame := take()) is not None:
        match decode(frame):
            case Launch(plan=plan):
                if num_in_flight == runner.max_in_flight:
                    runner.collect()
                    num_in_flight -= 1
                runner.launch(plan)
                num_in_flight += 1
            case Constrain(masks=masks):
                runner.constrain(masks)


def _from_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(type(value))


def _to_array(wanted: type, value: Any) -> Any:
    if wanted is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype).reshape(shape)  # which may be written to
    raise NotImplementedError(wanted)


encode = msgspec.msgpack.Encoder(enc_hook=_from_array).encode
"""Encodes an Order."""
decode = msgspec.msgpack.Decoder(Order, dec_hook=_to_array).decode
"""Decodes an Order. Raises msgspec.DecodeError."""
