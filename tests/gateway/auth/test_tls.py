"""TLS and mTLS with real handshakes: who gets through, what is told of bad files, and certificates that change."""

import asyncio
import contextlib
import os
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from octavo.gateway.auth.expiry import expiries, not_after
from octavo.gateway.auth.key_file import AccessFileError
from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.auth.tls import load_tls
from octavo.gateway.config import AccessConfig, Exposure, TlsConfig
from octavo.gateway.rpc.addresses import AddressError, check_admin, check_exposure
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import model_pb2, model_pb2_grpc
from tests.support.gateway.certificates import Authority, Pair
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.rpc_errors import refused

C = grpc.StatusCode
OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture(scope="session")
def server(authority: Authority) -> Pair:
    """The gateway's certificate."""
    return authority.sign("gateway")


@pytest.fixture
def secured(serve: Any, server: Pair, authority: Authority) -> Callable[..., Any]:
    """`serve` with TLS; mutual: clients need certificates of the authority."""

    def serving(pool: FakePool | None = None, *, mutual: bool = False, pair: Pair = server, **access: Any) -> Any:
        tls = TlsConfig(cert_file=pair.cert, key_file=pair.key, client_ca_file=authority.cert if mutual else None)
        config = AccessConfig(tls=tls, reload_interval_s=0.05, **access)
        return serve(pool, access=config, listen_address="127.0.0.1:0")

    return serving


async def ask(served: Any, credentials: grpc.ChannelCredentials | None) -> str:
    """The word ok, or how a new connection was refused."""
    address = served.gateway.listeners.address
    channel = (
        grpc.aio.insecure_channel(address, options=OPTIONS)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=OPTIONS)
    )
    async with channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        try:
            await stub.ListModels(model_pb2.ListModelsRequest(), timeout=30)
        except grpc.aio.AioRpcError as error:
            # A handshake that fails is the library's own status: it has none of our trailers.
            return error.code().name + dict(error.trailing_metadata() or ()).get("x-error-reason", "")
    return "ok"


def trusting(authority: Authority) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(authority.cert.read_bytes())


async def test_clients_have_to_speak_tls_and_to_trust_the_authority(
    secured: Any, authority: Authority, stranger: Authority
) -> None:
    async with secured() as served:
        assert await ask(served, trusting(authority)) == "ok"
        assert await ask(served, None) == "UNAVAILABLE"
        assert await ask(served, trusting(stranger)) == "UNAVAILABLE"


async def test_old_versions_of_tls_are_refused(secured: Any) -> None:
    async with secured() as served:
        host, _, port = served.gateway.listeners.address.rpartition(":")
        for version, is_fine in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            context.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.warns(DeprecationWarning, match="TLSv1_1") if not is_fine else contextlib.nullcontext():
                context.minimum_version = context.maximum_version = version
            try:
                _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            except (ssl.SSLError, ConnectionResetError):
                assert not is_fine
            else:
                assert is_fine
                writer.close()


async def test_with_mutual_tls_only_good_certificates_of_the_authority_get_through(
    secured: Any, authority: Authority, stranger: Authority
) -> None:
    async with secured(mutual=True) as served:
        good, expired = authority.sign("svc-a", san="DNS:svc-a"), authority.sign("expired", days=-1)
        foreign = stranger.sign("svc-a")
        assert await ask(served, good.credentials(authority.cert)) == "ok"
        assert await ask(served, trusting(authority)) == "UNAVAILABLE"
        assert await ask(served, expired.credentials(authority.cert)) == "UNAVAILABLE"
        assert await ask(served, foreign.credentials(authority.cert)) == "UNAVAILABLE"


async def test_the_tenant_is_the_certificates_name(secured: Any, authority: Authority) -> None:
    pool = FakePool()
    async with secured(pool, mutual=True) as served:
        for name, san in (("one", "DNS:svc-one,DNS:other"), ("two", ""), ("one-again", "DNS:svc-one")):
            credentials = authority.sign(name, san=san).credentials(authority.cert)
            async with grpc.aio.secure_channel(
                served.gateway.listeners.address, credentials, options=OPTIONS
            ) as channel:
                call = channel.unary_stream(
                    "/octavo.v1.InferenceService/Generate", pb.GenerateRequest.SerializeToString
                )
                await anext(aiter(call(pb.GenerateRequest(text="x"))))
        one, two, again = [run.request.cache_salt for run in pool.runs]
        assert one == again != two


async def test_a_file_of_keys_gives_certificates_their_names_and_rights(
    secured: Any, authority: Authority, write_keys: Callable[[str], Path]
) -> None:
    file = write_keys('[certificates.reader]\nsubject = "svc-r"\nscopes = ["models"]\n')
    async with secured(mutual=True, api_keys_file=file) as served:
        reader, unnamed = authority.sign("r", san="DNS:svc-r"), authority.sign("u", san="DNS:svc-u")
        assert await ask(served, reader.credentials(authority.cert)) == "ok"
        assert await ask(served, unnamed.credentials(authority.cert)) == "UNAUTHENTICATEDUNAUTHENTICATED"
        async with grpc.aio.secure_channel(
            served.gateway.listeners.address, reader.credentials(authority.cert), options=OPTIONS
        ) as channel:
            refusal = await refused(channel.unary_unary("/octavo.v1.InferenceService/Tokenize")(b""))
            assert refusal.code is C.PERMISSION_DENIED


