"""What a setting is: a pydantic field with its help, from which flag, variable, file key and documentation are derived.

Must not know any particular setting.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from octavo.wire.endpoints import is_address

ENV_PREFIX = "OCTAVO_"
DEBUG_VARIABLE = ENV_PREFIX + "DEBUG"

INT32, UINT32 = 2**31 - 1, 2**32 - 1
MANY = 1_000_000  # more than any host has of what is counted
MOST_SECONDS = 2_000_000  # 23 days: gRPC and ZeroMQ count milliseconds in 32 bits
DAY_MS = 86_400_000


class Settings(BaseModel):
    """Base of all groups. Values come from `cli.settings.resolve`, which merges the sources."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,  # a process uses one or two groups; building all of them takes a third of a command's start
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Raises ValueError for a bool, which pydantic would read as a number."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError("input should be a number, not true or false")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _a_path_that_can_be_one(cls, value: object, info: ValidationInfo) -> object:
        """Raises ValueError for an empty path, which would mean the working directory and usually comes from an unset
        variable in quotes; and for one with a NUL."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, str) and Path in (kind, *get_args(kind)):
            if not value:
                raise ValueError("a path should not be empty; leave it out instead")
            if "\0" in value:
                raise ValueError("a path should have no NUL in it")
            return expanded(value)
        return value


def expanded(text: str) -> Path:
    """The path, with the home folder in place of a leading ~, as a shell has it. A configuration file, a variable and
    `--flag=~/x` come without. Raises ValueError if it is of nobody."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("there is no such home folder; write the path out") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingHelp:
    """How help shows a setting. panel: the section that it is in. visibility: shown or hidden. secrecy: whether its
    value may be printed (open) or not (secret)."""

    panel: str
    visibility: str = "shown"
    secrecy: str = "open"


def setting(
    default: Any, description: str, *, panel: str, visibility: str = "shown", secrecy: str = "open", **limits: Any
) -> Any:
    """A field of a settings group. `limits` are pydantic's (ge, le, gt, lt); every number has one above and one below,
    so that none ends in what a library says of it."""
    help_ = SettingHelp(panel=panel, visibility=visibility, secrecy=secrecy)
    return Field(default, description=description, json_schema_extra={"setting": help_}, **limits)  # type: ignore[dict-item]


def help_of(field: FieldInfo) -> SettingHelp:
    """The help part of a field made by `setting`."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    found = extra["setting"]
    assert isinstance(found, SettingHelp)
    return found


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


_Word = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[_Word, ...], BeforeValidator(_split)]
"""Several non-empty names: a repeated flag, a comma-separated variable, a string or list in the file."""


def is_host(text: str) -> bool:
    """Whether it may be a host's name or its address, without brackets: no URL, and without a port."""
    return text.isprintable() and not {" ", "/"} & set(text) and (":" not in text or is_address(text))


def _host(value: object) -> object:
    if not isinstance(value, str):
        return value
    host = value.removeprefix("[").removesuffix("]")
    if not is_host(host):
        raise ValueError("input should be a host name or an address alone, as localhost or ::1")
    return host


Host = Annotated[str, Field(min_length=1), BeforeValidator(_host)]
"""A name or an address to listen on or to call, without the brackets that IPv6 has before a port. Never empty, which
the system would take for every address of this host, and no URL."""


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def read_environment(group: type[Settings]) -> dict[str, Any]:
    """The settings of this group that the environment sets, by name, not yet validated; empty variables are ignored."""
    found = {name: os.environ.get(variable_of(name)) for name in group.model_fields}
    return {name: value for name, value in found.items() if value}


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that a setting accepts if it is a choice, else empty."""
    words = get_args(field.annotation)
    return words if words and all(isinstance(word, str) for word in words) else ()
