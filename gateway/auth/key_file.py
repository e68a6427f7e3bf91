"""The file of keys: TOML, for its owner only.

    [defaults]                     # limits of tenants without a table of their own
    max_requests = 64

    [keys.reports]                 # the name stands in the log
    sha256 = "…"                   # of the key; `octavo keys new-api reports` makes both. Or key = "…", in the clear
    tenant = "acme"                # default: the name
    scopes = ["generate", "models"]  # these are the default; health, reflection, admin
    expires = 2027-01-31T00:00:00Z

    [certificates.billing]         # a client certificate, where --tls-client-ca-file asks for them
    subject = "billing.internal"   # one of its subject alternative names, or its common name where it has none
    tenant = "acme"

    [tenants.acme]
    weight = 4                     # of its share where tenants wait for one another: default 1
    max_requests = 32              # outputs in flight
    max_queued = 8                 # of these, not begun yet
    tokens_per_minute = 100_000    # prompt + max_tokens, refunded where fewer were used
    burst_tokens = 20_000
    share_prefixes_with = "group"  # tenants of one group share cached prefixes

Unknown words are errors: a misspelt limit must not be ignored.
"""

import stat
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.gateway.auth.authenticator import (
    MAX_KEY_LEN,
    MAX_WEIGHT,
    MIN_KEY_LEN,
    AccessList,
    Caller,
    KeyEntry,
    KeyRing,
    Scope,
    TenantLimits,
    digest_of,
)
from octavo.wire.keys import is_open_to_others
from octavo.wire.regular_file import read_regular

SETTING = "--api-keys-file"
DEFAULT_SCOPES = (Scope.GENERATE, Scope.MODELS)
MAX_NAME_LEN = 64
_LIMITS = tuple(each.name for each in fields(TenantLimits))
_TABLES = ("defaults", "keys", "certificates", "tenants")
_IDENTITY = ("tenant", "scopes")


class AccessFileError(Exception):
    """A file of keys or certificates that cannot be used.

    what: which file. numbers: what is wrong with it. change: what to do. exit_code: for commands that end with this
    error.
    """

    exit_code = 2

    def __init__(self, what: str, numbers: str, change: str) -> None:
        super().__init__(f"{what}: {numbers}; {change}")
        self.what = what
        self.numbers = numbers
        self.change = change


def read_private(path: Path, setting: str, *, closed_to: int = 0o077) -> bytes:
    """The content of a file that others must not be able to read. closed_to: mode bits that must be 0, except those
    that root gave to our group. Raises AccessFileError."""
    try:
        data, info = read_regular(path)
    except OSError as error:
        raise unreadable(path, setting, error) from None
    if is_open_to_others(info, closed_to=closed_to):
        mode = stat.S_IMODE(info.st_mode)
        numbers = f"{path} has mode {mode:04o}: others may read it"
        raise AccessFileError(f"{setting} is open to others", numbers, f"chmod 600 {path}")
    return data


def unreadable(path: Path, setting: str, error: OSError) -> AccessFileError:
    """The error for a file that is missing or that we may not read."""
    return AccessFileError(
        f"{setting} cannot be read", f"{path}: {error.strerror or error}", "give the path of a file that we may read"
    )


