"""Shows startup progress from the processes' log lines: a row for each process on a terminal, else plain lines.

Must not know how processes are started.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from octavo.cli.errors import CliError
from octavo.cli.progress import Bars, PlainSteps, Step, can_redraw
from octavo.cli.serve.launch import ProcessPlan, Role
from octavo.cli.serve.parent import CANNOT_START
from octavo.gateway.observability.logs import LogWriter
from octavo.wire.logs import write_line

SUPERVISOR = "supervisor"
POLL_S = 0.1
_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_SEVERITY = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A log line: its event and fields. For a line that is not JSON, event is the whole line and level is ""."""

    event: str
    level: str = ""
    time: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def is_at_least(self, level: str) -> bool:
        """Whether it is at least that severe; a line that is not JSON always is."""
        return _SEVERITY.get(self.level, 50) >= _SEVERITY[level]


def parse_line(raw: str) -> LogLine:
    """Parse a line that structlog's JSON renderer wrote, or plain text."""
    if raw.startswith("{"):
        try:
            fields = json.loads(raw)
        except json.JSONDecodeError:
            return LogLine(event=raw)
        if isinstance(fields, dict) and "event" in fields:
            event, level = str(fields.pop("event")), str(fields.pop("level", "info"))
            return LogLine(event=event, level=level, time=str(fields.pop("timestamp", "")), fields=fields)
    return LogLine(event=raw)


def render_line(name: str, line: LogLine) -> Text:
    """For a terminal: time, process, level, event, fields."""
    text = Text()
    if line.time:
        text.append(line.time[11:19] + " ", "dim")
    text.append(f"{name:<10} ", "cyan")
    if line.level:
        text.append(f"{line.level:<8}", _STYLES.get(line.level, ""))
    text.append(line.event, "bold" if line.level else "")
    for key, value in line.fields.items():
        text.append(f" {key}=", "dim")
        text.append(value if isinstance(value, str) else json.dumps(value))
    return text


class LineStyle(Enum):
    """Who reads the log lines."""

    PEOPLE = "people"
    PROGRAMS = "programs"

    @classmethod
    def of(cls, log_format: str, console: Console) -> "LineStyle":
        """log_format "auto" means people on a terminal, else programs."""
        if log_format == "auto":
            return cls.PEOPLE if console.is_terminal else cls.PROGRAMS
        return cls.PROGRAMS if log_format == "json" else cls.PEOPLE


@contextlib.contextmanager
def stderr_in_a_thread() -> Iterator[Callable[[str], object]]:
    """Yields a function that writes a line to stderr without waiting for the reader: one that has stopped (Ctrl-S, a
    pager) must block neither the supervisor nor, through their pipes, its processes. Uses its own file object, since a
    thread blocked in sys.stderr would hold its lock."""
    try:
        stream: TextIO = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding, errors="replace")
    except (OSError, ValueError):  # sys.stderr was replaced by an object that is not a file
        stream = sys.stderr
    writer = LogWriter(stream)
    try:
        yield writer.msg
    finally:
        writer.close()


class StartupView:
    """Shows the progress of each process until the service is ready; after that, log lines as they come.

    Log lines and bars go to stderr. While there are bars, only warnings and worse are shown besides. For programs (log
    format json, or no terminal) lines pass through unchanged; for people without a terminal, progress is shown as plain
    lines, one every two seconds. loaded: fields of each worker's "loaded" line, by worker. page: address of the live
    page, as its gateway reported it; None if there is none. open: processes that listen, each with the ids of workers
    that registered there. refused: errors of processes that could not start before the service was ready, by process;
    the service ends and reports them. write: takes a line if there are no bars; None: it is written at once.
    """

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        *,
        console: Console,
        level: str,
        style: LineStyle,
        write: Callable[[str], object] | None = None,
    ) -> None:
        self._write = write
        self.loaded: dict[str, dict[str, Any]] = {}
        self.open: dict[str, set[str]] = {}
        self.refused: dict[str, CliError] = {}
        self._is_ready = False
        self.page: str | None = None
        self._console = console
        self._level = level
        self._style = style
        self._steps = PlainSteps()
        is_watched = can_redraw(console) and style is LineStyle.PEOPLE
        self._bars = Bars(console, {each.name: each.label for each in plans}) if is_watched else None

    def on_line(self, name: str, raw: str) -> None:
        """Handle a line that a process wrote."""
        line = parse_line(raw)
        if line.event == "loaded":
            self.loaded[name] = line.fields
        if line.event == "listening":
            self.page = line.fields.get("page") or self.page
            self.open.setdefault(name, set())
        if line.event == "worker_ready":
            self.open.setdefault(name, set()).add(str(line.fields.get("worker_id")))
        if line.event == CANNOT_START and not self._is_ready:
            self.refused[name] = CliError(**line.fields)
            return
        step = _step(line)
        if self._bars is not None and step is not None:
            with contextlib.suppress(OSError):  # see `_show`
                self._bars.show(name, step)
        if line.is_at_least("warning" if self._bars is not None else self._level):
            if step is not None and step.done is not None and self._style is LineStyle.PEOPLE:
                self._show_step(name, step, line)
            else:
                self._show(name, raw, line)

    async def gateways_are_open(self, plans: Sequence[ProcessPlan]) -> None:
        """Wait until the gateways on other hosts, which are not asked, have logged that they listen and that all
        workers have registered."""
        num_workers = sum(each.role is Role.WORKER for each in plans)
        placed = [each.name for each in plans if each.role is Role.GATEWAY and each.is_placed]
        while any(len(self.open.get(name, ())) < num_workers for name in placed):  # noqa: ASYNC110  (lines of others)
            await asyncio.sleep(POLL_S)

    def notice(self, text: str) -> None:
        """Show a line of the supervisor itself."""
        raw = json.dumps({"event": text, "level": "info", "process": SUPERVISOR})
        self._show(SUPERVISOR, raw, LogLine(event=text, level="info"))

    def _show(self, name: str, raw: str, line: LogLine) -> None:
        # A full disk or a reader that is gone must not stop the processes, which would block on their own pipes.
        with contextlib.suppress(OSError):
            if self._style is LineStyle.PROGRAMS:
                (self._write or partial(write_line, sys.stderr))(raw)
            elif self._bars is not None or self._write is None:
                self._console.print(render_line(name, line), soft_wrap=True)
            else:
                with self._console.capture() as shown:
                    self._console.print(render_line(name, line), soft_wrap=True, end="")
                self._write(shown.get())

    def _show_step(self, name: str, step: Step, line: LogLine) -> None:
        text = self._steps.line(name, step)
        if text is not None:
            self._show(name, "", LogLine(event=text, level=line.level, time=line.time))

    def on_ready(self) -> None:
        """The service is ready: remove the bars."""
        self._is_ready = True
        self.close()

    def close(self) -> None:
        """Remove the bars. Idempotent."""
        if self._bars is not None:
            self._bars.close()
            self._bars = None


def _step(line: LogLine) -> Step | None:
    """The progress that a line reports; None if it reports none, as with a warning."""
    if line.level not in ("info", "debug"):
        return None
    done, total = (line.fields.get(name) for name in ("done", "total"))
    return Step(
        stage=line.event,
        done=done if isinstance(done, int | float) else None,
        total=total if isinstance(total, int | float) else None,
        unit=str(line.fields.get("unit", "")),
    )
