"""Files of keys, and authorities."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gateway.certificates import Authority


@pytest.fixture
def write_keys(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file of keys, 0600, in one step; gives its path."""

    def write(text: str) -> Path:
        path, scratch = tmp_path / "api-keys.toml", tmp_path / "scratch"
        scratch.write_text(text)
        scratch.chmod(0o600)
        return scratch.replace(path)

    return write


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The one that the gateway trusts."""
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another one."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")
