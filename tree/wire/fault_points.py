"""Named places where a simulation may make something go wrong. In service they cost a comparison and do nothing.

Here because worker and gateway both may import it. Knows neither what is done at a point nor who does it.
"""

from collections.abc import Callable

_armed: Callable[[str], None] | None = None


def fault_point(name: str) -> None:
    """Something may go wrong here: whatever is armed may raise."""
    if _armed is not None:
        _armed(name)


def arm(action: Callable[[str], None]) -> None:
    """Call ``action(name)`` at every point from now on. For simulations only."""
    global _armed
    _armed = action


def disarm() -> None:
    """Points do nothing again."""
    global _armed
    _armed = None
