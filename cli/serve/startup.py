"""Shows a start: reads the processes' log lines and draws a bar per process on a terminal, plain lines elsewhere.

Fed with the lines that the processes write; must not know how they are started.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from octavo.cli.serve.launch import ProcessPlan

SUPERVISOR = "supervisor"
_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_SEVERITY = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A structured line: its event and fields. A line that is no JSON has the level "" and is all event."""

    event: str
    level: str = ""
    time: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def is_at_least(self, level: str) -> bool:
        """Whether it is as severe as that; what is no log line at all always is."""
        return _SEVERITY.get(self.level, 50) >= _SEVERITY[level]


def parse_line(raw: str) -> LogLine:
    """The line as written by structlog's JSON renderer, or plain text."""
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
    """Whom log lines are for."""

    PEOPLE = "people"
    PROGRAMS = "programs"


class StartupView:
    """Shows where each process stands until the service is ready; after that its lines as they come.

    Log lines and bars go to stderr. While there are bars, only warnings and worse show besides. raw_lines (log format
    json, or no terminal): lines pass through unchanged. loaded: what each worker said of its model, by worker.
    """

    def __init__(self, plans: Sequence[ProcessPlan], *, console: Console, level: str, style: LineStyle) -> None:
        self.loaded: dict[str, dict[str, Any]] = {}
        self._console = console
        self._level = level
        self._style = style
        self._bars = _progress(console) if console.is_terminal and style is LineStyle.PEOPLE else None
        self._tasks: dict[str, TaskID] = {}
        if self._bars is not None:
            self._tasks = {each.name: self._bars.add_task(each.label, total=None, stage="starting") for each in plans}
            self._bars.start()

    def on_line(self, name: str, raw: str) -> None:
        """A process wrote a line."""
        line = parse_line(raw)
        if line.event == "loaded":
            self.loaded[name] = line.fields
        if self._bars is not None:
            self._advance(name, line)
        if line.is_at_least("warning" if self._bars is not None else self._level):
            self._show(name, raw, line)

    def notice(self, text: str) -> None:
        """A line of the supervisor itself."""
        raw = json.dumps({"event": text, "level": "info", "process": SUPERVISOR})
        self._show(SUPERVISOR, raw, LogLine(event=text, level="info"))

    def _show(self, name: str, raw: str, line: LogLine) -> None:
        # A full disk or a reader that went away must not stop the processes, which would block on their own pipes.
        with contextlib.suppress(OSError):
            if self._style is LineStyle.PROGRAMS:
                sys.stderr.write(raw + "\n")
                sys.stderr.flush()
            else:
                self._console.print(render_line(name, line), soft_wrap=True)

    def on_ready(self) -> None:
        """The service answers: no more bars."""
        self.close()

    def close(self) -> None:
        """Take the bars away. Idempotent."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _advance(self, name: str, line: LogLine) -> None:
        if self._bars is None or not line.level or name not in self._tasks:
            return
        done, total = line.fields.get("done"), line.fields.get("total")
        self._bars.update(
            self._tasks[name],
            stage=line.event.replace("_", " "),
            completed=done if isinstance(done, int | float) else None,
            total=total if isinstance(total, int | float) else None,
        )


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[stage]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
