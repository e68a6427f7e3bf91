"""`octavo pull` against a hub on loopback: what it fetches, what it says, and how it ends."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.model.hub import Hub, hub_environment, running_hub

COMMAND = [sys.executable, "-m", "octavo.cli.main", "pull"]
CHUNK = 10 * 1024 * 1024  # what the hub's client writes at once, so where it can go on


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    with running_hub(repository / "model" / "embedded" / "folio-chat") as server:
        yield server


def pull(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *(words or ("org/tiny",))],
        env=hub_environment(hub, home),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def wanted(hub: Hub) -> set[str]:
    """Weights and text: nothing pickled, no code."""
    return {name for name in hub.files if name.endswith((".safetensors", ".json", ".txt", ".jinja"))}


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.strip() for line in done.stderr.splitlines()]


def test_a_pipe_gets_plain_lines_the_folder_and_nothing_twice(hub: Hub, tmp_path: Path) -> None:
    done = pull(hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.rstrip("\n"))
    assert {path.name for path in folder.iterdir()} == set(hub.fetched) == wanted(hub)
    total = sum(len(hub.files[name]) for name in hub.fetched)
    first, *_, last, summary = told(done)
    assert first.startswith("downloading "), done.stderr
    assert last.startswith(f"downloading {total / 1e6:.1f} MB of {total / 1e6:.1f} MB"), done.stderr
    assert re.fullmatch(r"org/tiny: downloaded [\d.]+ MB in [\d.]+ s, [\d.]+ MB in all", summary)
    assert "\x1b" not in done.stderr + done.stdout

    hub.fetched.clear()
    again = pull(hub, tmp_path / "home")
    assert (again.returncode, again.stdout, set(hub.fetched)) == (0, done.stdout, set())
    assert told(again) == [f"org/tiny: already here, {total / 1e6:.1f} MB in all"]


def test_a_connection_that_breaks_is_taken_up_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.breaks_after = {"model.safetensors": CHUNK + 1_000_000}
    done = pull(hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert (hub.fetched["model.safetensors"], len(hub.ranges)) == (2, 1)
    name, asked = hub.ranges[0]
    assert (name, asked.partition("-")[0]) == ("model.safetensors", f"bytes={CHUNK}")
    folder = Path(done.stdout.rstrip("\n"))
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_ctrl_c_ends_it_at_once_and_what_was_whole_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.slow = "model.safetensors"
    process = subprocess.Popen(
        [*COMMAND, "org/tiny"], env=hub_environment(hub, tmp_path / "home"), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    blobs = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots"
    deadline_s = time.monotonic() + 120
    whole: set[str] = set()
    while whole != wanted(hub) - {hub.slow}:
        assert time.monotonic() < deadline_s, whole
        time.sleep(0.05)
        whole = {path.name for path in blobs.rglob("*")} & wanted(hub)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert (
        process.stderr.read().splitlines()[-1] == "stopped; files that are whole are kept, run it again for the others"
    )
    process.stderr.close()
    hub.slow = None
    hub.release.set()
    hub.fetched.clear()
    done = pull(hub, tmp_path / "home")
    assert (done.returncode, set(hub.fetched)) == (0, {"model.safetensors"}), done.stderr


def test_a_terminal_gets_a_bar(hub: Hub, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = hub_environment(hub, tmp_path / "home") | {"COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, "org/tiny"], env=environment, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    text = shown.decode()
    assert "asking the hub" in text
    assert re.search(r"downloading .*[\d.]+ [kM]B of [\d.]+ MB", text)
    assert text.rstrip().endswith("MB in all")


@pytest.mark.parametrize(
    ("mishap", "words", "lines"),
    [
        (
            {"is_gated": True}, ["org/tiny"],
            ["error: the checkpoint cannot be used",
             "org/tiny: the hub gives it only to those who accepted its terms and set a token"],
        ),
        (
            {}, ["Qwen/Qwen2.5-0.5B-Instuct"],
            ["error: the checkpoint cannot be used",
             "Qwen/Qwen2.5-0.5B-Instuct: there is no such model on the hub: did you mean Qwen/Qwen2.5-0.5B-Instruct or "
             "Qwen/Qwen2.5-1.5B-Instruct or Qwen/Qwen2.5-7B-Instruct?"],
        ),
        (
            {}, ["org/tiny", "--revision", "v2"],
            ["error: the checkpoint cannot be used", "org/tiny: there is no revision 'v2'"],
        ),
        (
            {"sizes": {"model.safetensors": 1 << 60}}, ["org/tiny"],
            ["error: the disk has no room for the checkpoint",
             r"org/tiny: 1,152,921,\d{3},\d{3},\d{3},\d{3} bytes to download, and [\d,]+ bytes free in .*/home/hub"],
        ),
        (
            {"files": {"README.md": b"x", "pytorch_model.bin": b"p", "config.json": b"{}"}}, ["org/tiny"],
            ["error: the checkpoint cannot be used",
             r"org/tiny: the hub's repository has no \*.safetensors, so it is no checkpoint to serve"],
        ),
        (
            {}, ["folio-cat"],
            ["error: the checkpoint cannot be used", "'folio-cat' is neither a folder, .*: did you mean folio-chat.*"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_told_and_nothing_is_fetched(
    mishap: dict[str, object], words: list[str], lines: list[str], hub: Hub, tmp_path: Path
) -> None:
    for name, value in mishap.items():
        setattr(hub, name, value)
    done = pull(hub, tmp_path / "home", *words)
    said = told(done)
    assert (done.returncode, done.stdout, len(said), said[0]) == (1, "", 3, lines[0]), done.stderr
    assert said[1] == lines[1] or re.fullmatch(lines[1], said[1]), said[1]
    assert not hub.fetched


def test_without_a_hub_what_is_in_the_cache_does(hub: Hub, tmp_path: Path) -> None:
    first = pull(hub, tmp_path / "home")
    hub.shutdown()
    hub.server_close()
    again = pull(hub, tmp_path / "home")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    elsewhere = pull(hub, tmp_path / "elsewhere")
    assert (elsewhere.returncode, told(elsewhere)[0]) == (1, "error: the checkpoint cannot be fetched")
    assert len(told(elsewhere)) == 3
