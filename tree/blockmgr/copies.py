"""Block copies that the next plan must carry out (copy-on-write).

A queued copy owns one reference to its source, until the plan that carries the copy has begun: then the fence of
that step protects the source. It must not know how references are counted: it hands sources back to be dropped.
"""

import numpy as np


class CopyQueue:
    """Copies (source, destination) in order; every destination once, and no source is a destination, so that a runner
    may do them one by one or all at once."""

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}  # by destination
        self._taken_sources: list[int] = []

    def origin(self, block: int) -> int:
        """The block that holds this one's content before any queued copy is done."""
        return self._source_of.get(block, block)

    def append(self, *, source: int, destination: int) -> None:
        """Queue a copy; the queue now owns a reference to the source."""
        self._source_of[destination] = source

    def num_from(self, block: int) -> int:
        """References to a block that the queue owns."""
        return self.sources.count(block)

    def cancel(self, destinations: np.ndarray) -> list[int]:
        """Forget copies into blocks that nobody holds any more; their sources, to be dropped."""
        if not self._source_of:
            return []
        doomed = [block for block in destinations.tolist() if block in self._source_of]
        return [self._source_of.pop(block) for block in doomed]

    def take(self) -> np.ndarray:
        """int32 [C, 2], (source, destination): the copies since the last call."""
        pairs = self.pending
        self._taken_sources += self._source_of.values()
        self._source_of.clear()
        return np.array(pairs, np.int32).reshape(-1, 2)

    def pop_taken(self) -> list[int]:
        """Sources of copies that were taken: their references are to be dropped."""
        sources, self._taken_sources = self._taken_sources, []
        return sources

    @property
    def pending(self) -> list[tuple[int, int]]:
        """(source, destination) of the copies that `take` would give."""
        return [(source, destination) for destination, source in self._source_of.items()]

    @property
    def sources(self) -> list[int]:
        """Every source that the queue owns a reference to, once per reference."""
        return [*self._source_of.values(), *self._taken_sources]
