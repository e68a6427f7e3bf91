"""Who calls: name, tenant, rights, limits. All of it comes from a key or a certificate, nothing from other headers."""

from dataclasses import dataclass, field

from gateway.access.scopes import Scope

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
