"""Names and ports of models, read from --model. Pure, but for looking whether a folder is there."""

from collections.abc import Sequence
from pathlib import Path

from octavo.cli.errors import did_you_mean, usage


def split_model(text: str) -> tuple[str | None, str]:
    """NAME=CHECKPOINT into its parts; the name is None where none is given, and what has an empty part is no pair."""
    name, _, checkpoint = text.partition("=")
    if name and checkpoint and "/" not in name:
        return name, checkpoint
    return None, text


def name_of_model(text: str) -> str:
    """As its workers name it: NAME of NAME=CHECKPOINT, a folder's last part, else as it is. A folder need not be on
    this host where the way to it begins with a slash, a dot or a tilde."""
    name, checkpoint = split_model(text)
    if name is not None:
        return name
    path = Path(checkpoint).expanduser()
    return path.resolve().name if path.is_dir() or checkpoint[0] in "/.~" else checkpoint


def model_ports(given: Sequence[str]) -> list[tuple[str, int]]:
    """Name and port of each --model-port. Raises CliError."""
    found = []
    for text in given:
        name, _, port = text.rpartition("=")
        if not name or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
            raise usage(
                "bad value for --model-port",
                f"{text!r} is not NAME=PORT",
                "give a model's name and a port from 1 to 65535",
            )
        found.append((name, int(port)))
    return found


def check_model_ports(given: Sequence[str], models: Sequence[str]) -> None:
    """That each --model-port is of one of the models, as --model names them. Raises CliError."""
    served = list(map(name_of_model, models))
    for name, _ in model_ports(given):
        if name not in served:
            change = did_you_mean(name, served, otherwise=f"give one of {', '.join(served)}")
            raise usage("bad value for --model-port", f"no model {name!r} is served here", change)
