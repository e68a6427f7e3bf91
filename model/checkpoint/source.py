"""From what a user types to a folder on disk: a folder, the name of an embedded model, or a hub id to download.

Downloads take *.safetensors, *.json, *.txt and *.jinja only: nothing pickled, no code.
Must not know: what is in the files.
"""

import difflib
import fnmatch
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.model.errors import CheckpointError, HubUnreachable, NoRoom
from octavo.wire.checkpoint_files import FileRefused, check_files, find_file

EMBEDDED = Path(__file__).parents[1] / "embedded"
ALLOWED_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja")
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")

PUBLISHED = tuple(
    f"Qwen/Qwen2.5-{size}{kind}"
    for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
    for kind in ("-Instruct", "")
) + tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B"))
"""The dense checkpoints of the Qwen2.5 and Qwen3 releases, for did-you-mean."""

HUB_TIMEOUT_S = 10.0
OnDownload = Callable[[int, int | None], None]
"""Called with (bytes done, bytes in all as far as they are known)."""


def resolve_checkpoint(name: str, *, revision: str | None = None, on_progress: OnDownload | None = None) -> Path:
    """The folder of a checkpoint, downloaded if necessary.

    name: an existing folder with a config.json; an embedded model ("folio-chat"); or a hub id ("Qwen/Qwen2.5-0.5B").
    revision: branch, tag or commit, for hub ids. on_progress: None: the hub's own progress bar goes to stderr if that
    is a terminal. Raises CheckpointError saying what to try instead.
    """
    folder = Path(name).expanduser()
    if name and _is_folder(folder):
        return checked_folder(folder)
    if name in embedded_names():
        return EMBEDDED / name
    if HUB_ID.fullmatch(name) and ".." not in name:
        return download(name, revision=revision, on_progress=on_progress)
    raise CheckpointError(f"{name!r} is neither a folder, nor an embedded model, nor a hub id{suggestion(name)}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that no file can have
        return False


def embedded_names() -> list[str]:
    """Models that come with the repository."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def checked_folder(folder: Path) -> Path:
    """The folder itself. Raises CheckpointError if it is not a checkpoint, or a file in it leads elsewhere."""
    try:
        if find_file(folder, "config.json") is None:
            raise CheckpointError(f"{folder}: there is no config.json in it, so it is not a checkpoint folder")
        check_files(folder, suffixes=tuple(pattern.removeprefix("*") for pattern in ALLOWED_FILES))
    except FileRefused as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    return folder


def suggestion(name: str) -> str:
    """What the user may have meant; always something that exists."""
    known = [*embedded_names(), *PUBLISHED]
    short_names = {known_name.rsplit("/", 1)[-1].lower(): known_name for known_name in known}
    close = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), short_names, n=3, cutoff=0.6)
    if not close:
        return f" (there are {', '.join(known[:3])}, …)"
    return f": did you mean {' or '.join(short_names[match] for match in close)}?"


def look_for_checkpoint(name: str, *, revision: str | None = None) -> Path | None:
    """The folder of a checkpoint that is on this machine; None if it would have to be downloaded. Raises
    CheckpointError as `resolve_checkpoint` does."""
    folder = Path(name).expanduser()
    if (name and _is_folder(folder)) or name in embedded_names() or not HUB_ID.fullmatch(name) or ".." in name:
        return resolve_checkpoint(name, revision=revision)
    from huggingface_hub import HfApi, try_to_load_from_cache

    cached = [try_to_load_from_cache(name, file, revision=revision) for file in ("config.json", "tokenizer.json")]
    if all(isinstance(each, str) for each in cached):
        return Path(str(cached[0])).parent
    with _hub_errors(name, revision):
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    return None


def download(name: str, *, revision: str | None, on_progress: OnDownload | None) -> Path:
    """Download what is missing of a hub repository into the hub's cache. Complete files are kept, and interrupted
    downloads are resumed. Raises CheckpointError, including NoRoom."""
    # Imported here: a worker with a local folder has no use for an HTTP client.
    from huggingface_hub import snapshot_download

    with _hub_errors(name, revision):
        num_bytes = _plan_download(name, revision)
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(ALLOWED_FILES),
            tqdm_class=None if on_progress is None else progress_bar(on_progress, least_total=num_bytes),
        )
    return checked_folder(Path(folder))


def _plan_download(name: str, revision: str | None) -> int:
    """Bytes still to download; 0 if the hub does not say or cannot be reached, since its cache may be enough. Raises
    CheckpointError for a repository that is not a checkpoint, NoRoom."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except Exception:  # told, or made up for, by the download
        return 0
    files = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    for pattern in ("config.json", "*.safetensors") if files else ():
        if not fnmatch.filter(files, pattern):
            raise CheckpointError(f"{name}: the hub's repository has no {pattern}, so it is no checkpoint to serve")
    missing = [
        file
        for file in files
        if any(fnmatch.fnmatch(file, pattern) for pattern in ALLOWED_FILES)
        and not isinstance(try_to_load_from_cache(name, file, revision=info.sha), str)
    ]
    num_bytes, cache = sum(files[file] for file in missing), Path(HF_HUB_CACHE)
    free = shutil.disk_usage(next(each for each in (cache, *cache.absolute().parents) if each.exists())).free
    if num_bytes > free:
        raise NoRoom(f"{name}: {num_bytes:,} bytes to download, and {free:,} bytes free in {cache}")
    return num_bytes


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except CheckpointError:
        raise
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name}: the hub gives it only to those who accepted its terms and set a token"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{name}: there is no such model on the hub{suggestion(name)}") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: there is no revision {revision!r}") from error
    except Exception as error:  # of the hub's, the system's, or of the HTTP client, which has been another one before
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HubUnreachable(
            f"{name}: cannot be downloaded, and is not complete in the hub's cache: {reason}"
        ) from error


def progress_bar(on_progress: OnDownload, *, least_total: int = 0) -> type:
    """A class that the hub uses as a progress bar. It shows nothing, and passes on the bytes of all files.

    least_total: bytes known to come; the hub itself only learns of a file when it begins with it.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()

    class Forwarding(tqdm):  # type: ignore[misc]
        """Of the bars that the hub makes, only the one for written bytes is handed on."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._is_bytes = kwargs.get("unit") == "B" and "Reconstructing" in str(kwargs.get("desc"))
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total")

        def update(self, n: float | None = 1) -> None:
            """Called from the download threads. What the listener raises ends the download."""
            with lock:
                self.n += n or 0
                if self._is_bytes:
                    on_progress(int(self.n), max(int(self.total or 0), least_total) or None)

    return Forwarding
