"""When the certificates of the listeners end: a metric, a line in the log, a finding of `octavo doctor`.

Of a certificate one date is read, as RFC 5280, 4.1 has it. OpenSSL has judged the files before.
"""

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime

CERT_FILE, CLIENT_CA_FILE = "cert", "client_ca"  # of --tls-cert-file and --tls-client-ca-file
SOON_S = 14 * 86_400.0  # as the alert OctavoCertificateExpires has it
_PEM = re.compile(rb"-----BEGIN (?:X509 )?CERTIFICATE-----(.+?)-----END", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags


def expiries(cert: bytes, client_ca: bytes | None) -> Mapping[str, float]:
    """By file, Unix time in seconds after which handshakes fail: when the first certificate of a chain expires, and
    when the last of a list of authorities does. Both are PEM; files without such a date are left out."""
    found = {
        CERT_FILE: min(not_after(cert), default=None),
        CLIENT_CA_FILE: max(not_after(client_ca or b""), default=None),
    }
    return {file: end_s for file, end_s in found.items() if end_s is not None}


def not_after(pem: bytes) -> list[float]:
    """The expiry of each certificate, in Unix time."""
    ends = []
    for body in _PEM.findall(pem):
        try:
            ends.append(_not_after(base64.b64decode(body)))
        except (ValueError, IndexError):
            continue
    return ends


def _not_after(der: bytes) -> float:
    """Raises ValueError, IndexError if it is not a certificate."""
    _, at, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, at)  # TBSCertificate
    if der[at] == _VERSION:
        _, _, at = _element(der, at)
    for _ in ("serialNumber", "signature", "issuer"):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)  # Validity
    _, _, at = _element(der, at)  # notBefore
    tag, start, end = _element(der, at)
    text = der[start:end].decode("ascii")
    if tag == _UTC_TIME:  # two digits of a year, from 1950 to 2049
        text = f"{'19' if text[:2] >= '50' else '20'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """(tag, start, end) of the contents of the DER element at this position."""
    tag, length = der[at], der[at + 1]
    at += 2
    if length & 0x80:
        num_bytes = length & 0x7F
        length, at = int.from_bytes(der[at : at + num_bytes]), at + num_bytes
    return tag, at, at + length
