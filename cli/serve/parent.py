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
"""Exit code of a gateway that an operator has drained, if it has a supervisor: it is not to be restarted, unlike one
that a signal ended. Without a supervisor it exits with 0."""
EXIT_PLACE_LOST = 78
"""Stands for the exit code of a process on a cluster whose host is gone."""
EXIT_NO_PLACE = 79
"""Stands for the exit code of a process for which the cluster had no room."""
EXIT_NOT_STARTED = 80
"""Stands for the exit code of a process that could not be started for want of descriptors, memory or processes."""
CANNOT_START = "cannot_start"
"""The event of a log line that tells the supervisor why a process ends; its fields are the parts of a CliError."""
Command = TypeVar("Command", bound=Callable[..., int])


def has_supervisor() -> bool:
    """Whether a supervisor started this process; call it before `die_with_supervisor`."""
    return bool(os.environ.get(PARENT_VARIABLE))


def told_to_supervisor(command: Command) -> Command:
    """Decorates a command: if a supervisor started this process, an error goes to it as a log line, and only the
    supervisor shows it."""

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
    """Call it first in every command that a supervisor may start; does nothing if none did.

    The process dies by SIGKILL, since an orphan that drains for half a minute would keep ports and memory from the next
    start.
    """
    supervisor = os.environ.pop(PARENT_VARIABLE, "")
    if supervisor:
        die_with(int(supervisor))
