"""Decides when to start a process again, and when to give up. Pure: exits with their times in, decisions out.

Must not know processes, signals or clocks; `cli.serve.children` does what is decided here.
"""

import signal
from dataclasses import dataclass, field

from octavo.cli.serve.parent import EXIT_DRAINED, EXIT_NO_PLACE, EXIT_NOT_STARTED, EXIT_PLACE_LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Times in seconds. A death within fast_death_s of the start counts as fast, and the wait before the next start
    doubles with each of them in a row. What has served once is never given up: a caller that can make a worker die, by
    a request or from outside, must not be able to end the service by doing it again."""

    first_delay_s: float = 0.25
    max_delay_s: float = 15.0
    fast_death_s: float = 30.0

    def delay_s(self, num_fast_deaths: int) -> float:
        """The wait before the next start. None of them was fast: the shortest."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** max(0, num_fast_deaths - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start it again after this wait."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not start it again."""

    why: str


@dataclass(frozen=True, slots=True)
class Left:
    """An operator drained the service: it stays away."""


Decision = Restart | GiveUp | Left
_NO_FAULT = frozenset({0, -signal.SIGTERM, -signal.SIGINT, EXIT_PLACE_LOST})  # SIGINT where it had no handler yet
_IN_WORDS = {
    EXIT_PLACE_LOST: "lost its host, or its actor there",
    EXIT_NO_PLACE: "found no host of the cluster with room for it",
    EXIT_NOT_STARTED: "could not be started",
}


@dataclass(slots=True, kw_only=True)
class Lifetimes:
    """The lives of one process, and what its deaths led to."""

    name: str
    policy: RestartPolicy
    num_fast_deaths: int = 0
    was_ready: bool = False
    _started_s: float = field(default=0.0, repr=False)

    def on_start(self, now_s: float) -> None:
        """It was started."""
        self._started_s = now_s

    def on_ready(self) -> None:
        """It serves. A process that dies before that, at its very first start, is not tried again: what is wrong then
        is a setting or the checkpoint."""
        self.was_ready = True

    def on_exit(self, code: int, now_s: float) -> Decision:
        """It ended. code as subprocess has it: negative is a signal. The supervisor's own drain is not told here: so
        one that was asked to end was asked from outside (a SIGTERM), and is started again; only AdminService.Drain,
        which reaches every gateway, is as final as our own."""
        if code == EXIT_DRAINED:
            return Left()
        if not self.was_ready and code not in _NO_FAULT:
            return GiveUp(why=f"{self.name} {ending(code)} before it was ready")
        is_fast = now_s - self._started_s < self.policy.fast_death_s
        self.num_fast_deaths = self.num_fast_deaths + 1 if is_fast else 0
        return Restart(delay_s=self.policy.delay_s(self.num_fast_deaths))


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code in _IN_WORDS:
        return _IN_WORDS[code]
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
