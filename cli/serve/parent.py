"""Ties a process to the supervisor that started it: when that dies, by whatever means, the process dies too.

Linux only; elsewhere a supervisor that is killed with -9 leaves its processes running.
"""

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar, cast

from octavo.cli.explain import explain
from octavo.cli.settings.setting import DEBUG_VARIABLE
from octavo.wire.host import die_with

PARENT_VARIABLE = "OCTAVO_SUPERVISOR_PID"
EXIT_DRAINED = 77
"""How a gateway ends for its supervisor that an operator has drained: not to be started again, other than one that a
signal ended. Without a supervisor that is 0."""
EXIT_PLACE_LOST = 78
"""Of a process on a cluster whose host is gone, told in its place."""
EXIT_NO_PLACE = 79
"""Of a process for which the cluster had no room, told in its place."""
EXIT_NOT_STARTED = 80
"""Of a process for which this host had no descriptor, memory or process to spare, told in its place."""
CANNOT_START = "cannot_start"
"""The event of a line by which a process tells its supervisor why it ends, in the three parts of a CliError."""
Command = TypeVar("Command", bound=Callable[..., int])


def has_supervisor() -> bool:
    """Whether one started this process; to be asked before `die_with_supervisor`."""
    return bool(os.environ.get(PARENT_VARIABLE))


def told_to_supervisor(command: Command) -> Command:
    """A command of which the errors go to the supervisor, as a line of the log, where one started this process: they
    are shown once, by it."""

    @functools.wraps(command)
    def run(*arguments: Any) -> int:
        if not has_supervisor():
            return command(*arguments)
        try:
            return command(*arguments)
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exception(error)
            explained = explain(error)
            line = {"event": CANNOT_START, "level": "error"} | asdict(explained)
            print(json.dumps(line), file=sys.stderr, flush=True)  # noqa: T201
            return explained.exit_code

    return cast(Command, run)


def die_with_supervisor() -> None:
    """Called first in `octavo gateway` and `octavo worker`; does nothing where no supervisor started them.

    SIGKILL, since an orphan that drains for half a minute would hold ports and memory against the next start.
    """
    supervisor = os.environ.pop(PARENT_VARIABLE, "")
    if supervisor:
        die_with(int(supervisor))
