"""Reading a device's libraries before their kernels are asked for.

A CUDA library's file has hundreds of megabytes of kernels, of which the first call of each loads its own. On a machine
that has not read the file yet, that is page after page from the disk, in the thread that waits for it, while the
disk could have brought all of it at once. So threads read the files through while weights are loaded and kernels
compiled. Where the system has them in memory already it costs a fraction of a second beside the start.

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
"""What steps call, by how the files' names begin, the one with most kernels first."""
PART_BYTES = 16 << 20
NUM_THREADS = 4
_MAPS = Path("/proc/self/maps")


def mapped_libraries(maps: Path = _MAPS) -> list[Path]:
    """Those of LIBRARIES that this process has, as the system tells; none where it does not."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return [path for prefix in LIBRARIES for path in sorted(paths) if path.name.startswith(prefix)]


def read_ahead(paths: Iterable[Path]) -> Thread:
    """Begin to read the files; what cannot be read is left out. The thread ends when all is read, and never keeps the
    process from ending."""
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
