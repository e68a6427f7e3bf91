"""Names and ports of models, from --model and --model-port. Pure, except that it checks whether a folder exists."""

from collections.abc import Sequence
from pathlib import Path

from octavo.cli.errors import did_you_mean, shorten, usage
from octavo.cli.whole_number import whole_number


def split_model(text: str) -> tuple[str | None, str]:
    """Split NAME=CHECKPOINT into (name, checkpoint); otherwise (None, text), also if one part would be empty or the
    name would contain a slash."""
    name, _, checkpoint = text.partition("=")
    if name and checkpoint and "/" not in name:
        return name, checkpoint
    return None, text


def name_of_model(text: str) -> str:
    """The name by which workers serve it: NAME of NAME=CHECKPOINT, the last part of a folder's path, else the text
    itself. A folder need not exist on this host if its path starts with a slash, a dot or a tilde."""
    name, checkpoint = split_model(text)
    if name is not None:
        return name
    path = Path(checkpoint).expanduser()
    return path.resolve().name if path.is_dir() or checkpoint[0] in "/.~" else checkpoint


def is_local(checkpoint: str) -> bool:
    """Whether it is a folder on this host, or a model included in every installation: nothing is fetched for it."""
    from octavo.model.checkpoint.source import embedded_names

    return Path(checkpoint).expanduser().is_dir() or checkpoint in embedded_names()


def check_revision(models: Sequence[str], revision: str | None) -> None:
    """Raises CliError if a revision is given, and no model has any. models: as in --model."""
    if revision is not None and all(is_local(split_model(each)[1]) for each in models):
        numbers = f"--revision is {shorten(revision)}, and {', '.join(models)} is no Hugging Face id"
        raise usage("--revision is of Hugging Face ids", numbers, "leave it out, or give an id such as Qwen/Qwen3-0.6B")


def model_ports(given: Sequence[str]) -> list[tuple[str, int]]:
    """(name, port) of each --model-port. Raises CliError."""
    found = []
    for text in given:
        name, _, word = text.rpartition("=")
        port = whole_number(word, least=1, most=65_535)
        if not name or port is None:
            raise usage(
                "bad value for --model-port",
                f"{shorten(text)} is not NAME=PORT",
                "give a model's name and a port from 1 to 65535",
            )
        found.append((name, port))
    return found


def check_model_ports(given: Sequence[str], models: Sequence[str]) -> None:
    """Raises CliError if a --model-port names none of the models. models: as in --model."""
    served = list(map(name_of_model, models))
    for name, _ in model_ports(given):
        if name not in served:
            change = did_you_mean(name, served, otherwise=f"give one of {', '.join(served)}")
            raise usage("bad value for --model-port", f"no model {name!r} is served here", change)
