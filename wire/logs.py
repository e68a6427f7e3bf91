"""Log lines of a process: one per change of state, JSON for programs or key=value for people.

Where the lines go is the caller's choice. Prompts and outputs are never logged, not even in a traceback.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """As if the module were not installed."""
    found = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
        if found is not None:
            sys.modules[module] = found


with _hidden("rich"):  # which colours the tracebacks that no log here has; importing it takes 0.1 s of CPU time
    import structlog

LOG_FORMATS = ("auto", "console", "json")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def write_line(stream: TextIO, line: str) -> None:
    """At once. Never raises: what a full disk or a reader that went away does not take is lost, and ends no process; so
    is the line of a signal's handler in the middle of another one, for which Python has a RuntimeError."""
    with suppress(OSError, ValueError, RuntimeError):
        stream.write(line + "\n")
        stream.flush()


class _StderrLogger:
    """Writes to sys.stderr as it is at that moment, because tests replace it."""

    def msg(self, line: str) -> None:
        """Never raises."""
        write_line(sys.stderr, line)

    debug = info = warning = error = critical = exception = log = msg


def configure_logs(log_format: str, log_level: str, logger_factory: Callable[..., Any] | None = None) -> None:
    """For the whole process. log_format: one of LOG_FORMATS; "auto" depends on whether stderr is a terminal.
    logger_factory: makes what writes the lines; None: straight to stderr. Raises ValueError."""
    if log_format not in LOG_FORMATS or log_level not in _LEVELS:
        raise ValueError(f"unknown log format {log_format!r} or level {log_level!r}")
    if log_format == "console" or (log_format == "auto" and sys.stderr.isatty()):
        # The default formatter prints the local variables of every frame: prompts and keys among them.
        formatter = structlog.dev.plain_traceback
        rendering: list[Any] = [structlog.dev.ConsoleRenderer(colors=_shows_colours(), exception_formatter=formatter)]
    else:
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[log_level]),
        logger_factory=logger_factory or (lambda *_: _StderrLogger()),
    )


def _shows_colours() -> bool:
    """Whether stderr is a terminal with colours, and its user wants them (https://no-color.org)."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return sys.stderr.isatty() and not is_plain
