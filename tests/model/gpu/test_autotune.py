"""Which path a batch size takes: the rule, what is kept on disk, and the timing itself on a GPU."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import ModelConfig
from octavo.model.gpu.autotune import (
    FACTORS,
    Narrow,
    Paths,
    Split,
    Wide,
    candidates,
    fits_split_tiles,
    read_names,
    write_names,
)
from octavo.model.gpu.small_batch_layers import cuts_of
from octavo.model.kernels.small_batch.launch import Cut

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }
)  # fmt: skip


def test_without_timings_the_smallest_batches_go_the_narrow_way() -> None:
    paths = Paths(candidates(CONFIG), None, {})
    assert [type(paths.path(size)) for size in (1, 2, 3, 8, 64)] == [Narrow, Narrow, Wide, Wide, Wide]


def test_a_family_whose_heads_are_normalised_never_goes_the_narrow_way() -> None:
    raw = {"head_dim": 64, "model_type": "qwen3"}
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = ModelConfig.from_dict(raw | {name: getattr(CONFIG, name) for name in shape})
    paths = Paths(candidates(config), None, {1: "narrow-half", 16: "split-16"})
    assert paths.names == {16: "split-16"}
    assert [type(paths.path(size)) for size in (1, 2, 3, 16, 64)] == [Wide, Wide, Split, Split, Wide]
    assert list(paths.try_all(1)) == ["wide"]


def test_what_was_kept_decides_and_unknown_names_do_not() -> None:
    paths = Paths(candidates(CONFIG), None, {1: "wide", 2: "of another version", 4: "narrow-half"})
    assert paths.names == {1: "wide", 4: "narrow-half"}
    assert [paths.path(size) for size in (1, 4)] == [Wide(), candidates(CONFIG)["narrow-half"]]


def test_names_come_back_from_disk_as_they_went(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "names.json"
    write_names(file, {8: "wide", 1: "narrow"})
    assert read_names(file) == {8: "wide", 1: "narrow"}
    assert [entry.name for entry in file.parent.iterdir()] == ["names.json"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"paths": 3}', '{"paths": {"x": "wide"}}'])
def test_a_file_that_is_not_ours_means_no_timings(tmp_path: Path, content: str) -> None:
    file = tmp_path / "names.json"
    file.write_text(content)
    assert read_names(file) == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    write_names(tmp_path / "taken" / "names.json", {1: "wide"})


def test_without_a_device_nothing_is_timed() -> None:
    paths = Paths.find(CONFIG, torch.empty(0))
    paths.choose([1, 2], lambda size: pytest.fail(f"ran {size}"))
    assert paths.names == {}


def test_every_way_is_tried_and_then_forgotten() -> None:
    paths, ways = Paths(candidates(CONFIG), None, {2: "wide", 16: "split-16"}), candidates(CONFIG)
    for size, names in ((1, ("wide", *FACTORS)), (2, ("wide", *FACTORS)), (24, ("wide", "split-32"))):
        assert [(name, paths.path(size)) for name in paths.try_all(size)] == [(name, ways[name]) for name in names]
    assert [paths.path(65) for _ in paths.try_all(65)] == [Wide()]
    assert paths.names == {2: "wide", 16: "split-16"}


def test_a_timed_size_stands_for_those_below_it() -> None:
    paths = Paths(candidates(CONFIG), None, {16: "split-16", 32: "wide", 5: "wide"})
    ways = candidates(CONFIG)
    assert [paths.path(size) for size in (3, 5, 8, 16, 17, 32)] == [
        ways["split-16"],
        Wide(),
        *[ways["split-16"]] * 2,
        Wide(),
        Wide(),
    ]


def test_the_wide_way_alone_is_tried_where_there_is_no_other() -> None:
    paths = Paths.wide_only()
    assert [paths.path(size) for size in (1, 2, 8, 90) for _ in paths.try_all(size)] == [Wide()] * 4


@dataclass(frozen=True)
class FakeWeight:
    """As much of a tensor as the choice looks at."""

    is_cuda: bool
    bytes_each: int

    def element_size(self) -> int:
        return self.bytes_each


@pytest.mark.parametrize(("is_cuda", "bytes_each", "expected"), [(True, 2, True), (True, 4, False), (False, 4, True)])
def test_weights_of_32_bits_do_not_fit_into_split_tiles_of_a_device(
    is_cuda: bool, bytes_each: int, expected: bool
) -> None:
    assert fits_split_tiles(FakeWeight(is_cuda, bytes_each)) is expected  # type: ignore[arg-type]


def test_cuts_are_those_that_were_measured() -> None:
    cuts = cuts_of(CONFIG)
    assert [cuts.qkv, cuts.output, cuts.gate_up, cuts.down, cuts.head] == [
        Cut(rows=2, warps=4), Cut(rows=8, warps=8), Cut(rows=4, warps=2), Cut(rows=4, warps=4), Cut(rows=8, warps=8),
    ]  # fmt: skip


@pytest.mark.alone  # it compares timings
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_size_is_timed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weight = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")
    paths = Paths.find(CONFIG, weight)

    def run(size: int) -> None:
        for _ in range(1 if isinstance(paths.path(size), Split) or paths.names.get(size) == "narrow-half" else 50):
            weight.add_(1)

    paths.choose([1, 2, 3, 8, 100], run)
    assert paths.names == {1: "narrow-half", 2: "narrow-half", 16: "split-16"}
    again = Paths.find(CONFIG, weight)
    again.choose([1, 2, 8], lambda size: pytest.fail(f"ran {size}"))
    assert again.names == paths.names