def copy(pair: Pair, folder: Path) -> Pair:
    """The same pair in files that can change."""
    mine = Pair(cert=folder / "cert.pem", key=folder / "key.pem")
    mine.cert.write_bytes(pair.cert.read_bytes())
    mine.key.touch(mode=0o600)
    mine.key.write_bytes(pair.key.read_bytes())
    return mine


async def test_new_certificates_are_shown_to_new_connections_without_a_restart(
    secured: Any, authority: Authority, stranger: Authority, server: Pair, tmp_path: Path
) -> None:
    files, new = copy(server, tmp_path), stranger.sign("gateway-2")
    async with secured(pair=files) as served:
        address, reloads = served.gateway.listeners.address, served.gateway.reloader.reloads
        async with grpc.aio.secure_channel(address, trusting(authority), options=OPTIONS) as old_connection:
            stub = model_pb2_grpc.ModelServiceStub(old_connection)
            await stub.ListModels(model_pb2.ListModelsRequest(), timeout=30)
            files.cert.write_bytes(new.cert.read_bytes())  # half a rotation: what was in force stays
            await served.until(lambda: reloads["tls", "failed"])
            assert await ask(served, trusting(authority)) == "ok"
            files.key.write_bytes(new.key.read_bytes())
            await served.until(lambda: reloads["tls", "taken"])
            assert await ask(served, trusting(stranger)) == "ok"
            assert await ask(served, trusting(authority)) == "UNAVAILABLE"
            await stub.ListModels(model_pb2.ListModelsRequest(), timeout=30)  # who was in stays in


async def test_the_metric_tells_when_the_certificate_in_force_ends(
    secured: Any, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    files, later = copy(authority.sign("week", days=7), tmp_path), stranger.sign("year", days=365)
    async with secured(pair=files, mutual=True) as served:

        def days_left() -> dict[str, int]:
            rows = [row for family in served.gateway.collector.collect() for row in family.samples]
            found = {row.labels["file"]: row.value for row in rows if "certificate_expiry" in row.name}
            return {file: round((end_s - time.time()) / 86_400) for file, end_s in found.items()}

        assert days_left() == {"cert": 7, "client_ca": 2}
        files.cert.write_bytes(later.cert.read_bytes())  # half a rotation: what was in force stays
        await served.until(lambda: served.gateway.reloader.reloads["tls", "failed"])
        assert days_left()["cert"] == 7
        files.key.write_bytes(later.key.read_bytes())
        await served.until(lambda: served.gateway.reloader.reloads["tls", "taken"])
        assert days_left() == {"cert": 365, "client_ca": 2}


async def test_a_certificate_that_ends_soon_is_told_of_once_a_day(authority: Authority) -> None:
    pair, now_s = authority.sign("soon", days=30), time.time() + 3_600
    reloader = AccessReloader(AccessConfig(tls=TlsConfig(cert_file=pair.cert, key_file=pair.key)), clock=lambda: now_s)
    with structlog.testing.capture_logs() as lines:
        reloader.load()
        for day in range(32):
            now_s += 0 if day == 0 else 86_400
            for _ in range(3):
                await reloader.refresh()
    told = [(round(line["days_left"]), line["event"], line["file"]) for line in lines]
    soon = [(left, "certificate_expires_soon", str(pair.cert)) for left in range(14, 0, -1)]
    assert told == [*soon, (0, "certificate_expired", str(pair.cert)), (-1, "certificate_expired", str(pair.cert))]


def test_a_chain_ends_with_its_first_and_authorities_with_their_last(authority: Authority) -> None:
    ends = {name: authority.sign(name, days=days).cert.read_bytes() for name, days in (("a", 3), ("b", 5))}
    a_s, b_s = (*not_after(ends["a"]), *not_after(ends["b"]))
    assert a_s < b_s
    both = b"".join(ends.values())
    assert expiries(both, both) == {"cert": a_s, "client_ca": b_s}
    assert expiries(both, None) == {"cert": a_s}


@pytest.mark.parametrize("days", [-1, 1, 365 * 60, 365 * 900])  # in two digits of a year up to 2049, then in four
def test_the_end_of_a_certificate_is_what_openssl_reads(authority: Authority, days: int) -> None:
    cert = authority.sign("dated", days=days).cert
    shown = subprocess.run(
        ["openssl", "x509", "-in", cert, "-noout", "-enddate"], capture_output=True, text=True, timeout=30, check=True
    )
    assert not_after(cert.read_bytes()) == [ssl.cert_time_to_seconds(shown.stdout.strip().removeprefix("notAfter="))]


def test_what_is_no_certificate_has_no_end(server: Pair) -> None:
    whole = server.cert.read_bytes()
    head, tail = b"-----BEGIN CERTIFICATE-----\n", b"\n-----END CERTIFICATE-----\n"
    spoiled = [b"", b"x", server.key.read_bytes(), head + b"MAA=" + tail, head + b"?" + tail, head + b"MIIB" * 9 + tail]
    assert [not_after(each) for each in spoiled] == [[]] * len(spoiled)
    assert len(not_after(spoiled[3] + whole)) == 1


def pipe_at(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def replace_in(path: Path, old: bytes, new: bytes) -> None:
    """All of old; of an empty one the first, which is the beginning."""
    path.write_bytes(path.read_bytes().replace(old, new, -1 if old else 1))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda pair: pair.cert.unlink(), ("--tls-cert-file cannot be read", "No such file")),
        (lambda pair: pair.key.unlink(), ("--tls-key-file cannot be read", "No such file")),
        (lambda pair: pair.key.chmod(0o604), ("--tls-key-file is open to others", "0604", "chmod 600")),
        (lambda pair: pipe_at(pair.cert), ("--tls-cert-file cannot be read", "Not a regular file")),
        (lambda pair: pipe_at(pair.key), ("--tls-key-file cannot be read", "Not a regular file")),
        (lambda pair: pair.cert.write_text("x"), ("is not PEM",)),
        (lambda pair: pair.key.write_text("x"), ("is not PEM",)),
        (lambda pair: pair.cert.write_text(""), ("is not PEM",)),
        (lambda pair: replace_in(pair.cert, b"", b"\xef\xbb\xbf"), ("--tls-cert-file begins with a byte order mark",)),
        (lambda pair: replace_in(pair.key, b"", b"\xef\xbb\xbf"), ("--tls-key-file begins with a byte order mark",)),
        (
            lambda pair: replace_in(pair.cert, b"CERT", b"TRUSTED CERT"),
            ("--tls-cert-file is not plain PEM", "trustout"),
        ),
    ],
)
def test_files_that_cannot_be_used_are_named_with_what_to_do(
    spoil: Callable[[Pair], object], words: tuple[str, ...], server: Pair, tmp_path: Path
) -> None:
    pair = copy(server, tmp_path)
    spoil(pair)
    with pytest.raises(AccessFileError) as caught:
        load_tls(TlsConfig(cert_file=pair.cert, key_file=pair.key))
    assert [word for word in words if word not in str(caught.value)] == []
    assert all((caught.value.what, caught.value.numbers, caught.value.change))


