"""Who calls: name, tenant, rights, limits. All of it comes from a key or a certificate, nothing from other headers."""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from octavo.gateway.auth.scopes import Scope

MAX_WEIGHT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may ask of one gateway process; None: no limit of its own.

    max_requests: outputs in flight. max_queued: of these, not begun by a worker yet. tokens_per_minute: prompt and
    `max_tokens` of requests, refunded where fewer were used. burst_tokens: that much at once; None: a minute's worth.
    """

    max_requests: int | None = None
    max_queued: int | None = None
    tokens_per_minute: int | None = None
    burst_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """tenant None: nobody asks who calls here. sharing_group: tenants of one group share cached prefixes. weight: of
    the tenant's share where tenants wait for one another, 1 to MAX_WEIGHT."""

    name: str
    tenant: str | None
    scopes: frozenset[Scope]
    limits: TenantLimits = field(default_factory=TenantLimits)
    sharing_group: str | None = None
    weight: int = 1

    def key_of(self, request_id: str) -> str:
        """A request id that no other tenant's can equal: ids have no line feed."""
        return request_id if self.tenant is None else f"{self.tenant}\n{request_id}"


def id_in(key: str) -> str:
    """The request id in what `key_of` made."""
    return key.rpartition("\n")[2]


ANYBODY = Caller(name="", tenant=None, scopes=frozenset(Scope))
"""Where neither keys nor client certificates are asked for."""

PUBLIC = Caller(name="public", tenant="", scopes=frozenset())
"""Somebody without a key, at methods that need none."""


# The salt of a caller's cached prefixes: tenants never share any, unless they are of one group.
#
# HMAC-SHA-256 under a secret of the service, over length-prefixed fields with a domain in front: no tenant can choose a
# salt that equals another's, nor can a group's name equal a tenant's. Source: CVE-2025-46570 (timing of shared
# prefixes).


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
