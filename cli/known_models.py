"""Names of checkpoints that people mean, for did-you-mean before anything is downloaded."""

from pathlib import Path

from cli.errors import CliError
from cli.suggest import did_you_mean

_SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
PUBLISHED = tuple(f"Qwen/Qwen2.5-{size}{kind}" for size in _SIZES for kind in ("", "-Instruct")) + tuple(
    f"Qwen/Qwen2.5-Coder-{size}{kind}" for size in _SIZES[:-1] for kind in ("", "-Instruct")
)


def embedded_models() -> tuple[str, ...]:
    """Checkpoints that are part of the package."""
    folder = Path(__file__).resolve().parent.parent / "model" / "embedded"
    return tuple(sorted(each.name for each in folder.glob("*") if (each / "config.json").is_file()))


def require_known(checkpoint: str) -> None:
    """Raises CliError for what is neither a folder, an embedded model nor possibly a Hugging Face id."""
    if Path(checkpoint).is_dir() or checkpoint in embedded_models():
        return
    known = (*embedded_models(), *PUBLISHED)
    advice = did_you_mean(checkpoint, known, otherwise="give a checkpoint folder, folio-chat, or a Hugging Face id")
    looks_like_id = checkpoint.count("/") == 1 and not checkpoint.startswith((".", "/", "~"))
    if not looks_like_id or (checkpoint.startswith("Qwen/Qwen2.5") and checkpoint not in PUBLISHED):
        kind = "no such model" if not looks_like_id else "Qwen has published no such model"
        raise CliError(kind, f"--model {checkpoint} is no folder and no known name", advice)
