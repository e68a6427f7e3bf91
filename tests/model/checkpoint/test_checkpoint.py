"""What a user types becomes a folder: folders, embedded models, and downloads from a hub that runs on the loopback."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.model import CheckpointError, load_model, resolve_checkpoint
from octavo.model.checkpoint import source as checkpoint_module
from octavo.model.checkpoint.source import progress_bar
from tests.support.model.hub import Hub, hub_environment, running_hub


def test_a_folder_is_itself(checkpoint: Path) -> None:
    assert resolve_checkpoint(str(checkpoint)) == checkpoint


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no config\.json in it"):
        resolve_checkpoint(str(tmp_path))


def test_an_embedded_model_is_found_by_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "EMBEDDED", checkpoint.parent)
    monkeypatch.chdir(tmp_path / "checkpoint")
    assert resolve_checkpoint("checkpoint") == checkpoint


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen2.5-7B-Instrct", "Qwen/Qwen2.5-7B-Instruct"),
        ("./Qwen2.5-72B", "Qwen/Qwen2.5-72B"),
    ],
)
def test_a_name_that_is_nothing_gets_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(CheckpointError, match=f"did you mean .*{meant}"):
        resolve_checkpoint(name)


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "a/..", "http://example.org/x", "a b/c", "a/" + "x" * 200])
def test_what_is_no_hub_id_never_reaches_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "download", lambda *_args, **_options: pytest.fail("asked the hub"))
    if name == "../x":
        monkeypatch.chdir("/")
    with pytest.raises(CheckpointError, match="is neither a folder, nor an embedded model, nor a hub id"):
        resolve_checkpoint(name)


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    with running_hub(checkpoint) as server:
        yield server


def ask(hub: Hub, name: str, home: Path) -> subprocess.CompletedProcess[str]:
    """resolve_checkpoint in a fresh process (the hub's address is read at import); prints the folder and progress."""
    code = (
        "import sys; from model import resolve_checkpoint; seen = []\n"
        "folder = resolve_checkpoint(sys.argv[1], on_progress=lambda *step: seen.append(step))\n"
        "print(folder); print(seen[-1] if seen else None)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, name],
        env=hub_environment(hub, home),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_hub_id_is_downloaded_without_pickle_and_code(hub: Hub, tmp_path: Path) -> None:
    done = ask(hub, "org/tiny", tmp_path / "home")
    assert done.returncode == 0, done.stderr
    folder, progress = done.stdout.splitlines()
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    wanted |= {"vocab.txt", "chat_template.jinja"}
    assert set(hub.fetched) == {path.name for path in Path(folder).iterdir()} == wanted
    total = sum(len(hub.files[name]) for name in wanted)
    assert progress == f"({total}, {total})"
    load_model(Path(folder))


def test_an_id_that_the_hub_does_not_have_is_refused_in_one_line(hub: Hub, tmp_path: Path) -> None:
    done = ask(hub, "Qwen/Qwen2.5-0.5B-Instuct", tmp_path / "home")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "octavo.model.errors.CheckpointError: Qwen/Qwen2.5-0.5B-Instuct: there is no such model on the hub: "
        "did you mean Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen2.5-1.5B-Instruct or Qwen/Qwen2.5-7B-Instruct?"
    )


def test_without_a_network_the_error_says_so(hub: Hub, tmp_path: Path) -> None:
    hub.server_close()
    done = ask(hub, "org/tiny", tmp_path / "home")
    assert done.returncode == 1
    assert "HubUnreachable: org/tiny: cannot be downloaded, and is not complete in the hub's cache: " in done.stderr


def test_the_bar_hands_on_the_bytes_of_all_files_and_nothing_else() -> None:
    seen: list[tuple[int, int | None]] = []
    bar_class = progress_bar(lambda done, total: seen.append((done, total)))
    written = bar_class(desc="Reconstructing", unit="B", total=0)
    other = bar_class(desc="Downloading bytes", unit="B", total=0)
    written.total = 30
    written.update(10)
    other.update(10)
    written.update(20)
    assert seen == [(10, 30), (30, 30)]
