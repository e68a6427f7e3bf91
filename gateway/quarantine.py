"""Which outputs of a lost worker may go to another one now, so that an output that kills workers is found out.

Any output that the dead worker had begun may be what killed it. So each of them goes on **probation**: at most one of
them at a time on any worker, until that worker has given it a token. The others, which wait or have passed, lose only
time. What had only been queued killed nobody and need not wait.

A worker that dies meanwhile was killed by its suspect, or by chance: somebody may have killed both. Two deaths are
therefore an accusation. An output that had given tokens before has a prompt that harms nobody, and gets a second
probation; one that never gave any ends in a way that its caller may try again, and then starts on probation. Whose
second probation costs a worker as well is **guilty**: three deaths, two of them with nothing else on trial, the last at
another time.

Pure: no clock, no sockets; knows outputs and workers by names alone.
"""

from collections import deque
from collections.abc import Hashable
from enum import Enum


class Verdict(Enum):
    """What becomes of an output whose worker was lost."""

    FREE = "free"  # may go to any worker at once
    SUSPECT = "suspect"  # waits until `next_for` names it
    ACCUSED = "accused"  # ends; whoever tries the same again has to `hold` it
    GUILTY = "guilty"  # must not go to a worker again


class Quarantine:
    """One per model. An output is any hashable name, a worker likewise (a new one for each life of a process)."""

    def __init__(self) -> None:
        self._waiting: deque[Hashable] = deque()
        self._on_probation: dict[Hashable, Hashable] = {}  # worker -> output
        self._worker_of: dict[Hashable, Hashable] = {}  # output -> worker, the same turned round
        self._accused: set[Hashable] = set()  # a worker died during an earlier probation of theirs

    def __len__(self) -> int:
        return len(self._waiting) + len(self._worker_of)

    @property
    def num_waiting(self) -> int:
        """Suspects that are on no worker."""
        return len(self._waiting)

    def hold(self, output: Hashable) -> None:
        """One that was accused before, and has no worker yet: it starts on probation."""
        self._accused.add(output)
        self._waiting.append(output)

    def lost(self, output: Hashable, worker: Hashable, *, was_begun: bool, has_given: bool) -> Verdict:
        """The worker is gone that had the output. was_begun: a step may have touched it, and no
        orderly end came between. has_given: it has given tokens, at any worker."""
        is_on_probation = self._worker_of.get(output) == worker
        was_accused = output in self._accused
        self.forget(output)
        if not was_begun and is_on_probation:
            if was_accused:
                self._accused.add(output)
            self._waiting.appendleft(output)  # it has still to show that it kills nobody
            return Verdict.SUSPECT
        if not was_begun:
            return Verdict.FREE
        if is_on_probation and was_accused:
            return Verdict.GUILTY
        if is_on_probation and not has_given:
            return Verdict.ACCUSED
        if is_on_probation:
            self._accused.add(output)
        self._waiting.append(output)
        return Verdict.SUSPECT

    def next_for(self, worker: Hashable) -> Hashable | None:
        """The suspect that this worker may have now, first come first served; it is on probation from here on."""
        if not self._waiting or worker in self._on_probation:
            return None
        output = self._waiting.popleft()
        self._on_probation[worker] = output
        self._worker_of[output] = worker
        return output

    def is_tried(self, worker: Hashable) -> bool:
        """Whether a suspect is on probation there."""
        return worker in self._on_probation

    def send_back(self, output: Hashable) -> None:
        """The worker could not take it after all: it is first in line again."""
        del self._on_probation[self._worker_of.pop(output)]
        self._waiting.appendleft(output)

    def passed(self, output: Hashable) -> bool:
        """A token or an end came: it is no suspect any more. Whether it was one: then somebody else may have a turn."""
        worker = self._worker_of.pop(output, None)
        if worker is None:
            return False
        self._accused.discard(output)
        del self._on_probation[worker]
        return True

    def forget(self, output: Hashable) -> None:
        """It ended some other way (cancelled, deadline). Idempotent."""
        self._accused.discard(output)
        if not self.passed(output) and output in self._waiting:
            self._waiting.remove(output)
