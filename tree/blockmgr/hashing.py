"""The hash chain over full blocks.

    root = H(secret; fingerprint, salt)        one per salt, never published
    h[0] = H(root + tokens of block 0)         h[i] = H(h[i-1] + tokens of block i)

Nothing here is a proof of equality: the prefix index compares tokens on every hit.
"""

import secrets
from collections.abc import Callable
from hashlib import blake2b

HashBlock = Callable[[bytes, bytes], bytes]
"""(parent digest, token bytes of one block) -> digest."""

_DIGEST_BYTES = 16
_ROOT_PERSON = b"octavo.kv.root.1"  # at most 16 bytes: keeps roots apart from every other use of the hash


def hash_block(parent: bytes, token_bytes: bytes) -> bytes:
    """The next digest of a chain: BLAKE2b (RFC 7693) of the parent's digest and the block's int32 tokens."""
    return blake2b(parent + token_bytes, digest_size=_DIGEST_BYTES).digest()


class RootHasher:
    """Roots of the chains of one model.

    The fingerprint is length-prefixed, so that no salt can look like another fingerprint's end; the secret keys the
    hash, so that nobody outside can predict a digest (CVE-2025-25183).
    """

    def __init__(self, *, fingerprint: bytes, secret: bytes) -> None:
        self._key = secret or secrets.token_bytes(32)
        self._prefix = len(fingerprint).to_bytes(8, "little") + fingerprint

    def root(self, salt: str) -> bytes:
        """The root digest of all chains with this salt."""
        data = self._prefix + salt.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._key, person=_ROOT_PERSON).digest()


class DigestMemo:
    """The digests of the prompt that was looked up last: a scheduler asks again each step until there is room for it,
    and once more to admit it."""

    def __init__(self) -> None:
        self._salt = ""
        self._data = b""
        self._digests: list[bytes] = []

    def of(self, salt: str, data: bytes) -> list[bytes]:
        """Digests found so far, head first: the caller appends what it computes beyond them."""
        if salt != self._salt or data != self._data:
            self._salt, self._data, self._digests = salt, data, []
        return self._digests
