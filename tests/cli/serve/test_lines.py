import errno
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.spinner import SPINNERS

from octavo.cli.serve.launch import ProcessPlan, Role
from octavo.cli.serve.parent import PARENT_VARIABLE, told_to_supervisor
from octavo.cli.serve.startup import LineStyle, LogLine, StartupView, parse_line, render_line
from octavo.wire.endpoints import EndpointError

RAW = '{"event": "loaded", "level": "info", "timestamp": "2026-01-02T03:04:05.6Z", "num_blocks": 3, "device": "cpu"}'
PLANS = [ProcessPlan(name="worker-0", role=Role.WORKER, settings={"model": ["m"]}, metrics_port=1)]


def test_a_structured_line_is_taken_apart() -> None:
    fields = {"num_blocks": 3, "device": "cpu"}
    expected = LogLine(event="loaded", level="info", time="2026-01-02T03:04:05.6Z", fields=fields)
    assert parse_line(RAW) == expected
    assert render_line("worker-0", expected).plain == "03:04:05 worker-0   info    loaded num_blocks=3 device=cpu"


@given(st.text())
def test_any_other_line_is_all_event(text: str) -> None:
    line = parse_line(text)
    is_structured = text.startswith("{") and '"event"' in text
    assert is_structured or line == LogLine(event=text)


@pytest.mark.parametrize(
    ("level", "least", "shows"),
    [("info", "info", True), ("info", "warning", False), ("error", "warning", True), ("", "error", True)],
)
def test_lines_show_from_their_level_on_and_a_traceback_always_does(level: str, least: str, shows: bool) -> None:
    assert LogLine(event="e", level=level).is_at_least(least) is shows


def test_programs_get_lines_unchanged_and_the_view_keeps_what_was_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    view = StartupView(PLANS, console=Console(stderr=True), level="info", style=LineStyle.PROGRAMS)
    view.on_line("worker-0", RAW)
    view.on_line("worker-0", '{"event": "detail", "level": "debug"}')
    view.notice("draining")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == RAW
    assert json.loads(lines[1]) == {"event": "draining", "level": "info", "process": "supervisor"}
    assert len(lines) == 2
    assert view.loaded == {"worker-0": {"num_blocks": 3, "device": "cpu"}}


def test_a_process_that_cannot_start_tells_its_supervisor_in_three_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @told_to_supervisor
    def command() -> int:
        raise EndpointError("'x' is no endpoint")

    with pytest.raises(EndpointError):  # nobody else shows it
        command()
    monkeypatch.setenv(PARENT_VARIABLE, "1")
    assert command() == 2
    line = capsys.readouterr().err
    view = StartupView(PLANS, console=Console(stderr=True), level="info", style=LineStyle.PROGRAMS)
    view.on_line("worker-0", line)
    assert capsys.readouterr().err == ""  # the service ends with it
    refused = view.refused["worker-0"]
    assert (refused.what, refused.numbers, refused.exit_code) == ("bad endpoint", "'x' is no endpoint", 2)
    view.on_ready()
    view.on_line("worker-0", line)  # of a later life: the service goes on
    assert "'x' is no endpoint" in capsys.readouterr().err


def test_a_terminal_gets_bars_that_follow_the_lines_and_then_the_lines_themselves() -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=100, record=True)
        view = StartupView(PLANS, console=console, level="info", style=LineStyle.PEOPLE)
        view.on_line("worker-0", '{"event": "loading_weights", "level": "info", "done": 1, "total": 4}')
        view.on_line("worker-0", '{"event": "careful", "level": "warning"}')
        view.on_line("gateway-9", RAW)
        assert view._bars is not None
        task = view._bars.progress.tasks[0]
        assert (task.completed, task.total, task.fields["stage"]) == (1, 4, "loading weights")
        view.on_ready()
        view.on_line("worker-0", RAW)
    shown = console.export_text()
    assert "careful" in shown
    assert shown.count("loaded") == 1


def test_what_is_for_people_goes_where_lines_are_taken_once_there_are_no_bars() -> None:
    lines: list[str] = []
    console = Console(file=io.StringIO(), width=60)
    view = StartupView(PLANS, console=console, level="info", style=LineStyle.PEOPLE, write=lines.append)
    view.notice("word " * 30)
    view.on_line("worker-0", RAW)
    assert lines[0].count("word") == 30
    assert lines[1] == render_line("worker-0", parse_line(RAW)).plain


