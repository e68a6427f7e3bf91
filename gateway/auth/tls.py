"""TLS for the listeners: files to credentials, and new files to new connections without a restart.

Files are checked by the standard library before gRPC gets them, whose own messages do not name them.
"""

import codecs
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from octavo.gateway.auth.key_file import AccessFileError, read_private, unreadable
from octavo.gateway.config import TlsConfig
from octavo.wire.regular_file import read_regular

CERT, KEY, CLIENT_CA = "--tls-cert-file", "--tls-key-file", "--tls-client-ca-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """PEM bytes that belong together. client_ca None: clients need no certificate. context: the same for servers other
    than gRPC."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext = field(compare=False)

    def __repr__(self) -> str:
        return "TlsMaterial(…)"  # a private key must not reach a log


def load_tls(config: TlsConfig) -> TlsMaterial:
    """Read and check the files. Raises AccessFileError naming the setting, the file, and what to do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    material = _read(config, context)
    try:
        context.load_cert_chain(config.cert_file, config.key_file, password=_no_password)
    except ssl.SSLError as error:
        raise _bad_pair(config, error) from None
    except OSError as error:
        raise unreadable(config.cert_file, CERT, error) from None
    _check_as_grpc_reads(config.cert_file, CERT, material.cert)
    _check_as_grpc_reads(config.key_file, KEY, material.key)
    if config.client_ca_file is not None:
        _check_ca(context, config.client_ca_file, material.client_ca or b"")
    if _read(config, context) != material:
        raise AccessFileError("the TLS files changed while they were read", str(config.cert_file), "try again")
    return material


def _read(config: TlsConfig, context: ssl.SSLContext) -> TlsMaterial:
    return TlsMaterial(
        cert=_read_public(config.cert_file, CERT),
        key=read_private(config.key_file, KEY, closed_to=0o007),  # a group may read it, as in mounted secrets
        client_ca=None if config.client_ca_file is None else _read_public(config.client_ca_file, CLIENT_CA),
        context=context,
    )


def _read_public(path: Path, setting: str) -> bytes:
    try:
        return read_regular(path)[0]
    except OSError as error:
        raise unreadable(path, setting, error) from None


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted")


def _bad_pair(config: TlsConfig, error: ssl.SSLError) -> AccessFileError:
    files = f"{config.cert_file} and {config.key_file}"
    if error.reason == "KEY_VALUES_MISMATCH":
        return AccessFileError(
            f"{CERT} and {KEY} do not belong together", files, "give the key that the certificate was made with"
        )
    if "encrypted" in str(error):
        return AccessFileError(f"{KEY} is encrypted", str(config.key_file), "give a key without a password, mode 600")
    numbers = f"{files}: {error.reason or error}"
    return AccessFileError(f"{CERT} or {KEY} is not PEM", numbers, "give a certificate chain and its key, both in PEM")


def _check_as_grpc_reads(path: Path, setting: str, data: bytes) -> None:
    """Raises AccessFileError for files that OpenSSL accepts and gRPC's own library does not: a listener could not be
    bound, and a running one would silently keep its old files."""
    if data.startswith(codecs.BOM_UTF8):
        raise AccessFileError(f"{setting} begins with a byte order mark", str(path), "save it as text without one")
    if b"-----BEGIN TRUSTED CERTIFICATE-----" in data:
        numbers = f"{path}: a certificate with OpenSSL's trust settings"
        raise AccessFileError(f"{setting} is not plain PEM", numbers, "write it with openssl x509 without -trustout")


def _check_ca(context: ssl.SSLContext, path: Path, data: bytes) -> None:
    try:
        context.load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:  # ValueError: not ASCII, or empty
        numbers = f"{path}: {getattr(error, 'reason', None) or 'not PEM'}"
        raise AccessFileError(f"{CLIENT_CA} is not PEM", numbers, "give the certificates of authorities") from None


class TlsListener:
    """One listener's credentials; each handshake uses the current `material`. gRPC calls it from its own threads."""

    def __init__(self, material: TlsMaterial) -> None:
        self.material = material
        self._given = material
        self.credentials = grpc.dynamic_ssl_server_credentials(
            _certificates(material),
            self._changed,
            require_client_authentication=material.client_ca is not None,
        )

    def _changed(self) -> Any:
        """Called for each handshake: new certificates, or None if nothing has changed (grpc's annotation lacks
        None)."""
        material = self.material
        if material == self._given:
            return None
        self._given = material
        return _certificates(material)


def _certificates(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.client_ca)
