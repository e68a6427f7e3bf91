"""Merges the sources of settings (flag over environment over file over default), and records which one won.

Must not know any particular setting.
"""

import errno
import os
import select
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from octavo.cli.errors import did_you_mean, shorten, usage
from octavo.cli.settings.setting import Settings, expanded, flag_of, help_of, read_environment, variable_of
from octavo.wire.regular_file import read_regular

DEFAULT_FILE = Path("octavo.toml")
PIPE_TIMEOUT_S = 10.0
MOST_PIPE_BYTES = 1 << 20


class Source(Enum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of one value, and where in it: `--port`, `OCTAVO_PORT`, `octavo.toml`; empty for a default."""

    source: Source
    where: str


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[S]):
    """A settings group with the origin of each of its values, and the file that was read, if any."""

    settings: S
    origins: Mapping[str, Origin]
    file: Path | None


def resolve(
    group: type[S], flags: Mapping[str, Any], *, file: Path | None = None, known_keys: frozenset[str] | None = None
) -> Resolved[S]:
    """The settings of a group. known_keys: all keys that the file may have; None: this group's.

    Raises CliError (exit code 2) for a file that cannot be read, an unknown key and a bad value.
    """
    path = find_file(file)
    in_file = read_file(path, known_keys or frozenset(group.model_fields)) if path else {}
    layers = (
        (Source.FLAG, dict(flags)),
        (Source.ENVIRONMENT, read_environment(group)),
        (Source.FILE, {name: value for name, value in in_file.items() if name in group.model_fields}),
    )
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for source, layer in layers:
        for name, value in layer.items():
            if name not in values:
                values[name] = value
                origins[name] = Origin(source=source, where=_name_in(source, name, path))
    for name in group.model_fields:
        origins.setdefault(name, Origin(source=Source.DEFAULT, where=""))
    return Resolved(settings=validated(group, values, origins), origins=origins, file=path)


def find_file(given: Path | None) -> Path | None:
    """The configuration file: the given one, else $OCTAVO_CONFIG, else ./octavo.toml; None if there is none.

    Raises CliError if a file that was asked for does not exist.
    """
    named = os.environ.get("OCTAVO_CONFIG")
    if given is None and not named:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    try:
        asked = given or expanded(named or "")
    except ValueError as error:
        raise usage("no configuration file", f"OCTAVO_CONFIG is {named!r}: {error}", "name an existing file") from None
    if not (asked.is_file() or asked.is_fifo()):
        raise usage("no configuration file", f"{asked} is not a file", "give an existing file with --config")
    return asked


def read_file(path: Path, known_keys: frozenset[str]) -> dict[str, Any]:
    """The content of a configuration file. Raises CliError if it cannot be read, is not TOML, or has an unknown key."""
    try:
        text = _read_pipe(path) if path.is_fifo() else read_regular(path)[0]
        content = tomllib.loads(text.decode("utf-8-sig"))
    except OSError as error:
        advice = "let this user read it, or give another with --config"
        raise usage("the configuration file cannot be read", f"{path}: {error.strerror}", advice) from None
    except (ValueError, RecursionError) as error:
        advice = "mend the file; `octavo config show` prints what is read"
        if isinstance(error, UnicodeDecodeError):
            why = f"it is not UTF-8 text, from its byte {error.start + 1} on"
        else:  # int() has words for programmers
            why = "a number in it has too many digits" if type(error) is ValueError else str(error)
        raise usage(f"{path} is not TOML", why, advice) from None
    for key in content:
        if key not in known_keys:
            advice = did_you_mean(key, known_keys, otherwise="`octavo config show` lists every key")
            raise usage("unknown key in the configuration file", f"{path} has {key!r}", advice)
    return content


def _read_pipe(path: Path) -> bytes:
    """What is written into a pipe, such as bash's `<(...)`, until its writers close it. Raises OSError if nothing is
    written, as by a command that failed, if it is too much, or if it does not end in time: a named pipe may have no
    writer at all."""
    text, end_s = b"", time.monotonic() + PIPE_TIMEOUT_S
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as pipe:
        while (left_s := end_s - time.monotonic()) > 0 and select.select([pipe], [], [], left_s)[0]:
            piece = pipe.read(MOST_PIPE_BYTES)
            text += piece or b""  # None: another reader took the data
            if len(text) > MOST_PIPE_BYTES:
                raise OSError(errno.EFBIG, f"More than {MOST_PIPE_BYTES:,} bytes are written into it", str(path))
            if piece == b"":
                if text:
                    return text
                raise OSError(errno.ENODATA, "Nothing was written into it", str(path))
    raise OSError(errno.ETIMEDOUT, f"It was not written to its end within {PIPE_TIMEOUT_S:g} s", str(path))


def _name_in(source: Source, name: str, path: Path | None) -> str:
    if source is Source.FLAG:
        return flag_of(name)
    return variable_of(name) if source is Source.ENVIRONMENT else str(path)


def validated(group: type[S], values: dict[str, Any], origins: Mapping[str, Origin]) -> S:
    """The settings with these values. origins: of the values; one without is taken for a flag. Raises CliError."""
    try:
        return group(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        field = group.model_fields.get(name)
        is_secret = field is not None and help_of(field).secrecy == "secret"
        given = "(hidden)" if is_secret else shorten(values.get(name))
        said = first["msg"].removeprefix("Value error, ")  # added for errors of our own validators
        complaint = said[0].lower() + said[1:].replace("a valid tuple", "a list")
        raise usage(
            f"bad value for {flag_of(name)}",
            f"{_told(name, origins.get(name))} is {given}: {complaint}",
            field.description if field and field.description else "see --help",
        ) from None


def _told(name: str, origin: Origin | None) -> str:
    """A setting by the name that it was given by."""
    if origin is None or origin.source is Source.DEFAULT:
        return flag_of(name)
    return f"{name} in {origin.where}" if origin.source is Source.FILE else origin.where
