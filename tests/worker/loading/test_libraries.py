"""A device's libraries are read from the disk while a start does other things."""

from pathlib import Path
from typing import Any

import pytest
import structlog

from octavo.model.parallel import ALONE
from octavo.worker.config import WorkerConfig
from octavo.worker.loading import libraries, loader
from octavo.worker.loading.libraries import mapped_libraries, read_ahead


class Stopped(Exception):
    """What the start does next."""


def test_the_libraries_that_this_process_has_are_found_once_each(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 00:01 11    /opt/a folder/libtorch_cuda.so\n"
        "7f01-7f02 r-xp 00001000 00:01 11    /opt/a folder/libtorch_cuda.so\n"
        "7f02-7f03 r-xp 00001000 00:01 12    /opt/libcublasLt.so.13\n"
        "7f03-7f04 r-xp 00001000 00:01 13    /opt/libcudnn.so.9\n"
        "7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    assert mapped_libraries(maps) == [Path("/opt/libcublasLt.so.13"), Path("/opt/a folder/libtorch_cuda.so")]
    assert mapped_libraries(tmp_path / "none") == []


def test_every_byte_is_read_and_what_is_missing_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "PART_BYTES", 1000)
    sizes = {"one": 4321, "two": 1000, "empty": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    with structlog.testing.capture_logs() as told:
        thread = read_ahead([tmp_path / name for name in (*sizes, "missing")])
        thread.join(60)
    assert not thread.is_alive()
    assert thread.daemon
    assert [(each["event"], each["num_bytes"]) for each in told] == [("libraries_read", 5321)]


@pytest.mark.parametrize(("device", "expected"), [("cuda", 2), ("cpu", 0)])
def test_a_start_on_a_gpu_begins_with_it_and_wakes_the_compiler(
    device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    def stop(*arguments: object) -> None:
        raise Stopped

    monkeypatch.setattr(loader, "read_ahead", begun.append)
    monkeypatch.setattr(loader, "_wake_compiler", begun.append)
    monkeypatch.setattr(loader, "_resolve", stop)
    monkeypatch.setattr(loader, "wants_cuda_runner", lambda config: config.device == "cuda")
    monkeypatch.setattr(loader, "require_executable", lambda *arguments: None)
    config = WorkerConfig(model="folio-chat", gateway_endpoints=(), device=device)
    with pytest.raises(Stopped):
        loader.prepare(config, lambda *arguments: None, ranks=ALONE)
    assert len(begun) == expected
