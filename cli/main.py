"""The command `octavo`: which commands there are, and how their errors look.

Every command imports what it needs when it runs, so that --help is quick and a gateway never sees torch.
"""

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from octavo.cli.bench import commands as bench_commands
from octavo.cli.client import commands as client_commands
from octavo.cli.errors import INTERRUPTED, CliError
from octavo.cli.explain import explain, show_error
from octavo.cli.help import PlainGroup
from octavo.cli.serve import commands as serve_commands
from octavo.cli.settings.setting import DEBUG_VARIABLE
from octavo.cli.tools import commands as tools_commands

app = typer.Typer(
    name="octavo",
    cls=PlainGroup,
    help="Serves Qwen2.5 and Qwen3 over gRPC from paged memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (serve_commands, client_commands, bench_commands, tools_commands):
    module.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")  # noqa: T201
        raise typer.Exit


@app.callback()
def octavo(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (before or after the command).")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serves Qwen2.5 and Qwen3 over gRPC from paged memory."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run a command and exit with its code; errors in three lines on stderr."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        _print_what_can_be(stream)
    sys.exit(main(sys.argv[1:] if arguments is None else arguments))


def _open_closed_streams() -> None:
    """Python has None for a stream that its parent closed (`<&-`), which no library expects."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (with the lowest number that is free: its own)


def _print_what_can_be(stream: object) -> None:
    """A locale without UTF-8 has no box lines, no × and not all that a model writes: `?` stands for those then."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def main(arguments: Sequence[str]) -> int:
    """The exit code of a command line: 0 done, 1 failed, 2 the command line or a setting is wrong, 130 interrupted."""
    if "--debug" in arguments:
        os.environ[DEBUG_VARIABLE] = "1"
    try:
        code = app([each for each in arguments if each != "--debug"], standalone_mode=False, prog_name="octavo")
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _fail(error)
    return code if isinstance(code, int) else 0


def _fail(error: Exception) -> int:
    if type(error).__name__ == "Abort":  # typer's: an interrupted prompt
        return INTERRUPTED
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())  # type: ignore[attr-defined]  # noqa: T201
        return 2
    if os.environ.get(DEBUG_VARIABLE) and not isinstance(error, CliError):
        traceback.print_exception(error)
    explained = explain(error)
    show_error(explained)
    return explained.exit_code


if __name__ == "__main__":
    run()