def row_of(view: StartupView, *, width: int = 120) -> str:
    """The worker's row as it stands now."""
    assert view._bars is not None
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(view._bars.progress.get_renderable())
    return captured.get().splitlines()[0]


def told(stage: str, **fields: object) -> str:
    return json.dumps({"event": stage, "level": "info", **fields})


STAGES = [
    *(("downloading", {"done": done, "total": 8_000_000_000, "unit": "bytes"}) for done in (0, 4e9, 8e9)),
    *(("loading_weights", {"done": done, "total": 8_000_000_000, "unit": "bytes"}) for done in (0, 8e9)),
    ("packing_weights", {}),
    *(("warming_up", {"done": done, "total": 3}) for done in (0, 3)),
    *(("recording_steps", {"done": done, "total": 3}) for done in (0, 1, 3)),
    ("listening", {}),
]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_stage_has_a_spinner_that_turns_and_a_bar_of_its_own(width: int) -> None:
    """Also one that follows a stage that was full, whether it counts as far, otherwise, or not at all."""
    spinner = set(SPINNERS["dots"]["frames"])
    with open("/dev/null", "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=width)
        view = StartupView(PLANS, console=console, level="info", style=LineStyle.PEOPLE)
        for stage, fields in STAGES:
            view.on_line("worker-0", told(stage, **fields))
            row, task = row_of(view, width=width), view._bars.progress.tasks[0]  # type: ignore[union-attr]
            assert row[0] in spinner, (stage, fields, row)
            assert stage.replace("_", " ") in row
            assert (task.total, task.completed) == (fields.get("total"), fields.get("done", 0))
            assert task.finished == ("done" in fields and fields["done"] == fields["total"])
        view.close()


def test_what_counts_bytes_shows_amount_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=120)
        view = StartupView(PLANS, console=console, level="info", style=LineStyle.PEOPLE)
        assert view._bars is not None
        for second, done in enumerate((0, 1e9, 2e9, 3e9)):
            view._bars.progress.get_time = lambda now_s=second: 100.0 + now_s  # type: ignore[method-assign, misc]
            view.on_line("worker-0", told("loading_weights", done=done, total=8e9, unit="bytes"))
        assert "3.0 GB of 8.0 GB · 1.0 GB/s · 0:00:05 left" in row_of(view)
        view.close()


def test_a_dumb_terminal_gets_plain_lines() -> None:
    """Bars would be drawn nowhere, and hide the lines that are no warnings."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, _environ={"TERM": "dumb"})
    view = StartupView(PLANS, console=console, level="info", style=LineStyle.PEOPLE)
    view.on_line("worker-0", told("loading_weights", done=1, total=8))
    view.on_line("worker-0", RAW)
    view.close()
    assert "loading weights" in out.getvalue()
    assert "loaded" in out.getvalue()


def test_people_without_a_terminal_get_plain_lines_and_not_one_for_each_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.StringIO()
    view = StartupView(PLANS, console=Console(file=out, width=200), level="info", style=LineStyle.PEOPLE)
    now_s = 0.0
    view._steps.clock = lambda: now_s
    for now_s in range(8):
        view.on_line("worker-0", told("loading_weights", done=now_s * 1_000_000, total=7_000_000, unit="bytes"))
    view.on_line("worker-0", told("packing_weights"))
    assert [line.split("info")[1].strip() for line in out.getvalue().splitlines()] == [
        "loading weights 0 B of 7.0 MB",
        "loading weights 2.0 MB of 7.0 MB · 1.0 MB/s · 0:00:05 left",
        "loading weights 4.0 MB of 7.0 MB · 1.0 MB/s · 0:00:03 left",
        "loading weights 6.0 MB of 7.0 MB · 1.0 MB/s · 0:00:01 left",
        "loading weights 7.0 MB of 7.0 MB · 1.0 MB/s",
        "packing_weights",
    ]


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("style", LineStyle)
def test_a_log_that_cannot_be_written_stops_nothing(style: LineStyle, monkeypatch: pytest.MonkeyPatch) -> None:
    full = FullDisk()
    monkeypatch.setattr("sys.stderr", full)
    view = StartupView(PLANS, console=Console(file=full), level="info", style=style)
    view.on_line("worker-0", RAW)
    view.notice("draining")
    assert view.loaded == {"worker-0": {"num_blocks": 3, "device": "cpu"}}
