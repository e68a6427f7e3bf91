"""Options of a command that are made from settings and from dataclasses."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import typer

from octavo.cli.settings.groups import ALL_KEYS, ClientSettings
from octavo.cli.settings.options import with_settings
from octavo.cli.settings.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class Extras:
    """A group of options."""

    echo: Annotated[bool, typer.Option("--echo")] = False
    words: Annotated[list[str] | None, typer.Option("--word")] = None


def greet(resolved: Resolved[ClientSettings], name: str = "you", *, extras: Extras, loud: bool = False) -> object:
    return name, extras, loud, resolved.settings.port


def test_a_dataclass_stands_for_an_option_of_each_field_in_its_place() -> None:
    command = with_settings(ClientSettings, ALL_KEYS)(greet)
    names = list(inspect.signature(command).parameters)
    assert names == ["name", "echo", "words", "loud", *ClientSettings.model_fields, "config"]
    unset = dict.fromkeys(ClientSettings.model_fields)
    told = command(**unset | {"port": 7, "config": None, "name": "me", "echo": True, "words": ["x"], "loud": True})
    assert told == ("me", Extras(echo=True, words=["x"]), True, 7)
