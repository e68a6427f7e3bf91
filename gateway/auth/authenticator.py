"""Who calls, and what they may do: a call is let in, or refused with the reason, before its message is parsed.

Decides by the call's own metadata (an API key) and its connection's certificate; no other header counts.
Of keys only digests are kept: a key has 256 random bits, so a plain SHA-256 of it cannot be searched through.
`gateway.auth.key_file` reads the file that names callers, `gateway.auth.reloader` reads it again when it changes.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol

from octavo.gateway.errors import PermissionDenied, Unauthenticated

MAX_WEIGHT = 1000
KEY_PREFIX = "octavo-"  # so that scanners of repositories and logs can find one that leaked
MIN_KEY_LEN = 24
MAX_KEY_LEN = 512
_BEARER = "bearer "
_SALT_DOMAIN = b"octavo prefix salt 1"
_LABEL_DOMAIN = b"octavo tenant label 1"

# ---------------------------------------------------------------- methods


class Scope(StrEnum):
    """What a caller may do."""

    GENERATE = "generate"  # generate, tokenize, end one's own requests
    MODELS = "models"  # what is served, its limits, its tokenizer
    HEALTH = "health"
    REFLECTION = "reflection"
    ADMIN = "admin"  # what touches all callers: abort, audit, flush, drain, events of the prefix cache


# Once there are keys, methods without a row are refused to every caller.
_SERVICES: dict[str, dict[str, Scope]] = {
    "octavo.v1.InferenceService": {
        "Generate": Scope.GENERATE,
        "Complete": Scope.GENERATE,
        "Embed": Scope.GENERATE,
        "Tokenize": Scope.GENERATE,
        "Detokenize": Scope.GENERATE,
        "Cancel": Scope.GENERATE,  # of one's own tenant only: the key of a request has the tenant in it
    },
    "octavo.v1.ModelService": {"ListModels": Scope.MODELS, "GetModel": Scope.MODELS},
    "octavo.v1.AdminService": {
        "Abort": Scope.ADMIN,
        "GetLoad": Scope.ADMIN,
        "AuditBlocks": Scope.ADMIN,
        "FlushPrefixCache": Scope.ADMIN,
        "Drain": Scope.ADMIN,
        "Scale": Scope.ADMIN,
        "ScaleGateways": Scope.ADMIN,
    },
    "octavo.v1.LoadService": {"WatchLoad": Scope.ADMIN},  # shows the load and the request ids of every tenant
    "grpc.health.v1.Health": {"Check": Scope.HEALTH, "List": Scope.HEALTH, "Watch": Scope.HEALTH},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": Scope.REFLECTION},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Scope.REFLECTION},
    "vllm.grpc.engine.VllmEngine": {
        "Generate": Scope.GENERATE,
        "Embed": Scope.GENERATE,
        "Abort": Scope.GENERATE,  # likewise
        "HealthCheck": Scope.HEALTH,
        "GetModelInfo": Scope.MODELS,
        "GetServerInfo": Scope.MODELS,
        "GetLoads": Scope.MODELS,
        "GetTokenizer": Scope.MODELS,
        "FlushCache": Scope.ADMIN,
        "SubscribeKvEvents": Scope.ADMIN,  # contains the tokens of every tenant's prompts
        "StartProfile": Scope.ADMIN,
        "StopProfile": Scope.ADMIN,
    },
    "openengine.v1.Inference": {"Generate": Scope.GENERATE},
    "openengine.v1.Control": {
        "GetServerInfo": Scope.MODELS,
        "GetModelInfo": Scope.MODELS,
        "GetLoad": Scope.MODELS,
        "Health": Scope.HEALTH,
        "Abort": Scope.GENERATE,  # one's own
        "LoadLora": Scope.ADMIN,
        "UnloadLora": Scope.ADMIN,
        "ListLoras": Scope.MODELS,
        "GetKvEventSources": Scope.ADMIN,
        "SubscribeKvEvents": Scope.ADMIN,  # shows the tokens of prompts
    },
    "vllm.Inference": {"Generate": Scope.GENERATE, "GenerateStream": Scope.GENERATE},
    "vllm.Control": {
        "GetServerInfo": Scope.MODELS,
        "GetModelInfo": Scope.MODELS,
        "Abort": Scope.GENERATE,  # one's own
        "IsPaused": Scope.MODELS,
        "IsSleeping": Scope.MODELS,
        "ListLoras": Scope.MODELS,
        "GetWeightVersion": Scope.MODELS,
    }
    | dict.fromkeys(
        (
            *(
                "Shutdown",
                "LoadLora",
                "UnloadLora",
                "GetKvEventSources",
                "PauseGeneration",
                "ResumeGeneration",
                "Sleep",
            ),
            *("WakeUp", "InitWeightTransferEngine", "StartWeightUpdate", "StartDraftWeightUpdate"),
            *("UpdateWeights", "FinishWeightUpdate", "UpdateWeightVersion"),
        ),
        Scope.ADMIN,
    ),
    "inference.GRPCInferenceService": {
        "ServerLive": Scope.HEALTH,
        "ServerReady": Scope.HEALTH,
        "ModelReady": Scope.HEALTH,
        "ServerMetadata": Scope.MODELS,
        "ModelMetadata": Scope.MODELS,
        "ModelConfig": Scope.MODELS,
        "ModelInfer": Scope.GENERATE,
        "ModelStreamInfer": Scope.GENERATE,
    },
}

SCOPE_OF: dict[str, Scope] = {
    f"/{service}/{method}": scope for service, methods in _SERVICES.items() for method, scope in methods.items()
}
"""By the full name of the method, as it stands in the path of the call."""

NOT_ADMIN = frozenset(Scope) - {Scope.ADMIN}


# ---------------------------------------------------------------- callers and their keys


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may ask of one gateway process; None: no limit of its own.

    max_requests: outputs in flight. max_queued: those of them that no worker has begun. tokens_per_minute: prompt and
    `max_tokens` of requests; unused tokens are refunded. burst_tokens: the most at once; None: a minute's worth.
    """

    max_requests: int | None = None
    max_queued: int | None = None
    tokens_per_minute: int | None = None
    burst_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """tenant None: callers are not identified here. sharing_group: tenants in one group share cached prefixes. weight:
    the tenant's share of the workers' time, 1 to MAX_WEIGHT."""

    name: str
    tenant: str | None
    scopes: frozenset[Scope]
    limits: TenantLimits = field(default_factory=TenantLimits)
    sharing_group: str | None = None
    weight: int = 1

    def key_of(self, request_id: str) -> str:
        """A request key that is unique across tenants, since ids contain no line feeds."""
        return request_id if self.tenant is None else f"{self.tenant}\n{request_id}"


