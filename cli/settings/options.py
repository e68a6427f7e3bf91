"""Makes a typer command's options from a settings group, so that each setting is defined once.

Must not know any particular setting.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from octavo.cli.settings.resolve import resolve
from octavo.cli.settings.setting import Settings, choices_of, expanded, flag_of, help_of, variable_of

CONFIG_HELP = "Configuration file (TOML). (OCTAVO_CONFIG; else ./octavo.toml where it exists)"

PATH = "<path>"
"""What help shows for a path."""


def with_settings(
    group: type[Settings], known_keys: frozenset[str]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function whose first parameter is `resolved: Resolved[group]`: the command that typer sees has the
    function's other parameters, an option for each setting, and --config. A parameter that is a dataclass of options
    is an option for each of its fields."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            config = given.pop("config")
            flags = {name: given.pop(name) for name in group.model_fields}
            flags = {name: value for name, value in flags.items() if value not in (None, [], ())}
            return function(resolve(group, flags, file=config, known_keys=known_keys), **_grouped(own, given))

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        parameters = [*chain.from_iterable(map(_expanded, own)), *_options(group), _config_option()]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        del command.__wrapped__
        return command

    return decorate


def given_path(text: str | Path) -> Path:
    """Parses a path option that is not a setting, as those are. Raises typer.BadParameter if it is empty, as with an
    unset variable in quotes; Path would take that for the working directory."""
    if not str(text):
        raise typer.BadParameter("it is empty: give a path, or leave it out")
    try:
        return expanded(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def shown(value: object) -> str:
    """A value as help and documentation print it."""
    if value is None or value == () or value == "":
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _expanded(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The parameter itself, or one for each field of its dataclass."""
    group = _group_of(parameter)
    if group is None:
        return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    return list(inspect.signature(group, eval_str=True).parameters.values())


def _grouped(own: list[inspect.Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """The function's arguments, from those of the command."""
    arguments = dict(given)
    for parameter in own:
        if (group := _group_of(parameter)) is not None:
            names = [field.name for field in fields(group)]
            arguments[parameter.name] = group(**{name: arguments.pop(name) for name in names})
    return arguments


def _group_of(parameter: inspect.Parameter) -> type[Any] | None:
    kind = parameter.annotation
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def _options(group: type[Settings]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, field))
        for name, field in group.model_fields.items()
    ]


def _annotation(name: str, field: FieldInfo) -> Any:
    help_ = help_of(field)
    flag = flag_of(name)
    text = f"{field.description} ({variable_of(name)}, default: {shown(field.default)})"
    kind = _kind(field)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=text,
        show_default=False,
        rich_help_panel=help_.panel,
        hidden=help_.visibility == "hidden",
        metavar=PATH if kind is Path else "|".join(choices_of(field)) or None,
    )
    return Annotated[(str if kind is Path else kind) | None, option]  # Path would take "" for the working directory


def _kind(field: FieldInfo) -> Any:
    """The type that typer parses; everything else is left to pydantic."""
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        return list[str]
    return kind if kind in (bool, int, float, Path) else str


def _config_option() -> inspect.Parameter:
    option = typer.Option(
        "--config", help=CONFIG_HELP, rich_help_panel="Configuration", parser=given_path, metavar=PATH
    )
    annotation = Annotated[Path | None, option]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
