"""The salt of a caller's cached prefixes: tenants never share any, unless they are of one group.

HMAC-SHA-256 under a secret of the service, over length-prefixed fields with a domain in front: no tenant can choose a
salt that equals another's, nor can a group's name equal a tenant's. Source: CVE-2025-46570 (timing of shared prefixes).
"""

import hashlib
import hmac
import secrets

from gateway.access.caller import Caller

_DOMAIN = b"octavo prefix salt 1"
_LABEL_DOMAIN = b"octavo tenant label 1"


class PrefixSalt:
    """secret: the same on every gateway of a service, else their callers share no prefixes; empty: drawn."""

    def __init__(self, secret: str = "") -> None:
        self._secret = secret.encode() or secrets.token_bytes(32)

    def of(self, caller: Caller, salt: str) -> str:
        """What goes to the worker. salt: the caller's own cache_salt, which it gets back unchanged where nobody is
        asked who they are."""
        if caller.tenant is None:
            return salt
        kind, owner = ("tenant", caller.tenant) if caller.sharing_group is None else ("group", caller.sharing_group)
        message = _DOMAIN + b"".join(_field(text) for text in (kind, owner, salt))
        return hmac.digest(self._secret, message, hashlib.sha256).hex()

    def label_of(self, caller: Caller) -> str:
        """What workers know the caller's tenant by, where tenants wait for one another: opaque, the same from every
        gateway of the service, and no salt. Empty where nobody is asked who they are."""
        if caller.tenant is None:
            return ""
        return hmac.digest(self._secret, _LABEL_DOMAIN + _field(caller.tenant), hashlib.sha256).hex()[:16]


def _field(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(4, "big") + data