def is_of_tenant(key: str, tenant: str | None) -> bool:
    """Whether the key is this tenant's; every key is None's."""
    return tenant is None or key.startswith(f"{tenant}\n")


def id_in(key: str) -> str:
    """The request id in a key made by `key_of`."""
    return key.rpartition("\n")[2]


UNIDENTIFIED = Caller(name="", tenant=None, scopes=frozenset(Scope))
"""Where neither keys nor client certificates are asked for."""

PUBLIC = Caller(name="public", tenant="", scopes=frozenset())
"""A caller without a key, at methods that need none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """digest: SHA-256 of the key, 32 bytes. expires_s: Unix time; None: never."""

    digest: bytes
    caller: Caller
    expires_s: float | None = None


def new_key() -> str:
    """A new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """SHA-256 of the key, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """The known keys. `find` takes the same time whether, where and how early a key matches: the digest is compared in
    full with every entry's (CVE-2025-59425 was a comparison that stopped early)."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> KeyEntry | None:
        """The entry of this key, even if expired; None if there is none."""
        digest, compare, found = digest_of(key), hmac.compare_digest, 0
        for number, entry in enumerate(self._entries, start=1):
            found += number * compare(digest, entry.digest)  # no branch; digests differ, so at most one counts
        return self._entries[found - 1] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessList:
    """The content of the key file. certificates: callers by the subjects of their certificates."""

    ring: KeyRing = field(default_factory=lambda: KeyRing(()))
    certificates: Mapping[str, Caller] = field(default_factory=dict)


