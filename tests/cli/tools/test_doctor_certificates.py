"""What `octavo doctor` says of certificates."""

import time
from pathlib import Path

import pytest

from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools.doctor_checks import Finding, Verdict, check_certificates
from octavo.gateway.auth.expiry import not_after
from tests.support.gateway.certificates import Authority

pytestmark = pytest.mark.usefixtures("nothing_set")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def found(authority: Authority, days: int) -> Finding:
    pair = authority.sign("gateway", days=days)
    (finding,) = check_certificates(ServeSettings(tls_cert_file=pair.cert, tls_key_file=pair.key))
    return finding


@pytest.mark.parametrize(
    ("days", "verdict", "words"),
    [
        (400, Verdict.GOOD, "is valid until 20"),
        (3, Verdict.WARNING, "expires in 3 days, on 20"),
        (-1, Verdict.BAD, "has expired, on 20"),
    ],
)
def test_a_certificate_is_told_of_by_its_last_day(
    authority: Authority, days: int, verdict: Verdict, words: str
) -> None:
    finding = found(authority, days)
    assert finding.verdict is verdict
    assert finding.detail.startswith(f"{authority.folder / 'gateway.pem'} {words}")
    (end_s,) = not_after((authority.folder / "gateway.pem").read_bytes())
    assert finding.detail.endswith(time.strftime("%Y-%m-%d", time.gmtime(end_s)))
    assert bool(finding.advice) is (verdict is not Verdict.GOOD)


def test_the_authorities_of_clients_end_too(authority: Authority) -> None:
    pair = authority.sign("long", days=400)
    settings = ServeSettings(tls_cert_file=pair.cert, tls_key_file=pair.key, tls_client_ca_file=authority.cert)
    assert [each.verdict for each in check_certificates(settings)] == [Verdict.GOOD, Verdict.WARNING]


def test_files_that_no_gateway_would_take_are_told(authority: Authority, tmp_path: Path) -> None:
    pair = authority.sign("whole")
    for settings, words in (
        (ServeSettings(tls_cert_file=pair.cert), "only --tls-cert-file is given"),
        (ServeSettings(tls_cert_file=tmp_path / "none", tls_key_file=pair.key), "No such file"),
    ):
        (finding,) = check_certificates(settings)
        assert (finding.verdict, words in finding.detail) == (Verdict.BAD, True)


def test_nothing_is_said_without_tls() -> None:
    assert check_certificates(ServeSettings()) == []
