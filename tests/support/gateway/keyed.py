"""Callers with API keys, and the calls that they make."""

from octavo.gateway.auth.authenticator import digest_of
from tests.support.gateway.fake_pool import FakePool, FakeRun

KEYS = {name: f"octavo-the-key-of-{name}-0123456789" for name in ("ann", "bob", "ops", "old", "eve")}
FILE = f"""
[keys.ann]
sha256 = "{digest_of(KEYS["ann"]).hex()}"
[keys.bob]
sha256 = "{digest_of(KEYS["bob"]).hex()}"
[keys.ops]
sha256 = "{digest_of(KEYS["ops"]).hex()}"
scopes = ["admin", "reflection"]
[keys.old]
sha256 = "{digest_of(KEYS["old"]).hex()}"
expires = 2020-01-01T00:00:00Z
"""


def as_(name: str) -> tuple[tuple[str, str], ...]:
    """The metadata of this caller's calls."""
    return (("authorization", f"Bearer {KEYS[name]}"),)


def answers(*ids: int) -> FakePool:
    """A pool that sends these tokens at once."""

    def run(run: FakeRun) -> None:
        run.tokens(list(ids))
        run.finish()

    return FakePool(on_run=run)
