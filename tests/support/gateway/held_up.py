"""How long a process was kept from what it could have done by others on the machine."""

from contextlib import suppress
from pathlib import Path


def held_up_s() -> float:
    """Seconds, since their starts, in which threads of this process were ready to run and had no core; 0.0 where the
    system does not count them. A pause less this is what the process did to itself."""
    waited_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            waited_ns += int(task.read_text().split()[1])
    return waited_ns / 1e9
