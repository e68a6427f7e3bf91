"""A person who has set nothing yet."""

from pathlib import Path

import pytest

from octavo.cli.settings.groups import ALL_KEYS
from octavo.cli.settings.setting import variable_of


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub" / "cache"))
    for name in map(variable_of, ALL_KEYS):
        monkeypatch.delenv(name, raising=False)
