"""What a process's log line means to the supervisor, and how it looks to people. Pure."""

import json
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

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
