import errno
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from octavo.cli.serve.launch import ProcessPlan, Role
from octavo.cli.serve.startup import LineStyle, LogLine, StartupView, parse_line, render_line

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


def test_a_terminal_gets_bars_that_follow_the_lines_and_then_the_lines_themselves() -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=100, record=True)
        view = StartupView(PLANS, console=console, level="info", style=LineStyle.PEOPLE)
        view.on_line("worker-0", '{"event": "loading_weights", "level": "info", "done": 1, "total": 4}')
        view.on_line("worker-0", '{"event": "careful", "level": "warning"}')
        view.on_line("gateway-9", RAW)
        assert view._bars is not None
        task = view._bars.tasks[0]
        assert (task.completed, task.total, task.fields["stage"]) == (1, 4, "careful")
        view.on_ready()
        view.on_line("worker-0", RAW)
    shown = console.export_text()
    assert "careful" in shown
    assert shown.count("loaded") == 1


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
