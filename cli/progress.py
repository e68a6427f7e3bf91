"""How far something is, as a person sees it: a bar with amount, rate and time left on a terminal, else plain lines.

    ⠹ worker-0 (Qwen/Qwen2.5-0.5B)  loading weights  ━━━━━━━━╸━━━━━━  0.6/1.0 GB · 412 MB/s · 0:00:01 left

Must not know what is counted, nor who counts.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

BYTES = "bytes"
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
PLAIN_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A stage, and how much of it is done; None if there is nothing to count. unit: "bytes", or "" for items."""

    stage: str
    done: float | None = None
    total: float | None = None
    unit: str = ""


def can_redraw(console: Console) -> bool:
    """Whether lines can be drawn again where they stand: on a terminal, unless it is one that says it is dumb
    (TERM=dumb, as in an editor), where rich would show nothing at all."""
    return console.is_terminal and not console.is_dumb_terminal


class Bars:
    """One row per name on a terminal. Every stage starts with a new bar."""

    def __init__(self, console: Console, labels: Mapping[str, str], *, stage: str = "starting") -> None:
        self.progress = _progress(console)
        self._tasks: dict[str, TaskID] = {
            name: self.progress.add_task(label, total=None, stage=stage, unit="") for name, label in labels.items()
        }
        self.progress.start()

    def show(self, name: str, step: Step) -> None:
        """Update the row of this name; an unknown name is ignored."""
        if name not in self._tasks:
            return
        task_id, stage = self._tasks[name], step.stage.replace("_", " ")
        if self._task(task_id).fields["stage"] != stage:
            # A row that once was full counts as finished, its spinner and its clock gone, until it is begun anew; and
            # neither reset() nor update() takes a total away.
            self.progress.reset(task_id, stage=stage, unit=step.unit)
            self._task(task_id).total = None
        self.progress.update(task_id, completed=step.done, total=step.total)

    def close(self) -> None:
        """Remove the rows."""
        self.progress.stop()

    def _task(self, task_id: TaskID) -> Task:
        return next(task for task in self.progress.tasks if task.id == task_id)


@dataclass(slots=True)
class PlainSteps:
    """Lines for a file or a pipe: the beginning and the end of each stage, and one every two seconds in between."""

    clock: Callable[[], float] = time.monotonic
    _rows: dict[str, "_Row"] = field(default_factory=dict)

    def line(self, name: str, step: Step) -> str | None:
        """The line to write for this step; None if the last one is too recent, or the same."""
        now_s = self.clock()
        row = self._rows.get(name)
        if row is None or row.stage != step.stage:
            row = self._rows[name] = _Row(stage=step.stage, begin_s=now_s, begin_done=step.done or 0.0, told_s=now_s)
        elif row.is_ended or (now_s - row.told_s < PLAIN_INTERVAL_S and not _is_end(step)):
            return None
        row.told_s, row.is_ended = now_s, _is_end(step)
        rate = ((step.done or 0.0) - row.begin_done) / (now_s - row.begin_s) if now_s > row.begin_s else None
        left_s = (step.total - (step.done or 0.0)) / rate if rate and step.total and not row.is_ended else None
        figures = figures_of(step, rate=rate, left_s=left_s)
        return " ".join(filter(None, (step.stage.replace("_", " "), figures)))


@dataclass(slots=True, kw_only=True)
class _Row:
    stage: str
    begin_s: float
    begin_done: float
    told_s: float
    is_ended: bool = False


def figures_of(step: Step, *, rate: float | None, left_s: float | None) -> str:
    """Amount, rate per second and time left, as far as they are known."""
    if step.done is None:
        return ""
    parts = [_amount(step)]
    parts += [f"{shown_bytes(rate)}/s"] if rate and step.unit == BYTES else []
    parts += [f"{shown_time(left_s)} left"] if left_s is not None else []
    return " · ".join(parts)


def shown_bytes(count: float) -> str:
    """For example 1.5 GB: decimal units, as hubs and disks use."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.{1 if count < 100 * size else 0}f} {unit}"
    return f"{count:.0f} B"


def shown_time(seconds: float) -> str:
    """For example 0:01:09."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _amount(step: Step) -> str:
    done = step.done or 0.0
    if step.unit != BYTES:
        return f"{done:,.0f}" + (f"/{step.total:,.0f}" if step.total else "")
    return shown_bytes(done) + (f" of {shown_bytes(step.total)}" if step.total else "")


def _is_end(step: Step) -> bool:
    return step.done is not None and step.done == step.total


class _Spinner(SpinnerColumn):
    """Spins as long as the row exists: when one stage's count is complete, the next stage follows."""

    def render(self, task: Task) -> RenderableType:
        return self.spinner.render(task.get_time())


class _Figures(ProgressColumn):
    """Amount, rate and time left of a row."""

    def render(self, task: Task) -> Text:
        counts = task.total is not None or task.completed
        step = Step(stage="", done=task.completed if counts else None, total=task.total, unit=task.fields["unit"])
        left_s = None if task.finished else task.time_remaining
        return Text(figures_of(step, rate=task.speed, left_s=left_s), style="progress.remaining")


def _progress(console: Console) -> Progress:
    """Columns as wide as their longest content, so that nothing jumps. On a narrow terminal, labels are shortened and
    there is no bar beside the figures."""
    is_wide = console.width >= 110
    label = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    stage = Column(no_wrap=True, overflow="ellipsis", width=20)
    return Progress(
        _Spinner(),
        TextColumn("{task.description}", markup=False, table_column=label),
        TextColumn("{task.fields[stage]}", markup=False, table_column=stage),
        *([BarColumn(bar_width=20)] if is_wide else []),
        _Figures(table_column=Column(no_wrap=True, overflow="ellipsis", width=46 if console.width >= 78 else 28)),
        *([TimeElapsedColumn()] if console.width >= 120 else []),
        console=console,
        transient=True,
        expand=True,
    )