# ---------------------------------------------------------------- calls


class Credentials(Protocol):
    """The part of a grpc.aio.ServicerContext that shows where a call comes from."""

    def invocation_metadata(self) -> Any: ...  # pairs of str and str | bytes, or None
    def peer_identities(self) -> Any: ...  # bytes of the certificate's names, None or empty without one


class ClientCertificates(Enum):
    """Whether connections have proved a certificate of our authority (mTLS)."""

    NONE = "none"
    REQUIRED = "required"


@dataclass(slots=True, eq=False)
class Authenticator:
    """access None: there is no key file. Without keys and without certificates, every caller may do everything.

    public: scopes that need no key. now_s: Unix time, for keys that expire.
    """

    access: AccessList | None = None
    certificates: ClientCertificates = ClientCertificates.NONE
    public: frozenset[Scope] = frozenset({Scope.HEALTH})
    now_s: Callable[[], float] = time.time

    @property
    def is_open(self) -> bool:
        """Whether callers are not identified."""
        return self.access is None and self.certificates is ClientCertificates.NONE

    def authenticate(self, method: str, call: Credentials) -> Caller:
        """The caller, if it may call this method. Raises Unauthenticated, PermissionDenied."""
        if self.is_open:
            return UNIDENTIFIED
        caller, needed = self._identify(call), SCOPE_OF.get(method)
        if needed in self.public:
            return caller or PUBLIC
        if caller is None:
            raise Unauthenticated("an API key is needed: authorization: Bearer KEY, or x-api-key: KEY")
        if needed is None or needed not in caller.scopes:
            raise PermissionDenied(f"this needs the scope {needed}" if needed else "this method is not for callers")
        return caller

    def _identify(self, call: Credentials) -> Caller | None:
        """The caller by its key, else by its certificate; None if it has neither."""
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
        """If there is a key file, it must name the certificate; otherwise any certificate of our authority is enough
        for everything but administration."""
        if self.access is None:
            return Caller(name=names[0], tenant=names[0], scopes=NOT_ADMIN) if names else None
        known = [self.access.certificates[name] for name in names if name in self.access.certificates]
        return known[0] if known else None


def presented_key(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The key that a call carries, or None. Raises Unauthenticated for a malformed key, and for two keys."""
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


# ---------------------------------------------------------------- salts


class PrefixSalt:
    """The salt of a caller's cached prefixes: tenants share prefixes only within a group.

    HMAC-SHA-256 under a secret of the service, over length-prefixed fields with a domain prefix, so that a tenant
    cannot choose a salt that equals another's, and a group's name cannot equal a tenant's. Source: CVE-2025-46570
    (timing of shared prefixes). secret: must be the same on every gateway of a service for their callers to share
    prefixes; empty: random.
    """

    def __init__(self, secret: str = "") -> None:
        self._secret = secret.encode() or secrets.token_bytes(32)

    def of(self, caller: Caller, salt: str) -> str:
        """The salt to send to the worker. salt: the caller's own cache_salt, returned unchanged if callers are not
        identified."""
        if caller.tenant is None:
            return salt
        kind, owner = ("tenant", caller.tenant) if caller.sharing_group is None else ("group", caller.sharing_group)
        message = _SALT_DOMAIN + b"".join(_field(text) for text in (kind, owner, salt))
        return hmac.digest(self._secret, message, hashlib.sha256).hex()

    def label_of(self, caller: Caller) -> str:
        """An opaque label of the caller's tenant, by which workers share their time among tenants. The same from every
        gateway of the service, and different from the salt. Empty if callers are not identified."""
        if caller.tenant is None:
            return ""
        return hmac.digest(self._secret, _LABEL_DOMAIN + _field(caller.tenant), hashlib.sha256).hex()[:16]


def _field(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(4, "big") + data
