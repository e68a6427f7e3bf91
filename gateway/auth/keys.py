"""API keys: made, digested, compared.

Only digests are kept. A key has 256 random bits, so a plain SHA-256 of it cannot be searched through.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.gateway.auth.caller import Caller

KEY_PREFIX = "octavo-"  # so that scanners of repositories and logs can find one that leaked
MIN_KEY_LEN = 24
MAX_KEY_LEN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """digest: SHA-256 of the key, 32 bytes. expires_s: Unix time, None for never."""

    digest: bytes
    caller: Caller
    expires_s: float | None = None


def new_key() -> str:
    """A new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """Keys that are known. `find` costs the same whether, where and how early a key matches: the digest is compared
    with every entry's, each time whole (CVE-2025-59425 was a comparison that stopped early)."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> KeyEntry | None:
        """The entry of this key, expired ones included."""
        digest, compare, found = digest_of(key), hmac.compare_digest, 0
        for number, entry in enumerate(self._entries, start=1):
            found += number * compare(digest, entry.digest)  # no branch; digests differ, so at most one counts
        return self._entries[found - 1] if found else None
