"""What people see of a start: a bar per process on a terminal, plain lines elsewhere.

Fed with the lines that the processes write; must not know how they are started.
"""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cli.launch import ProcessPlan
from cli.lines import LogLine, parse_line, render_line


class StartupView:
    """Shows where each process stands until the service is ready; after that its lines as they come.

    Log lines and bars go to stderr. With raw_lines (log format json, or no terminal) lines pass through unchanged.
    """

    def __init__(self, plans: Sequence[ProcessPlan], *, console: Console, raw_lines: bool) -> None:
        self._console = console
        self._raw_lines = raw_lines
        self._bars = None if raw_lines else _progress(console)
        self._tasks: dict[str, TaskID] = {}
        if self._bars is not None:
            self._tasks = {each.name: self._bars.add_task(each.label, total=None, stage="starting") for each in plans}
            self._bars.start()

    def on_line(self, name: str, raw: str) -> None:
        """A process wrote a line."""
        if self._raw_lines:
            sys.stderr.write(raw + "\n")
            sys.stderr.flush()
            return
        line = parse_line(raw)
        if self._bars is not None:
            self._advance(name, line)
        if self._bars is None or line.is_notable:
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
        if self._bars is None or not line.level:
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
