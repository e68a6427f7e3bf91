"""Reads a device's libraries from disk before their kernels are needed.

A CUDA library's file contains hundreds of megabytes of kernels, and the first call of each kernel loads it. If the file
is not in the page cache yet, the calling thread waits for the disk page by page, although the disk could deliver the
whole file much faster. So threads read the files while weights are loaded and kernels compiled. If they are cached
already, this takes a fraction of a second beside the rest of the start.

Must not know: which of the kernels are needed.
"""

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from threading import Thread

import structlog

log = structlog.get_logger(__name__)

LIBRARIES = ("libcublasLt.", "libcublas.", "libtorch_cuda.")
"""Libraries that steps call, as prefixes of file names; the one with the most kernels first."""
PART_BYTES = 16 << 20
NUM_THREADS = 4
_MAPS = Path("/proc/self/maps")


def mapped_libraries(maps: Path = _MAPS) -> list[Path]:
    """Files of those LIBRARIES that this process has mapped; empty if the system does not tell."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return [path for prefix in LIBRARIES for path in sorted(paths) if path.name.startswith(prefix)]


def read_ahead(paths: Iterable[Path]) -> Thread:
    """Start reading the files; those that cannot be read are skipped. The thread ends when all is read, and does not
    keep the process from ending."""
    thread = Thread(target=_read, args=(list(paths),), name="libraries", daemon=True)
    thread.start()
    return thread


def _read(paths: list[Path]) -> None:
    begin_s = time.perf_counter()
    parts = deque((path, start) for path in paths for start in range(0, _size(path), PART_BYTES))
    counts = deque[int]()
    readers = [Thread(target=_read_parts, args=(parts, counts), daemon=True) for _ in range(NUM_THREADS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    log.info("libraries_read", num_bytes=sum(counts), seconds=round(time.perf_counter() - begin_s, 2))


def _read_parts(parts: deque[tuple[Path, int]], counts: deque[int]) -> None:
    room = bytearray(PART_BYTES)
    while True:
        try:
            path, start = parts.popleft()
        except IndexError:
            return
        try:
            with path.open("rb") as file:
                file.seek(start)
                counts.append(file.readinto(room))
        except OSError:
            continue


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
