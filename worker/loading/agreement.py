"""Checks that all ranks of a group have the same program, and the same checkpoint before and after loading it. Parts
of two different models would give tokens without any error.

Must not know: how ranks are started, what they do.
"""

import hashlib
import importlib.util
import os
from importlib import metadata
from pathlib import Path

import torch

from octavo.model.parallel import Ranks
from octavo.wire.bundle import bundle_digest
from octavo.worker.loading.model_card import tokenizer_files

PACKAGES = ("octavo.model", "octavo.wire", "octavo.worker")  # what a rank runs
SOURCES = {".py", ".c", ".h"}
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096
_DIGEST_BYTES = 6


class RanksDiffer(ValueError):
    """A rank's build or checkpoint differs from rank 0's; the message says which rank, and what to do."""


def check_agreement(ranks: Ranks, *, build: str, checkpoint: str) -> None:
    """Call on every rank with its own `build_name` and `checkpoint_name`. Raises the same RanksDiffer on every rank."""
    for what, own, advice in (
        ("another build of Octavo", build, "install one build everywhere and start again"),
        ("another checkpoint", checkpoint, "its files changed while the ranks started, or differ between hosts"),
    ):
        first, *others = ranks.gather_texts(own)
        for rank, theirs in enumerate(others, start=1):
            if theirs != first:
                raise RanksDiffer(
                    f"rank {rank} of {ranks.size} has {what} than rank 0 ({theirs}, not {first}): {advice}"
                )


def check_unchanged(ranks: Ranks, folder: Path, *, checkpoint: str) -> None:
    """Call on every rank once it has read the whole folder. checkpoint: the `checkpoint_name` from before. Raises the
    same RanksDiffer on every rank."""
    for rank, now in enumerate(ranks.gather_texts(checkpoint_name(folder))):
        if now != checkpoint:
            raise RanksDiffer(
                f"rank {rank} of {ranks.size} has read a checkpoint that changed meanwhile ({now}, not {checkpoint}): "
                "start again once its files stay as they are"
            )


def build_name() -> str:
    """Octavo's version, a hash of its source files on disk, and torch's version."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(path for path in Path(place).rglob("*") if path.suffix in SOURCES):
                digest.update(f"{package} {path.relative_to(place)}\0".encode() + path.read_bytes())
    try:
        version = metadata.version("octavo")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return f"{version} {digest.hexdigest()}, torch {torch.__version__}"


def checkpoint_name(folder: Path) -> str:
    """The folder's name and a hash of the files that gateways get (`tokenizer_files`) and, for every file of weights,
    of its name, its size, and samples spread over it, beginning with its head: much less than 144 GB, but enough to
    tell two trainings apart. Raises CardError, OSError."""
    digest = hashlib.blake2b(bundle_digest(tokenizer_files(folder)).encode(), digest_size=_DIGEST_BYTES)
    for path in sorted(folder.glob("*.safetensors*")):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size}\0".encode())
            for index in range(NUM_SAMPLES):
                digest.update(
                    os.pread(file.fileno(), SAMPLE_BYTES, index * max(size - SAMPLE_BYTES, 0) // (NUM_SAMPLES - 1))
                )
    return f"{folder.name} {digest.hexdigest()}"
