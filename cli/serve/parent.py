"""Ties a process to the supervisor that started it: when that dies, by whatever means, the process dies too.

Linux only; elsewhere a supervisor that is killed with -9 leaves its processes running.
"""

import os

from octavo.wire.host import die_with

PARENT_VARIABLE = "OCTAVO_SUPERVISOR_PID"
EXIT_DRAINED = 77
"""How a gateway ends for its supervisor that an operator has drained: not to be started again, other than one that a
signal ended. Without a supervisor that is 0."""
EXIT_PLACE_LOST = 78
"""Of a process on a cluster whose host is gone, told in its place."""
EXIT_NO_PLACE = 79
"""Of a process for which the cluster had no room, told in its place."""


def has_supervisor() -> bool:
    """Whether one started this process; to be asked before `die_with_supervisor`."""
    return bool(os.environ.get(PARENT_VARIABLE))


def die_with_supervisor() -> None:
    """Called first in `octavo gateway` and `octavo worker`; does nothing where no supervisor started them.

    SIGKILL, since an orphan that drains for half a minute would hold ports and memory against the next start.
    """
    supervisor = os.environ.pop(PARENT_VARIABLE, "")
    if supervisor:
        die_with(int(supervisor))
