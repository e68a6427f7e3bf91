"""Who is let in, method by method, and why not."""

from dataclasses import dataclass
from typing import Any

import pytest

from octavo.gateway.auth.authenticator import (
    NOT_ADMIN,
    PUBLIC,
    SCOPE_OF,
    UNIDENTIFIED,
    AccessList,
    Authenticator,
    Caller,
    ClientCertificates,
    KeyEntry,
    KeyRing,
    Scope,
    digest_of,
)
from octavo.gateway.errors import PermissionDenied, Unauthenticated

GENERATE = "/octavo.v1.InferenceService/Generate"
CHECK = "/grpc.health.v1.Health/Check"


@dataclass
class Call:
    """What a call brings."""

    metadata: tuple[tuple[str, str | bytes], ...] = ()
    names: tuple[bytes, ...] | None = None

    def invocation_metadata(self) -> Any:
        return self.metadata

    def peer_identities(self) -> Any:
        return self.names


def caller(name: str, *scopes: Scope) -> Caller:
    return Caller(name=name, tenant=f"{name}'s", scopes=frozenset(scopes))


WRITER, OPERATOR = caller("writer", Scope.GENERATE), caller("operator", Scope.ADMIN)
ENTRIES = (
    KeyEntry(digest=digest_of("writer's key"), caller=WRITER, expires_s=1000.0),
    KeyEntry(digest=digest_of("operator's key"), caller=OPERATOR),
)
ACCESS = AccessList(ring=KeyRing(ENTRIES), certificates={"billing": caller("billing", Scope.MODELS)})


def authenticator(**changes: Any) -> Authenticator:
    return Authenticator(**{"access": ACCESS, "now_s": lambda: 999.0} | changes)


def bearer(key: str) -> Call:
    return Call((("authorization", f"Bearer {key}"),))


def test_without_keys_and_certificates_everybody_may_do_everything() -> None:
    assert Authenticator().authenticate("/any.Service/Method", Call()) is UNIDENTIFIED


HEADERS = (
    ("authorization", "Bearer writer's key"),
    ("authorization", "bEARER  writer's key"),
    ("x-api-key", "writer's key"),
)


@pytest.mark.parametrize("header", HEADERS)
def test_a_key_is_taken_from_either_header(header: tuple[str, str]) -> None:
    assert authenticator().authenticate(GENERATE, Call((header,))) is WRITER


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Basic d3JpdGVyOmtleQ=="),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer wrong"),),
        (("authorization", "writer's key"),),
        (("authorization", b"Bearer writer's key"),),
        (("x-api-key", ""),),
        (("x-api-key", "k" * 513),),
        (("x-api-key", "writer's key"), ("authorization", "Bearer operator's key")),
        (("x-tenant", "writer's"), ("tenant", "writer's"), ("x-octavo-tenant", "writer's")),
        (("x-api-key-bin", b"writer's key"),),
    ],
)
def test_no_key_a_wrong_key_and_two_keys_are_unauthenticated(metadata: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        authenticator().authenticate(GENERATE, Call(metadata))
    assert "writer" not in str(caught.value)


def test_a_key_expires_at_its_time() -> None:
    assert authenticator(now_s=lambda: 999.999).authenticate(GENERATE, bearer("writer's key")) is WRITER
    with pytest.raises(Unauthenticated, match="expired"):
        authenticator(now_s=lambda: 1000.0).authenticate(GENERATE, bearer("writer's key"))


@pytest.mark.parametrize("method", sorted(SCOPE_OF))
def test_each_method_is_open_to_its_own_scope_and_to_no_other(method: str) -> None:
    for scope in Scope:
        key = KeyEntry(digest=digest_of("k"), caller=caller("k", scope))
        closed = Authenticator(access=AccessList(ring=KeyRing((key,))), public=frozenset())
        if scope is SCOPE_OF[method]:
            assert closed.authenticate(method, bearer("k")) is key.caller
        else:
            with pytest.raises(PermissionDenied):
                closed.authenticate(method, bearer("k"))
    with pytest.raises(Unauthenticated):
        closed.authenticate(method, Call())


def test_a_method_that_stands_in_no_row_is_refused_to_everybody() -> None:
    everything = KeyEntry(digest=digest_of("k"), caller=caller("k", *Scope))
    closed = Authenticator(access=AccessList(ring=KeyRing((everything,))), public=frozenset(Scope))
    for method in ("/octavo.v1.InferenceService/Debug", "/octavo.v1.inferenceservice/Generate", "", "/x"):
        with pytest.raises(PermissionDenied):
            closed.authenticate(method, bearer("k"))
        with pytest.raises(Unauthenticated):
            closed.authenticate(method, Call())


def test_health_needs_no_key_unless_that_is_taken_away_but_a_wrong_one_is_told() -> None:
    assert authenticator().authenticate(CHECK, Call()) is PUBLIC
    assert authenticator().authenticate(CHECK, bearer("writer's key")) is WRITER
    with pytest.raises(Unauthenticated):
        authenticator().authenticate(CHECK, bearer("wrong"))
    with pytest.raises(Unauthenticated):
        authenticator(public=frozenset()).authenticate(CHECK, Call())


def test_a_certificate_of_our_authority_is_enough_for_everything_but_administration() -> None:
    mutual = Authenticator(certificates=ClientCertificates.REQUIRED)
    expected = Caller(name="one.svc", tenant="one.svc", scopes=NOT_ADMIN)
    assert mutual.authenticate(GENERATE, Call(names=(b"one.svc", b"two.svc"))) == expected
    with pytest.raises(PermissionDenied):
        mutual.authenticate("/octavo.v1.AdminService/Drain", Call(names=(b"one.svc",)))
    with pytest.raises(Unauthenticated):
        mutual.authenticate(GENERATE, bearer("any key"))


def test_where_there_is_a_file_it_has_to_name_the_certificate_and_a_key_counts_more() -> None:
    mutual = authenticator(certificates=ClientCertificates.REQUIRED)
    names = (b"other", b"billing")
    assert mutual.authenticate("/octavo.v1.ModelService/GetModel", Call(names=names)).name == "billing"
    assert mutual.authenticate(GENERATE, Call(bearer("writer's key").metadata, names)) is WRITER
    for call in (Call(names=(b"other",)), Call(names=()), Call()):
        with pytest.raises(Unauthenticated):
            mutual.authenticate(GENERATE, call)
    with pytest.raises(Unauthenticated):  # without mTLS a name was proved by nobody
        authenticator().authenticate("/octavo.v1.ModelService/GetModel", Call(names=names))
