"""Tests on a Ray cluster of several raylets on this machine: `make test-cluster`, for they need the package ray."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.services.raylets import QUIET, Raylets, raylets

IS_ASKED_FOR = bool(os.environ.get("OCTAVO_RAYLETS"))
collect_ignore_glob = [] if IS_ASKED_FOR else ["test_*.py"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a driver on such a cluster has in its environment, and a run directory that no other service of this user
    writes to."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def cluster() -> Iterator[Raylets]:
    """A head without room for anything."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the package ray is not installed: pip install '.[ray]'")
    with raylets() as running:
        yield running
