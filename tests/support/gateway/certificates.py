"""Certificates for tests, made by the openssl command: authorities, servers, clients, expired ones."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path

    def credentials(self, trusted: Path) -> grpc.ChannelCredentials:
        """For a client that presents this certificate."""
        return grpc.ssl_channel_credentials(trusted.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())


class Authority:
    """Signs certificates for localhost and 127.0.0.1, or with a client's name."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl("req", "-x509", *_CURVE, "-keyout", self._key, "-out", self.cert, "-days", "2", "-subj", f"/CN={name}")

    def sign(self, name: str, *, san: str = "DNS:localhost,IP:127.0.0.1", days: int = 1) -> Pair:
        """A new pair. san "": none, only a common name. days below 0: already expired."""
        pair = Pair(cert=self.folder / f"{name}.pem", key=self.folder / f"{name}.key")
        request, extra = self.folder / f"{name}.csr", ("-addext", f"subjectAltName={san}") if san else ()
        _openssl("req", *_CURVE, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}", *extra)
        signed = ("-CA", self.cert, "-CAkey", self._key, "-days", str(days), "-copy_extensions", "copy")
        _openssl("x509", "-req", "-in", request, *signed, "-out", pair.cert)
        pair.key.chmod(0o600)
        return pair


def _openssl(*arguments: object) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("the openssl command is not installed")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
