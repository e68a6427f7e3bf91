"""What an engine's thread does with its time, by part, seen from outside: methods are replaced by ones that look at
the clock before and after.

Must not know: engines, runners.
"""

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Spent:
    """Seconds of the engine's thread, by part, and how often. wait: for the device. replay: the part of launch that
    enqueues recorded steps."""

    steps: int = 0
    total: float = 0.0
    plan: float = 0.0
    launch: float = 0.0
    replay: float = 0.0
    wait: float = 0.0
    apply: float = 0.0

    def add(self, part: str, seconds: float) -> None:
        """To one of the fields."""
        setattr(self, part, getattr(self, part) + seconds)

    def host_us(self) -> dict[str, float]:
        """Microseconds a step without the waiting, and its parts."""
        each = 1e6 / max(self.steps, 1)
        rest = self.total - self.wait - self.plan - self.launch - self.apply
        return {
            "host": (self.total - self.wait) * each, "plan": self.plan * each, "launch": self.launch * each,
            "replay": self.replay * each, "apply": self.apply * each, "rest": rest * each, "wait": self.wait * each,
        }  # fmt: skip


class Stopwatch:
    """spent: since it was last set to zero."""

    def __init__(self) -> None:
        self.spent = Spent()

    def set_to_zero(self) -> None:
        """From now on."""
        self.spent = Spent()

    def watch(self, owner: object, method: str, part: str) -> None:
        """The time of this method of this object counts for a part; it replaces what watched it before."""
        plain = getattr(type(owner), method).__get__(owner)

        def timed(*args: object, **named: object) -> object:
            start_s = time.perf_counter()
            try:
                return plain(*args, **named)
            finally:
                self.spent.add(part, time.perf_counter() - start_s)

        setattr(owner, method, timed)
