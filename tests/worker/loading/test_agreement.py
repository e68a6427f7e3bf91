"""Ranks of different builds, or of different checkpoints, do not become a group."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from octavo.model.parallel import MAX_TEXT_BYTES, Ranks
from octavo.worker.config import WorkerConfig
from octavo.worker.loading import agreement, group
from octavo.worker.loading.agreement import RanksDiffer, build_name, check_agreement, checkpoint_name
from octavo.worker.loading.group import load_group, notes_on_cores
from octavo.worker.loading.loader import load_torch
from tests.support.children import live_children
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.model.ranks import on_ranks


def start(folder: Path) -> None:
    config = WorkerConfig(
        model=str(folder), gateway_endpoints=(), num_blocks=64, num_threads=1, max_num_seqs=4, max_batch_tokens=16,
        max_model_len=48, tensor_parallel_size=2,
    )  # fmt: skip
    load_group(config, lambda _stage, _done, _total: None).runner.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("build_name", r"rank 1 of 2 has another build of Octavo than rank 0 \(.*, not other\): install one build"),
        (
            "checkpoint_name",
            r"rank 1 of 2 has another checkpoint than rank 0 \(model [0-9a-f]+, not other\): its files",
        ),
    ],
)
def test_ranks_that_differ_are_refused_at_the_start_in_one_sentence(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is rank 0, the other is what a start makes of it."""
    monkeypatch.setattr(group, name, lambda *_: "other")
    with pytest.raises(RanksDiffer, match=reason) as caught:
        start(write_tiny_checkpoint(tmp_path / "model"))
    assert "\n" not in str(caught.value)
    assert live_children(group.__name__) == []


def differing(ranks: Ranks) -> str:
    """What each rank says where the last of them has another checkpoint."""
    try:
        check_agreement(ranks, build="b", checkpoint="x" if ranks.rank == ranks.size - 1 else "y")
    except RanksDiffer as error:
        return str(error)
    return ""


def test_every_rank_says_the_same(tmp_path: Path) -> None:
    said = on_ranks(3, differing, tmp_path)
    assert len(set(said)) == 1
    assert said[0].startswith("rank 2 of 3 has another checkpoint than rank 0 (x, not y): ")


def told(ranks: Ranks) -> list[str]:
    """Texts of different lengths."""
    return ranks.gather_texts("é" * ranks.rank)


def test_ranks_tell_each_other_texts(tmp_path: Path) -> None:
    assert on_ranks(2, told, tmp_path) == [["", "é"]] * 2
    assert Ranks().gather_texts("alone") == ["alone"]
    with pytest.raises(ValueError, match="up to 512 bytes, not 513"):
        Ranks(size=2).gather_texts("x" * (MAX_TEXT_BYTES + 1))


def changed(folder: Path, **tensors: Any) -> str:
    """The name of a checkpoint in which some tensors are multiplied."""
    there = load_file(folder / "model.safetensors")
    save_file(
        {key: value * tensors.get(key.split(".")[-2], 1) for key, value in there.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return checkpoint_name(folder)


def test_a_checkpoint_is_named_by_its_content_and_not_by_its_times(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "here" / "model")
    name = checkpoint_name(folder)
    shutil.copytree(folder, tmp_path / "there" / "model", copy_function=shutil.copyfile)
    assert checkpoint_name(tmp_path / "there" / "model") == name
    assert changed(folder, gate_proj=2.0) != name
    config = folder / "config.json"
    before = checkpoint_name(folder)
    config.write_text(config.read_text().replace("10000.0", "10001.0"))
    assert checkpoint_name(folder) != before


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_what_says_which_ids_may_be_drawn_is_part_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Ranks that mask other ids before min_tokens, or draw from more of them, come to other tokens."""
    folder = write_tiny_checkpoint(tmp_path / "model")
    before, file = checkpoint_name(folder), folder / name
    file.write_text((file.read_text() if file.exists() else "{}") + " ")
    assert checkpoint_name(folder) != before


def test_a_checkpoint_that_changes_while_it_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank may have read its part before, and the other after that."""
    folder = write_tiny_checkpoint(tmp_path / "model")

    shutil.copytree(folder, tmp_path / "other")
    changed(tmp_path / "other", gate_proj=2.0)

    def load(*words: Any, **options: Any) -> Any:
        (tmp_path / "other" / "model.safetensors").replace(folder / "model.safetensors")
        return load_torch(*words, **options)

    monkeypatch.setattr(group, "load_torch", load)
    with pytest.raises(RanksDiffer, match="rank 0 of 2 has read a checkpoint that changed meanwhile"):
        start(folder)
    assert live_children(group.__name__) == []


def test_a_build_is_named_by_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    name = build_name()
    assert name == build_name()
    monkeypatch.setattr(agreement, "PACKAGES", agreement.PACKAGES[1:])
    assert build_name() != name


def test_more_ranks_than_cores_are_told() -> None:
    assert notes_on_cores(1) == ()
    (note,) = notes_on_cores(100_000)
    assert note.startswith("100000 tensor-parallel ranks share ")
