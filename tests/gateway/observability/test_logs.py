"""What a defect leaves in the log: where it was, and no value of any variable."""

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
