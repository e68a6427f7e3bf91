"""How `octavo verify` sets up its process before torch is there."""

import subprocess
import sys

import pytest

SPY = """
import importlib.abc, os, sys

class Spy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("policy:", os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Spy())
"""
VERIFY = "from octavo.cli.main import main; main(['verify', 'folio-chat'])"


@pytest.mark.parametrize("chosen", [None, "active"])
def test_threads_sleep_while_they_wait_unless_somebody_chose(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifying with threads that spin took thirteen times as long on a busy machine, and so with two ranks minutes."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    ended = subprocess.run([sys.executable, "-c", SPY + VERIFY], capture_output=True, text=True, timeout=120)
    assert f"policy: {chosen or 'passive'}" in ended.stdout, ended.stderr
