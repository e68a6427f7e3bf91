"""How --help looks: every flag, variable and default whole at any width, in the settings' panels.

Tables cut what does not fit into their columns; here a description goes below its flag where there is no room beside.
Must not know any particular command.
"""

import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

_MIN_WIDTH, _MAX_WIDTH = 40, 120
_INDENT = 2
_COLUMN = 34  # where descriptions begin, in a terminal that is wide enough


class PlainCommand(TyperCommand):
    """A command whose help has this layout."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(_page(_usage(self, ctx), _description(self), _panels(self, ctx)))


class PlainGroup(TyperGroup):
    """A group of commands whose help has this layout."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """typer proposes what is nearest to a name that there is none of: of all commands, also hidden ones."""
        commands = self.commands
        if args and args[0] not in commands:
            self.commands = {name: command for name, command in commands.items() if not command.hidden}
        try:
            return super().resolve_command(ctx, args)
        finally:
            self.commands = commands

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        panels = [*_panels(self, ctx), *_commands(self, ctx)]
        formatter.write(_page(_usage(self, ctx), _description(self), panels))


Row = tuple[str, str]
Panel = tuple[str, list[Row]]


def _usage(command: Any, ctx: Any) -> str:
    return " ".join(["Usage:", ctx.command_path, *command.collect_usage_pieces(ctx)])


def _description(command: Any) -> str:
    return inspect.cleandoc(command.help or "")


def _panels(command: Any, ctx: Any) -> list[Panel]:
    panels: dict[str, list[Row]] = {}
    for parameter in command.get_params(ctx):
        is_argument = parameter.param_type_name == "argument"
        if getattr(parameter, "hidden", False):
            continue
        title = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
        panels.setdefault(title, []).append(_row(parameter, ctx))
    return sorted(panels.items(), key=lambda panel: panel[0] not in ("Arguments", "Options"))


def _row(parameter: Any, ctx: Any) -> Row:
    flags, text = parameter.get_help_record(ctx) or (parameter.make_metavar(ctx), parameter.help or "")
    # Python's words for what repeats, or has bounds; both are said beside it.
    flags = re.sub(r"<(?:list\[)?(\w+)(?:\]| range)>", r"<\1>", flags)
    return flags, text


def _commands(group: Any, ctx: Any) -> list[Panel]:
    panels: dict[str, list[Row]] = {}
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command is not None and not command.hidden:
            title = getattr(command, "rich_help_panel", None) or "Commands"
            first = _description(command).partition("\n\n")[0].replace("\n", " ")
            panels.setdefault(title, []).append((name, first))
    return list(panels.items())


def _page(usage: str, description: str, panels: list[Panel]) -> str:
    from rich.console import Console  # only a page of help needs it
    from rich.text import Text

    width = max(_MIN_WIDTH, min(_MAX_WIDTH, _columns()))
    text = Text()
    text.append(_wrapped(usage, width, "  ") + "\n", "bold")
    for paragraph in filter(None, description.split("\n\n")):
        text.append("\n" + _wrapped(paragraph.replace("\n", " "), width, "") + "\n")
    for title, rows in panels:
        text.append(f"\n{title}\n", "bold")
        for flags, about in rows:
            for line in _lines(flags, about, width):
                text.append(line + "\n")
    text.highlight_regex(r"(?m)^  --?[\w-]+", "cyan")
    console = Console(file=io.StringIO(), force_terminal=sys.stdout.isatty(), highlight=False)
    with console.capture() as captured:
        console.print(text, end="", soft_wrap=True)
    return captured.get()


def _columns() -> int:
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdigit() else shutil.get_terminal_size().columns


def _lines(flags: str, about: str, width: int) -> Iterator[str]:
    """One row: the description beside the flags if there is room, else below them."""
    head = " " * _INDENT + flags
    column = _COLUMN if width >= 2 * _COLUMN else 2 * _INDENT + 2
    space = " " * column
    body = [space + line for line in _wrapped(about, width - column, "").splitlines()]
    if body and len(head) + 2 <= column:
        yield head + body.pop(0)[len(head) :]
    else:
        yield from (" " * _INDENT + line for line in _wrapped(flags, width - _INDENT, "  ").splitlines())
    yield from body


def _wrapped(text: str, width: int, indent: str) -> str:
    """Never breaks a word: flags and variables stay whole at any width."""
    return textwrap.fill(text, max(width, 10), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
