"""docs/configuration.md, made from the settings themselves. Pure."""

from pydantic.fields import FieldInfo

from cli.options import shown
from cli.setting import choices_of, flag_of, help_of, variable_of
from cli.settings import COMMANDS, AllSettings

INTRODUCTION = """# Configuration

<!-- made by `octavo config docs`; tests/cli/test_config_docs.py fails where it is not current -->

Every setting has one name, which is its key in `octavo.toml`, its flag (`--max-num-seqs`) and its variable
(`OCTAVO_MAX_NUM_SEQS`). A flag wins over the environment, the environment over the file, the file over the default.
`octavo config show` prints every value and where it came from.

The file is the one given by `--config` or `$OCTAVO_CONFIG`, else `octavo.toml` in the working directory:

```toml
model = ["folio-chat", "small=Qwen/Qwen2.5-0.5B-Instruct"]
port = 50051
num_blocks = 4096
prefix_cache = "on"
```

Settings that take several values are a repeated flag, a comma-separated variable, a list in the file. An unknown key
is an error. Units are in the names: `_s` seconds, `_ms` milliseconds, `_bytes`, `_tokens`.
"""


def configuration_page() -> str:
    """The whole page."""
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
