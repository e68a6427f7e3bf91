"""`octavo keys new-api`: a new API key, its digest in the file of keys, the key itself on the screen, once."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from octavo.cli.errors import CliError, usage
from octavo.cli.whole_file import write_durably
from octavo.gateway.auth.authenticator import digest_of, new_key
from octavo.gateway.auth.key_file import SETTING, AccessFileError, load_access_list, parse_access_list

HEADER = "# Octavo API keys. For the gateway only (0600); docs/security.md says what may stand here.\n"


def add_api_key(name: str, file: Path, *, tenant: str | None, scopes: Sequence[str], expires: str | None) -> str:
    """Add an entry and return the key. The file is replaced as a whole, so that gateways never read half of it. Raises
    CliError; then the file is unchanged."""
    key = new_key()
    entry = _entry(name, digest_of(key).hex(), tenant, scopes, expires)
    if file.exists():
        try:
            load_access_list(file)
        except AccessFileError as error:  # which names the flag of the gateway
            raise usage(error.what.replace(SETTING, "--file"), error.numbers, error.change) from None
        before = file.read_text("utf-8")
    else:
        before = HEADER
    _check(before, entry, name, expires)
    _replace(file, before.rstrip("\n") + "\n" + entry)
    return key


def _entry(name: str, digest: str, tenant: str | None, scopes: Sequence[str], expires: str | None) -> str:
    lines = [f"\n[keys.{_quoted(name)}]", f'sha256 = "{digest}"']
    lines += [f"tenant = {_quoted(tenant)}"] if tenant else []
    lines += [f"scopes = [{', '.join(_quoted(each) for each in scopes)}]"] if scopes else []
    if expires and not expires.isprintable():  # a line of its own would be an entry of its own
        raise usage("bad value for --expires", f"{expires!r} is no time", "write it as 2027-01-31T00:00:00Z")
    lines += [f"expires = {expires}"] if expires else []
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    if not text.isprintable() or set(text) & set('"\\'):
        raise usage("bad name", f"{text!r} has characters that a name cannot have", "use letters, digits, - . _")
    return f'"{text}"'


def _check(before: str, entry: str, name: str, expires: str | None) -> None:
    what = "the key cannot be added"
    if name in tomllib.loads(before).get("keys", {}):
        raise usage(what, f"there is a key of the name {name!r} already", "choose another name")
    try:
        parse_access_list(tomllib.loads(before + entry))
    except tomllib.TOMLDecodeError as error:
        numbers = f"--expires is {expires!r}: {error}" if expires else str(error)
        raise usage(what, numbers, "write a time as 2027-01-31T00:00:00Z, and each key under its own name") from None
    except ValueError as error:
        raise usage(what, str(error), "see docs/security.md") from None


def _replace(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(path, text)
    except OSError as error:
        where = f"{error.filename or path}: {error.strerror}"
        raise CliError("the file of keys cannot be written", where, "give another with --file") from None
