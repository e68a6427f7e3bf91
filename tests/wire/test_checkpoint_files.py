"""Files of a checkpoint folder: links that stay inside are followed, links that lead elsewhere are refused by name."""

import os
import shutil
from pathlib import Path

import pytest

from octavo.model import CheckpointError, load_model, resolve_checkpoint
from octavo.model.verify.prompts import make_prompts
from octavo.wire.checkpoint_files import FileRefused, check_files, find_file, read_small_file
from octavo.worker.loading.model_card import CardError, describe
from tests.support.model.checkpoints import CHAT_TEMPLATE, write_tiny_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_tiny_checkpoint(tmp_path / "checkpoint")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def hub_snapshot(folder: Path, cache: Path) -> Path:
    """The checkpoint as huggingface_hub keeps it: links into the blobs of its repository."""
    repository = cache / "models--tiny--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for index, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, repository / "blobs" / f"blob{index}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{index}")
    return snapshot


def move_out(folder: Path, name: str, secrets: Path) -> None:
    """The file lies elsewhere, and a link to it is in its place."""
    secrets.mkdir(exist_ok=True)
    shutil.move(folder / name, secrets / name)
    (folder / name).symlink_to(secrets / name)


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(folder: Path, tmp_path: Path) -> None:
    snapshot = hub_snapshot(folder, tmp_path / "hub")
    (tmp_path / "linked-cache").symlink_to(tmp_path / "hub")
    through_link = tmp_path / "linked-cache" / snapshot.relative_to(tmp_path / "hub")
    for given in (snapshot, through_link):
        assert resolve_checkpoint(str(given)) == given
        assert describe(given).files["chat_template.jinja"].decode() == CHAT_TEMPLATE
        load_model(given)


def test_a_folder_that_is_a_link_itself_and_links_inside_it_are_fine(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").rename(folder / "real.jinja")
    (folder / "chat_template.jinja").symlink_to("real.jinja")
    (tmp_path / "name").symlink_to(folder)
    assert resolve_checkpoint(str(tmp_path / "name")) == tmp_path / "name"
    assert describe(tmp_path / "name").files["chat_template.jinja"].decode() == CHAT_TEMPLATE


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja"])
def test_a_file_that_leads_out_is_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    move_out(folder, name, tmp_path / "secrets")
    with pytest.raises(CheckpointError, match=rf"^{name} in .* leads out of the checkpoint"):
        resolve_checkpoint(str(folder))
    if name == "model.safetensors":
        with pytest.raises(CheckpointError, match=f"^{name} in .* leads out"):
            load_model(folder)
    else:
        with pytest.raises(CardError, match=f"^{name} in .* leads out"):
            describe(folder)


def test_a_snapshot_may_not_lead_out_of_its_repository(folder: Path, tmp_path: Path) -> None:
    snapshot = hub_snapshot(folder, tmp_path / "hub")
    other = tmp_path / "hub" / "models--other--model" / "blobs"
    other.mkdir(parents=True)
    (other / "blob").write_text("secret")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to("../../../models--other--model/blobs/blob")
    with pytest.raises(CardError, match=r"^chat_template\.jinja in .* leads out"):
        describe(snapshot)


def test_blobs_that_are_a_link_elsewhere_are_no_blobs(folder: Path, tmp_path: Path) -> None:
    snapshot = hub_snapshot(folder, tmp_path / "hub")
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out"):
        resolve_checkpoint(str(snapshot))


def test_a_shard_that_leads_out_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "checkpoint")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model-1.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors in .* leads out"):
        load_model(folder)


def test_the_index_may_not_lead_out_either(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "checkpoint")
    (folder / "model.safetensors").unlink()
    (tmp_path / "index").write_text('{"weight_map": {}}')
    (folder / "model.safetensors.index.json").symlink_to(tmp_path / "index")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json in .* leads out"):
        load_model(folder)


def test_a_tokenizer_that_leads_out_is_not_read_for_prompts(folder: Path, tmp_path: Path) -> None:
    config = load_model(folder).config
    move_out(folder, "tokenizer.json", tmp_path / "secrets")
    with pytest.raises(FileRefused, match="leads out"):
        make_prompts(folder, config, 1)


@pytest.mark.parametrize("target", ["config.json", "nowhere"])
def test_links_in_a_circle_and_to_nothing_are_refused(target: str, folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"config\.json in .* leads to no file"):
        resolve_checkpoint(str(folder))


def test_a_pipe_is_refused_and_not_waited_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json in .* is not a regular file"):
        resolve_checkpoint(str(folder))
    with pytest.raises(CardError, match="is not a regular file"):
        describe(folder)


def test_names_that_are_paths_find_nothing(folder: Path) -> None:
    for name in ("../x", "a/b", "", "..", "/etc/hostname"):
        with pytest.raises(FileRefused, match="not the plain name"):
            find_file(folder, name)
    assert find_file(folder, "absent.json") is None
    check_files(folder, suffixes=(".json",))


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_small_file(tmp_path / "file", most_bytes=5) == b"12345"
    with pytest.raises(FileRefused, match=r"file in .* is larger than 4 bytes"):
        read_small_file(tmp_path / "file", most_bytes=4)
