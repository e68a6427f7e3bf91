"""Files of keys, gateways that ask for them, and authorities."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.config import AccessConfig
from tests.support.gateway.certificates import Authority
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.keyed import FILE


@pytest.fixture
def write_keys(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file of keys, 0600, in one step; gives its path."""

    def write(text: str) -> Path:
        path, scratch = tmp_path / "api-keys.toml", tmp_path / "scratch"
        scratch.write_text(text)
        scratch.chmod(0o600)
        return scratch.replace(path)

    return write


@pytest.fixture
def guarded(serve: Any, write_keys: Callable[[str], Path]) -> Callable[..., Any]:
    """As `serve`, with `FILE` (or another) in force."""

    def serving(pool: FakePool | None = None, *, file: str = FILE, **changes: Any) -> Any:
        access = AccessConfig(api_keys_file=write_keys(file), reload_interval_s=0.05)
        return serve(pool, access=access, **changes)

    return serving


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The one that the gateway trusts."""
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another one."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")
