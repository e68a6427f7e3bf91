"""What happened in a run: a hash over everything that could be seen, counts, and what must not happen."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sim.edges.loop import SimLoop

MAX_VIOLATIONS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one scenario. requests: calls of callers, including retries. tokens: delivered to callers."""

    seed: int
    trace: str
    violations: tuple[str, ...]
    virtual_s: float
    requests: int
    tokens: int
    steps: int
    checks: int
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    story: tuple[str, ...] = ()


class Journal:
    """Written by every component. keep_story: also keep the lines, for reading."""

    def __init__(self, loop: SimLoop, *, story_lines: int = 0) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.points: Counter[str] = Counter()
        self.story: list[str] = []
        self._story_lines = story_lines
        self._loop = loop
        self._hash = hashlib.sha256()

    def note(self, line: str) -> None:
        """Record an event."""
        line = f"{self._loop.time():.6f} {line}"
        self._hash.update(line.encode())
        if len(self.story) < self._story_lines:
            self.story.append(line)

    def note_bytes(self, what: str, data: bytes) -> None:
        """Record an event with content."""
        self._hash.update(data)
        self.note(what)

    def violate(self, what: str) -> None:
        """Record a violation."""
        self.note(f"VIOLATION {what}")
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(f"{self._loop.time():.3f} s: {what}")

    def check(self, is_true: object, what: str | Callable[[], str]) -> None:
        """Check and count an invariant. what: a function if building the message costs more than the check."""
        self.counts["checks"] += 1
        if not is_true:
            self.violate(what if isinstance(what, str) else what())

    @property
    def trace(self) -> str:
        """SHA-256 hex of everything recorded."""
        return self._hash.hexdigest()
