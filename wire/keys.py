"""CURVE keys in files: made, stored 0600, loaded with their permissions checked.

A key pair is two TOML files: ``name.key`` (public and secret) stays with its owner, ``name.pub`` goes to the peers.
Source: CurveZMQ, rfc.zeromq.org/spec/26; keys are 32 bytes in Z85 (rfc 32), 40 characters.
"""

import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils.z85 import Z85CHARS

from octavo.wire.regular_file import read_regular

Z85_KEY_LEN = 40
_SECRET_HEADER = "# Octavo CURVE key pair. Secret: for its owner only.\n"
_PUBLIC_HEADER = "# Octavo CURVE public key. For the peers of its owner.\n"


class KeyFileError(Exception):
    """A key file that is absent, malformed or open to others; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """Z85 text, 40 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=…)"  # a secret must not reach a log


def generate_keys() -> KeyPair:
    """A new random pair. Raises KeyFileError if ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise KeyFileError("this ZeroMQ was built without CURVE: install pyzmq from its wheels")
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public, secret=secret)


def save_keys(keys: KeyPair, folder: Path, name: str) -> tuple[Path, Path]:
    """Write ``name.key`` (0600) and ``name.pub``; never over existing files. Returns both paths.
    Raises KeyFileError, also for a name that is none of a file."""
    if not name or not name.isprintable() or Path(name).name != name:
        raise KeyFileError(f"{name!r} is no name of a file in {folder}")
    secret_path, public_path = folder / f"{name}.key", folder / f"{name}.pub"
    for path in (secret_path, public_path):
        if path.exists():
            raise KeyFileError(f"{path} exists; move it away or choose another name")
    if folder.exists() and not folder.is_dir():
        raise KeyFileError(f"{folder} is a file, not a folder")
    public_line = f'public = "{keys.public.decode()}"\n'
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_new(secret_path, _SECRET_HEADER + public_line + f'secret = "{keys.secret.decode()}"\n', mode=0o600)
    try:
        _write_new(public_path, _PUBLIC_HEADER + public_line, mode=0o644)
    except KeyFileError:
        secret_path.unlink(missing_ok=True)  # one without the other would be in the way of the next try
        raise
    return secret_path, public_path


def load_keys(path: Path) -> KeyPair:
    """The pair of a ``.key`` file. Raises KeyFileError, also where others may read the file."""
    fields, info = _read(path)
    keys = KeyPair(public=_key(fields, "public", path), secret=_key(fields, "secret", path))
    if not _belong_together(keys):
        raise KeyFileError(f"the public and the secret key of {path} are not of one pair")
    if is_open_to_others(info):
        mode = stat.S_IMODE(info.st_mode)
        raise KeyFileError(f"{path} has mode {mode:04o}: others may read it; chmod 600 {path}")
    return keys


def is_open_to_others(info: os.stat_result, *, closed_to: int = 0o077) -> bool:
    """Whether others than its user may use a file with a secret. closed_to: mode bits that must be 0.

    A file that root gave to our group may be readable by that group: orchestrators mount secrets this way (PostgreSQL
    has the same rule for its server key).
    """
    if info.st_uid == 0 != os.geteuid():
        closed_to &= ~stat.S_IRGRP
    return bool(stat.S_IMODE(info.st_mode) & closed_to)


def load_public_key(path: Path) -> bytes:
    """The public key of a ``.pub`` (or ``.key``) file. Raises KeyFileError."""
    fields, _ = _read(path)
    return _key(fields, "public", path)


def _belong_together(keys: KeyPair) -> bool:
    """Whether the two keys are a pair: peers would silently refuse a mismatched one."""
    try:
        return not zmq.has("curve") or zmq.curve_public(keys.secret) == keys.public
    except zmq.ZMQError:  # groups of characters beyond 32 bits
        return False


def _write_new(path: Path, text: str, *, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:  # a full disk
        path.unlink(missing_ok=True)
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from None


def _read(path: Path) -> tuple[dict[str, object], os.stat_result]:
    try:
        content, info = read_regular(path)
        return tomllib.loads(content.decode("ascii")), info
    except OSError as error:
        raise KeyFileError(f"cannot read key file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        raise KeyFileError(f"{path} is not a key file (octavo keys new makes one)") from None


def _key(fields: dict[str, object], kind: str, path: Path) -> bytes:
    value = fields.get(kind)
    if not isinstance(value, str) or len(value) != Z85_KEY_LEN or not set(value.encode()) <= set(Z85CHARS):
        raise KeyFileError(f"{path} has no {kind} key of {Z85_KEY_LEN} characters in Z85")
    return value.encode()
