"""Lets a call in, or says why not: before its message is parsed, long before anything is tokenized.

Decides by the call's own metadata and its connection's certificate; what other headers say of a tenant is nothing.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from octavo.gateway.auth.caller import ANYBODY, PUBLIC, Caller
from octavo.gateway.auth.key_file import AccessList
from octavo.gateway.auth.keys import MAX_KEY_LEN
from octavo.gateway.auth.scopes import NOT_ADMIN, SCOPE_OF, Scope
from octavo.gateway.errors import PermissionDenied, Unauthenticated

_BEARER = "bearer "


class Credentials(Protocol):
    """What a grpc.aio.ServicerContext tells of a call's origin."""

    def invocation_metadata(self) -> Any: ...  # pairs of str and str | bytes, or None
    def peer_identities(self) -> Any: ...  # bytes of the certificate's names, None or empty without one


class ClientCertificates(Enum):
    """Whether connections have proved a certificate of our authority (mTLS)."""

    NONE = "none"
    REQUIRED = "required"


@dataclass(slots=True, eq=False)
class Authenticator:
    """access None: there is no file of keys. Without keys and without certificates everybody may do everything.

    public: scopes that need no key. now_s: Unix time, for keys that expire.
    """

    access: AccessList | None = None
    certificates: ClientCertificates = ClientCertificates.NONE
    public: frozenset[Scope] = frozenset({Scope.HEALTH})
    now_s: Callable[[], float] = time.time

    @property
    def is_open(self) -> bool:
        """Whether nobody is asked who they are."""
        return self.access is None and self.certificates is ClientCertificates.NONE

    def authenticate(self, method: str, call: Credentials) -> Caller:
        """Who calls. Raises Unauthenticated, PermissionDenied."""
        if self.is_open:
            return ANYBODY
        caller, needed = self._identify(call), SCOPE_OF.get(method)
        if needed in self.public:
            return caller or PUBLIC
        if caller is None:
            raise Unauthenticated("an API key is needed: authorization: Bearer KEY, or x-api-key: KEY")
        if needed is None or needed not in caller.scopes:
            raise PermissionDenied(f"this needs the scope {needed}" if needed else "this method is not for callers")
        return caller

    def _identify(self, call: Credentials) -> Caller | None:
        """By the key, else by the certificate; None where there is neither."""
        key = presented_key(call.invocation_metadata() or ())
        if key is not None:
            return self._of_key(key)
        if self.certificates is ClientCertificates.NONE:
            return None
        names = [bytes(name).decode("utf-8", "replace") for name in call.peer_identities() or ()]
        return self._of_certificate(names)

    def _of_key(self, key: str) -> Caller:
        entry = self.access.ring.find(key) if self.access else None
        if entry is None:
            raise Unauthenticated("the API key is not valid here")
        if entry.expires_s is not None and entry.expires_s <= self.now_s():
            raise Unauthenticated("the API key has expired")
        return entry.caller

    def _of_certificate(self, names: list[str]) -> Caller | None:
        """Where there is a file, it has to name the certificate; else a certificate of our authority is enough for
        everything but administration."""
        if self.access is None:
            return Caller(name=names[0], tenant=names[0], scopes=NOT_ADMIN) if names else None
        known = [self.access.certificates[name] for name in names if name in self.access.certificates]
        return known[0] if known else None


def presented_key(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The key that a call carries; None for none. Raises Unauthenticated for one that cannot be one, and for two."""
    found: list[str] = []
    for name, value in metadata:
        if name == "x-api-key" and isinstance(value, str):
            found.append(value.strip())
        elif name == "authorization":
            if not isinstance(value, str) or not value.lower().startswith(_BEARER):
                raise Unauthenticated("authorization must be: Bearer KEY")
            found.append(value[len(_BEARER) :].strip())
    if not found:
        return None
    if len(set(found)) > 1:
        raise Unauthenticated("two API keys were given")
    if not 0 < len(found[0]) <= MAX_KEY_LEN:
        raise Unauthenticated("the API key is not valid here")
    return found[0]
