"""The folder where the processes of one service meet: 0700, and gone afterwards."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.errors import CliError
from cli.setting import flag_of
from wire.run_dir import RunDirError, ensure_run_dir

READY_FILE = "ready"
"""In the run directory once everything serves: the address of the gRPC service, for scripts that wait for it."""


@contextmanager
def run_folder(given: Path | None) -> Iterator[Path]:
    """The folder given, checked (and left where it is), or a new one that is removed at the end.

    Raises CliError where the folder given cannot be trusted.
    """
    if given is None:
        with tempfile.TemporaryDirectory(prefix="octavo-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    existed = given.exists()
    try:
        folder = ensure_run_dir(given.absolute())
    except RunDirError as error:
        raise CliError(
            "the run directory cannot be used", str(error), f"mend it, or give another with {flag_of('run_dir')}"
        ) from None
    (folder / READY_FILE).unlink(missing_ok=True)  # of a supervisor that was killed
    try:
        yield folder
    finally:
        (folder / READY_FILE).unlink(missing_ok=True)
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
