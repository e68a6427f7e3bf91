"""What a defect leaves in the log: where it was, and no value of any variable."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

GATEWAY = """
from octavo.gateway.observability.logs import LogWriter
from octavo.wire.logs import configure_logs
writer = LogWriter(sys.stderr)
configure_logs(sys.argv[1], "debug", lambda *_: writer)
close = writer.close
"""
WORKER = """
from octavo.wire.logs import configure_logs
configure_logs(sys.argv[1], "debug")
close = lambda: None
"""
DEFECT = """
import structlog
def handler(prompt, key):
    raise RuntimeError("a defect")
try:
    handler("-".join(["the", "prompt"]), "-".join(["the", "key"]))
except RuntimeError as error:
    structlog.get_logger().error("defect", exc_info=error)
close()
"""


@pytest.mark.parametrize("process", ["gateway", "worker"])
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_tells_no_values(process: str, log_format: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\n" + (GATEWAY if process == "gateway" else WORKER) + DEFECT)
    done = subprocess.run(
        [sys.executable, str(program), log_format],
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    written = done.stdout + done.stderr
    assert "RuntimeError: a defect" in written
    assert "handler" in written
    assert [word for word in ("the-prompt", "the-key") if word in written] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full")
@pytest.mark.parametrize("process", ["gateway", "worker"])
@pytest.mark.parametrize("end", ["2>/dev/full", "2>&1 >/dev/null | true"])
def test_a_log_that_cannot_be_written_ends_no_process(process: str, end: str, tmp_path: Path) -> None:
    program, done = tmp_path / "program.py", tmp_path / "done"
    wait, goes_on = "import time; time.sleep(0.5)\n", f"open({str(done)!r}, 'w').close()\n"
    program.write_text("import sys\n" + (GATEWAY if process == "gateway" else WORKER) + wait + DEFECT + goes_on)
    subprocess.run(["sh", "-c", f'"$0" "$1" json {end}', sys.executable, str(program)], timeout=60, check=False)
    assert done.exists()


@pytest.mark.parametrize(
    ("environment", "has_colours"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_has_colours_where_its_user_wants_some(
    environment: dict[str, str], has_colours: bool, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    program = tmp_path / "program.py"
    program.write_text("import sys\n" + WORKER + DEFECT)
    env = dict(os.environ) | {"TERM": "xterm", "NO_COLOR": ""} | environment
    subprocess.run([sys.executable, str(program), "auto"], env=env, stderr=theirs, timeout=60, check=True)
    os.close(theirs)
    written = os.read(ours, 65536)
    os.close(ours)
    assert b"defect" in written
    assert (b"\x1b[" in written) == has_colours
