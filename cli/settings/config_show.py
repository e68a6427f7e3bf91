"""`octavo config show` (every setting, its value, its source) and docs/configuration.md, generated from the
settings."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table

from octavo.cli.settings.groups import COMMANDS, AllSettings
from octavo.cli.settings.options import shown
from octavo.cli.settings.resolve import Origin, Resolved, S, Source
from octavo.cli.settings.setting import Settings, choices_of, flag_of, help_of, variable_of

INTRODUCTION = """# Configuration

<!-- made by `octavo config docs`; tests/cli/settings/test_config_docs.py fails where it is not current -->

Every setting has one name, which is its key in `octavo.toml`, its flag (`--max-num-seqs`) and its variable
(`OCTAVO_MAX_NUM_SEQS`). A flag wins over the environment, the environment over the file, the file over the default.
`octavo config show` prints every value and where it came from.

The file is the one given by `--config` or `$OCTAVO_CONFIG`, which may be a pipe (`--config <(envsubst < octavo.toml)`),
else `octavo.toml` in the working directory:

```toml
model = ["folio-chat", "small=Qwen/Qwen2.5-0.5B-Instruct"]
port = 50051
num_blocks = 4096
prefix_cache = "on"
```

Settings that take several values are a repeated flag, a comma-separated variable, a list in the file. An unknown key
is an error, so is an empty path; an empty variable sets nothing. A path may begin with `~`, the home folder. Units are
in the names: `_s` seconds, `_ms` milliseconds, `_bytes`, `_tokens`.
"""


def configuration_page() -> str:
    """The whole of docs/configuration.md."""
    return INTRODUCTION + "".join(_section(panel) for panel in _panels())


def _shown_fields() -> list[tuple[str, FieldInfo]]:
    return [(name, field) for name, field in AllSettings.model_fields.items() if help_of(field).visibility == "shown"]


def _panels() -> list[str]:
    return list(dict.fromkeys(help_of(field).panel for _, field in _shown_fields()))


def _section(panel: str) -> str:
    lines = [f"\n## {panel}\n", "| key | flag | variable | default | used by | |", "|---|---|---|---|---|---|"]
    for name, field in _shown_fields():
        if help_of(field).panel != panel:
            continue
        users = ", ".join(command for command, group in COMMANDS.items() if name in group.model_fields)
        words = choices_of(field)
        text = f"{field.description}" + (f" ({', '.join(words)})" if words else "")
        cells = (f"`{name}`", f"`{flag_of(name)}`", f"`{variable_of(name)}`", shown(field.default), users, text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One setting, with its value and where that comes from."""

    key: str
    value: str
    source: str
    where: str
    commands: tuple[str, ...]


def setting_rows(resolved: Resolved[S]) -> list[SettingRow]:
    """Every setting of the group that is not hidden, sorted by name."""
    group = type(resolved.settings)
    visible = [name for name, field in group.model_fields.items() if help_of(field).visibility == "shown"]
    secrets = {name for name in visible if help_of(group.model_fields[name]).secrecy == "secret"}
    return [_row(name, _printed(resolved.settings, name, secrets), resolved.origins) for name in sorted(visible)]


def show_config(resolved: Resolved[S], *, as_json: bool) -> int:
    """Print JSON if asked for, else a table on a terminal or one line for each setting. Returns 0."""
    rows = setting_rows(resolved)
    if as_json:
        content = {row.key: {"value": row.value, "source": row.source, "where": row.where} for row in rows}
        print(json.dumps(content, indent=2))  # noqa: T201
        return 0
    if not sys.stdout.isatty():  # a line is never wrapped, so that grep works
        for row in rows:
            print(_line(row))  # noqa: T201
        return 0
    table = Table("key", "value", "from", "used by")
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        style = "dim" if row.source == Source.DEFAULT.value else "bold"
        table.add_row(row.key, row.value, f"{row.source} {row.where}".strip(), ", ".join(row.commands), style=style)
    console = Console(markup=False)
    console.print(table)
    console.print(
        f"file: {resolved.file or 'none'}. Strongest first: flag (--max-num-seqs), environment (OCTAVO_MAX_NUM_SEQS), "
        "file (max_num_seqs), default."
    )
    return 0


def _line(row: SettingRow) -> str:
    return f"{row.key} = {row.value}  ({' '.join(filter(None, (row.source, row.where)))}; {', '.join(row.commands)})"


def _printed(settings: Settings, name: str, secrets: set[str]) -> str:
    value = getattr(settings, name)
    return "(hidden)" if name in secrets and value else shown(value)


def _row(name: str, value: str, origins: Mapping[str, Origin]) -> SettingRow:
    return SettingRow(
        key=name,
        value=value,
        source=origins[name].source.value,
        where=origins[name].where,
        commands=tuple(command for command, group in COMMANDS.items() if name in group.model_fields),
    )
