"""The commands of `octavo`: which there are.

Every command imports what it needs when it runs, so that --help is quick and a gateway never sees torch.
"""

from functools import cache
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.main import get_command

from octavo.cli.help import PlainGroup


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")  # noqa: T201
        raise typer.Exit


def octavo(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (before or after the command).")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serves Qwen2.5 and Qwen3 over gRPC from paged memory."""


def whole_app() -> typer.Typer:
    """Every command."""
    from octavo.cli.bench import commands as bench
    from octavo.cli.client import commands as client
    from octavo.cli.serve import commands as serve
    from octavo.cli.tools import commands as tools

    return _app(serve, client, bench, tools)


@cache
def whole_command() -> Any:
    """The command `octavo` with those in it, made once: they have 800 options."""
    return get_command(whole_app())


def service_command() -> Any:
    """The same with those alone that run a service, so that a service does not wait for the options of the others."""
    from octavo.cli.serve import commands as serve

    return get_command(_app(serve))


def _app(*modules: ModuleType) -> typer.Typer:
    app = typer.Typer(
        name="octavo",
        cls=PlainGroup,
        help="Serves Qwen2.5 and Qwen3 over gRPC from paged memory.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in modules:
        module.register(app)
    app.callback()(octavo)
    return app
