"""An asyncio loop on a virtual clock: it never sleeps, and jumps to the next timer when nothing is ready.

Knows nothing of what runs on it. Threads do not exist here: what is given to an executor runs at once.
"""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

START_S = 1_000.0  # the product writes 0.0 for "not yet"
MAX_TURNS_AT_ONE_TIME = 200_000


class NothingHappens(Exception):
    """Somebody waits, and no timer will ever fire."""


class TimeStandsStill(Exception):
    """Callbacks call callbacks for ever, and the clock does not move."""


class _VirtualSelector(selectors.BaseSelector):
    """No descriptor is ever ready; waiting is telling the clock."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        self._advance = advance

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._advance(timeout)
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)


class SimLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual seconds from START_S on."""

    def __init__(self) -> None:
        self._now_s = START_S
        self._num_turns = 0
        super().__init__(_VirtualSelector(self._advance))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Run it now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """Nobody sleeps, so nobody need be woken."""

    def _advance(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            raise NothingHappens
        if timeout_s > 0:
            self._now_s += timeout_s
            self._num_turns = 0
            return
        self._num_turns += 1
        if self._num_turns > MAX_TURNS_AT_ONE_TIME:
            self._num_turns = 0  # who cleans up has turns again
            raise TimeStandsStill(f"{MAX_TURNS_AT_ONE_TIME} turns at {self._now_s}")
