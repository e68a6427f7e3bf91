"""What is said to the worker of an output that is under way: end, pause, go on.

A wish goes with the output wherever it moves, and waits where no worker has it. Must not know sockets, nor why its
reader wants what it wants.
"""

from gateway.workers.migration import Migration
from gateway.workers.outputs import Output, Outputs
from gateway.workers.post import Post
from gateway.workers.records import WorkerRecord
from gateway.workers.stats import PoolStats
from gateway.workers.views import LostReason
from wire.messages import Pause, Resume


class Reins:
    """Handles that are unknown or have ended are ignored."""

    def __init__(self, outputs: Outputs, migration: Migration, post: Post, stats: PoolStats) -> None:
        self._outputs = outputs
        self._migration = migration
        self._post = post
        self._stats = stats

    def cancel(self, handle: int) -> None:
        """No more tokens; on_finished(CANCELLED) or on_lost follows."""
        output = self._outputs.get(handle)
        if output is None or output.is_cancelled:
            return
        output.is_cancelled = True
        if self._migration.is_waiting(output):
            self._migration.forget(output)
            self._outputs.lose(output, LostReason.WORKER_LOST, "cancelled while no worker had it")
        else:
            self._post.cancel(output.incarnation, output.handle)

    def pause(self, handle: int) -> None:
        """No more steps until `resume`; tokens of those in flight still come."""
        output = self._outputs.get(handle)
        if output is not None and not output.is_paused:
            output.is_paused = True
            self._stats.pauses += 1
            # One on probation has to show with a token that it kills nobody: others wait for that.
            if not output.is_on_probation:
                self._tell_pace(output)

    def resume(self, handle: int) -> None:
        """Go on where it was; nothing for one that is not paused."""
        output = self._outputs.get(handle)
        if output is not None and output.is_paused:
            output.is_paused = False
            self._tell_pace(output)

    def moved(self, output: Output, record: WorkerRecord) -> None:
        """This worker gets the output now, and does not know yet that it is paused."""
        if output.is_paused and not output.is_on_probation:
            self._post.pace(record.incarnation, output.handle, Pause)

    def passed(self, output: Output) -> None:
        """It is on probation no more: what was not said for that is said now."""
        if output.is_paused:
            self._tell_pace(output)

    def _tell_pace(self, output: Output) -> None:
        if not self._migration.is_waiting(output) and not output.is_cancelled:
            self._post.pace(output.incarnation, output.handle, Pause if output.is_paused else Resume)