def load_access_list(path: Path) -> AccessList:
    """Raises AccessFileError, also if others may read the file."""
    data = read_private(path, SETTING)
    try:
        return parse_access_list(tomllib.loads(data.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AccessFileError(f"{SETTING} is not TOML", f"{path}: {error}", "mend the file") from None
    except ValueError as error:
        raise AccessFileError(f"{SETTING} has a bad entry", f"{path}: {error}", "see docs/security.md") from None


def parse_access_list(content: Mapping[str, Any]) -> AccessList:
    """Raises ValueError naming the entry; the message never contains a key."""
    _only(content, _TABLES, "the file")
    callers = _Callers(_table(content, "tenants"), _table(content, "defaults"))
    entries = [_key_entry(name, _named(table, f"keys.{name}"), callers) for name, table in _rows(content, "keys")]
    if len({entry.digest for entry in entries}) != len(entries):
        raise ValueError("two entries have the same key")
    certificates = dict(_certificate(name, table, callers) for name, table in _rows(content, "certificates"))
    if len(certificates) != len(_table(content, "certificates")):
        raise ValueError("two certificates have the same subject")
    return AccessList(ring=KeyRing(entries), certificates=certificates)


class _Callers:
    """Makes callers with their tenants' limits."""

    def __init__(self, tenants: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._defaults = _limits(defaults, "defaults", also=("weight",))
        self._default_weight = _weight(defaults, "defaults")
        self._limits = {
            name: _limits(_named(table, f"tenants.{name}"), f"tenants.{name}", also=("share_prefixes_with", "weight"))
            for name, table in tenants.items()
        }
        self._weights = {name: _weight(table, f"tenants.{name}") for name, table in tenants.items()}
        self._groups = {name: _text(table, "share_prefixes_with", f"tenants.{name}") for name, table in tenants.items()}

    def make(self, name: str, table: Mapping[str, Any], where: str) -> Caller:
        tenant = _text(table, "tenant", where) or name
        words = table.get("scopes", [each.value for each in DEFAULT_SCOPES])
        if not isinstance(words, list) or not words or not all(word in list(Scope) for word in words):
            raise ValueError(f"{where}: scopes must be a list of {', '.join(Scope)}")
        return Caller(
            name=name,
            tenant=tenant,
            scopes=frozenset(map(Scope, words)),
            limits=self._limits.get(tenant, self._defaults),
            sharing_group=self._groups.get(tenant),
            weight=self._weights.get(tenant, self._default_weight),
        )


def _key_entry(name: str, table: Mapping[str, Any], callers: _Callers) -> KeyEntry:
    where = f"keys.{name}"
    _only(table, ("sha256", "key", "expires", *_IDENTITY), where)
    return KeyEntry(
        digest=_digest(table, where), caller=callers.make(name, table, where), expires_s=_expiry(table, where)
    )


def _digest(table: Mapping[str, Any], where: str) -> bytes:
    plain, hexadecimal = _text(table, "key", where), _text(table, "sha256", where)
    if (plain is None) == (hexadecimal is None):
        raise ValueError(f"{where}: needs sha256 or key, one of them")
    if plain is not None:
        if not MIN_KEY_LEN <= len(plain) <= MAX_KEY_LEN or not plain.isascii() or not plain.isprintable():
            raise ValueError(f"{where}: a key has {MIN_KEY_LEN} to {MAX_KEY_LEN} visible ASCII characters")
        return digest_of(plain)
    try:
        digest = bytes.fromhex(hexadecimal or "")
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ValueError(f"{where}: sha256 has 64 hexadecimal digits")
    return digest


def _expiry(table: Mapping[str, Any], where: str) -> float | None:
    moment = table.get("expires")
    if moment is None:
        return None
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ValueError(f"{where}: expires is a time with its zone, as 2027-01-31T00:00:00Z")
    return moment.timestamp()


def _certificate(name: str, table: Any, callers: _Callers) -> tuple[str, Caller]:
    where = f"certificates.{name}"
    table = _named(table, where)
    _only(table, ("subject", *_IDENTITY), where)
    subject = _text(table, "subject", where)
    if not subject:
        raise ValueError(f"{where}: needs a subject")
    return subject, callers.make(name, table, where)


def _limits(table: Mapping[str, Any], where: str, *, also: tuple[str, ...]) -> TenantLimits:
    _only(table, (*_LIMITS, *also), where)
    values = {name: table[name] for name in _LIMITS if name in table}
    for name, value in values.items():
        if type(value) is not int or not 0 < value <= 10**12:
            raise ValueError(f"{where}: {name} is a whole number above 0")
    limits = TenantLimits(**values)
    if limits.burst_tokens is not None and limits.tokens_per_minute is None:
        raise ValueError(f"{where}: burst_tokens needs tokens_per_minute")
    return limits


def _weight(table: Mapping[str, Any], where: str) -> int:
    weight = table.get("weight", 1)
    if type(weight) is not int or not 0 < weight <= MAX_WEIGHT:
        raise ValueError(f"{where}: weight is a whole number from 1 to {MAX_WEIGHT}")
    return weight


def _rows(content: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return list(_table(content, name).items())


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = _named(content.get(name, {}), name)
    if name == "defaults":
        return table
    for key in table:
        if not 0 < len(key) <= MAX_NAME_LEN or not key.isprintable():
            raise ValueError(f"{name}: a name has 1 to {MAX_NAME_LEN} visible characters")
    return table


def _named(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table")
    return value


def _text(table: Mapping[str, Any], name: str, where: str) -> str | None:
    value = table.get(name)
    if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
        raise ValueError(f"{where}: {name} must be visible text")
    return value


def _only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in table:
        if name not in known:
            raise ValueError(f"{where}: {name!r} is unknown; known are {', '.join(known)}")
