"""Decides when to restart a process, and when to give up. Pure: takes exits and their times, returns decisions.

Must not know processes, signals or clocks; `cli.serve.service` carries the decisions out.
"""

import signal
from dataclasses import dataclass, field

from octavo.cli.serve.parent import EXIT_DRAINED, EXIT_NO_PLACE, EXIT_NOT_STARTED, EXIT_PLACE_LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Times in seconds. A death within fast_death_s of the start counts as fast, and each consecutive one doubles the
    wait before the next start. A process that has served once is never given up: otherwise whoever can make a worker
    die, by a request or from outside, could end the service by repeating it."""

    first_delay_s: float = 0.25
    max_delay_s: float = 15.0
    fast_death_s: float = 30.0

    def delay_s(self, num_fast_deaths: int) -> float:
        """The wait before the next start; the shortest for no fast deaths."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** max(0, num_fast_deaths - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Restart it after this wait."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not restart it."""

    why: str


@dataclass(frozen=True, slots=True)
class Drained:
    """An operator drained the process; do not restart it."""


Decision = Restart | GiveUp | Drained
_NO_FAULT = frozenset({0, -signal.SIGTERM, -signal.SIGINT, EXIT_PLACE_LOST})  # SIGINT: before its handler was set
_IN_WORDS = {
    EXIT_PLACE_LOST: "lost its host, or its actor there",
    EXIT_NO_PLACE: "found no host of the cluster with room for it",
    EXIT_NOT_STARTED: "could not be started",
}


@dataclass(slots=True, kw_only=True)
class RestartHistory:
    """The history of one process's starts and exits."""

    name: str
    policy: RestartPolicy
    num_fast_deaths: int = 0
    was_ready: bool = False
    _started_s: float = field(default=0.0, repr=False)

    def on_start(self, now_s: float) -> None:
        """It was started."""
        self._started_s = now_s

    def on_ready(self) -> None:
        """It serves. A process that fails before it has ever served is not restarted: a setting or the checkpoint must
        be wrong then."""
        self.was_ready = True

    def on_exit(self, code: int, now_s: float) -> Decision:
        """It ended. code: as subprocess gives it, negative for a signal. Not called during the supervisor's own drain,
        so a process that was asked to end was asked from outside (a SIGTERM), and is restarted. Only
        AdminService.Drain, which reaches every gateway, is as final as our own drain."""
        if code == EXIT_DRAINED:
            return Drained()
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
