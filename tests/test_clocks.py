"""Only what is a date asks for the date: durations, deadlines and waits go by monotonic clocks alone."""

import ast
from pathlib import Path

import pytest

FOLDERS = ("blockmgr", "cli", "gateway", "grammar", "model", "proto/octavo", "sim", "wire", "worker")
WALL = {
    "time": {"time", "time_ns", "gmtime", "localtime", "ctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
# Moments that leave the process, or that a person wrote down.
DATES = {
    "cli/bench/run.py": ["time.strftime"],  # when something was measured
    "cli/serve/record.py": ["time.time", "time.time"],  # where only a date tells when a process began
    "cli/tools/ps.py": ["time.time"],  # likewise
    "cli/tools/doctor_checks.py": ["time.time"],  # how long until a certificate ends
    "cli/tools/top_screen.py": ["time.localtime", "time.strftime"],  # the clock on the screen
    "gateway/front/app.py": ["time.time"],  # the interface's own timestamps
    "gateway/text/chat_template.py": ["datetime.now"],
    "gateway/auth/authenticator.py": ["time.time"],  # an API key's expiry
    "gateway/auth/reloader.py": ["time.time"],  # likewise
    "gateway/dialects/vllm/info.py": ["datetime.now", "datetime.now"],  # the dialect's own timestamps
    "gateway/dialects/vllm/messages.py": ["time.time"],
    "gateway/dialects/openengine/info.py": ["time.time_ns"],  # and of that one
    "gateway/dialects/openengine/messages.py": ["time.time_ns"],
    "gateway/observability/tracing.py": ["time.time_ns"],  # spans begin at a date
    "gateway/watching/watch.py": ["time.time"],  # when a snapshot was taken
    "gateway/workers/prefix_index.py": ["time.time_ns"],  # where numbers of KV events begin, above a former life's
}


def wall_clocks(source: str) -> list[str]:
    """Every use of a wall clock, as it is written."""
    found = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in WALL.get(ast.unparse(node.value).split(".")[-1], ()):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module in WALL:
            found += [f"{node.module}.{each.name}" for each in node.names if each.name in WALL[node.module]]
    return sorted(found)


def test_only_dates_ask_for_the_date(repository: Path) -> None:
    sources = {path: path.read_text() for folder in FOLDERS for path in (repository / folder).rglob("*.py")}
    found = {str(path.relative_to(repository)): wall_clocks(text) for path, text in sources.items()}
    assert len(sources) > 100
    assert {name: uses for name, uses in found.items() if uses} == DATES


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\nstart = time.time()", ["time.time"]),
        ("from time import time as now", ["time.time"]),
        ("import datetime\nx = datetime.datetime.now()", ["datetime.datetime.now"]),
        ("import time\nstart = time.monotonic() + time.perf_counter()", []),
    ],
)
def test_a_wall_clock_is_found_however_it_is_written(source: str, found: list[str]) -> None:
    assert wall_clocks(source) == found