def test_files_that_do_not_belong_together_are_told_so(server: Pair, authority: Authority) -> None:
    other = authority.sign("other")
    with pytest.raises(AccessFileError, match="do not belong together"):
        load_tls(TlsConfig(cert_file=server.cert, key_file=other.key))


def test_an_authority_that_is_none_is_told(server: Pair, tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"nonsense", b"\xff")):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with pytest.raises(AccessFileError, match="--tls-client-ca-file is not PEM"):
            load_tls(TlsConfig(cert_file=server.cert, key_file=server.key, client_ca_file=path))


def test_a_key_never_shows_in_what_is_printed(server: Pair) -> None:
    assert "PRIVATE" not in repr(load_tls(TlsConfig(cert_file=server.cert, key_file=server.key)))


def test_other_hosts_may_not_administer_without_saying_who_they_are() -> None:
    keys, tls = AccessConfig(api_keys_file=Path("k")), TlsConfig(cert_file=Path("c"), key_file=Path("k"))
    with pytest.raises(AddressError, match="--api-keys-file"):
        check_admin("0.0.0.0:1", AccessConfig(tls=tls), Exposure.LOOPBACK_ONLY, setting="--admin-port")
    check_admin("0.0.0.0:1", keys, Exposure.LOOPBACK_ONLY, setting="--admin-port")
    check_admin("127.0.0.1:1", AccessConfig(), Exposure.LOOPBACK_ONLY, setting="--admin-port")
    check_admin("0.0.0.0:1", AccessConfig(), Exposure.INSECURE, setting="--admin-port")


async def test_metrics_leave_this_host_only_when_that_is_asked_for_in_plain_words(serve: Any, server: Pair) -> None:
    """They are plain HTTP: TLS of the gRPC service does not cover them."""
    access = AccessConfig(tls=TlsConfig(cert_file=server.cert, key_file=server.key))
    with pytest.raises(AddressError, match=r"--metrics-port .* is plain HTTP, with TLS for callers too"):
        async with serve(access=access, listen_address="127.0.0.1:0", metrics_address="0.0.0.0:0"):
            raise AssertionError("it was bound")


def test_tls_is_what_other_hosts_may_be_served_with() -> None:
    with pytest.raises(AddressError, match="--tls-cert-file"):
        check_exposure("0.0.0.0:1", Exposure.LOOPBACK_ONLY, setting="--port")
    check_exposure("127.0.0.1:1", Exposure.LOOPBACK_ONLY, setting="--port")
    check_exposure("unix:/run/x", Exposure.LOOPBACK_ONLY, setting="--port")
