"""Which path a batch size takes: the rule, what is kept on disk, and the timing itself on a GPU."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.shapes import PUBLISHED
from octavo.model import ModelConfig
from octavo.model.gpu import autotune as autotuning
from octavo.model.gpu import peer_sums
from octavo.model.gpu.autotune import (
    Autotuner,
    Cublas,
    Overlapping,
    SmallBatch,
    SplitK,
    cache_file,
    candidates,
    fits_split_k_tiles,
    read_names,
    write_names,
)
from octavo.model.gpu.peer_joins import with_peer_joins
from octavo.model.gpu.peer_sums import SumsBySize, Way, with_peer_sums
from octavo.model.gpu.small_batch_layers import MAX_ROWS, MEASURED, cuts_of
from octavo.model.kernels.small_batch.attention import AttentionCut
from octavo.model.kernels.small_batch.launch import Cut
from octavo.model.parallel import Ranks, config_of_rank
from octavo.worker.runners.cuda.graph_runner import batch_sizes

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }
)  # fmt: skip


def test_without_timings_the_smallest_batches_take_the_kernels_for_them() -> None:
    autotune = Autotuner(candidates(CONFIG), None, {})
    assert [type(autotune.path(size)) for size in (1, 2, 3, 8, 64)] == [SmallBatch, SmallBatch, Cublas, Cublas, Cublas]


def test_a_family_whose_heads_are_normalised_has_the_same_ways_and_choices_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = {"head_dim": CONFIG.head_dim, "model_type": "qwen3", "num_key_value_heads": CONFIG.num_key_value_heads}
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = ModelConfig.from_dict(raw | {name: getattr(CONFIG, name) for name in shape})
    assert candidates(config) == candidates(CONFIG)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    ways = candidates(CONFIG)
    assert cache_file(config, torch.empty(0), ways) != cache_file(CONFIG, torch.empty(0), ways)


def test_what_was_kept_decides_and_unknown_names_do_not() -> None:
    autotune = Autotuner(candidates(CONFIG), None, {1: "cublas", 2: "of another version", 4: "overlapping-8"})
    assert autotune.names == {1: "cublas", 4: "overlapping-8"}
    assert [autotune.path(size) for size in (1, 4)] == [Cublas(), candidates(CONFIG)["overlapping-8"]]


def test_names_come_back_from_disk_as_they_went(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "names.json"
    write_names(file, {8: "cublas", 1: "small_batch"})
    assert read_names(file) == {8: "cublas", 1: "small_batch"}
    assert [entry.name for entry in file.parent.iterdir()] == ["names.json"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"paths": 3}', '{"paths": {"x": "cublas"}}'])
def test_a_file_that_is_not_ours_means_no_timings(tmp_path: Path, content: str) -> None:
    file = tmp_path / "names.json"
    file.write_text(content)
    assert read_names(file) == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    write_names(tmp_path / "taken" / "names.json", {1: "cublas"})


def test_without_a_device_nothing_is_timed() -> None:
    autotune = Autotuner.find(CONFIG, torch.empty(0))
    autotune.choose([1, 2], lambda size: pytest.fail(f"ran {size}"))
    assert autotune.names == {}


def test_every_way_is_tried_and_then_forgotten() -> None:
    autotune, ways = Autotuner(candidates(CONFIG), None, {2: "cublas", 16: "split_k-16"}), candidates(CONFIG)
    for size, names in (
        (1, ("cublas", "small_batch", "overlapping-8")),
        (2, ("cublas", "small_batch", "overlapping-8")),
        (24, ("cublas", "split_k-32", "overlapping-32")),
    ):
        assert [(name, autotune.path(size)) for name in autotune.try_all(size)] == [
            (name, ways[name]) for name in names
        ]
    assert [autotune.path(65) for _ in autotune.try_all(65)] == [Cublas(), ways["overlapping-128"]]
    assert [autotune.path(257) for _ in autotune.try_all(257)] == [Cublas()]
    assert autotune.names == {2: "cublas", 16: "split_k-16"}


def test_a_timed_size_stands_for_those_below_it() -> None:
    autotune = Autotuner(candidates(CONFIG), None, {8: "overlapping-8", 16: "split_k-16", 32: "cublas", 5: "cublas"})
    ways = candidates(CONFIG)
    assert [autotune.path(size) for size in (3, 5, 8, 16, 17, 32)] == [
        ways["overlapping-8"],
        Cublas(),
        ways["overlapping-8"],
        ways["split_k-16"],
        Cublas(),
        Cublas(),
    ]


def test_cublas_alone_is_tried_where_there_is_no_other() -> None:
    autotune = Autotuner.cublas_only()
    assert [autotune.path(size) for size in (1, 2, 8, 90) for _ in autotune.try_all(size)] == [Cublas()] * 4


def test_a_size_with_one_way_left_goes_with_the_next_and_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {name: way for name, way in candidates(CONFIG).items() if not isinstance(way, Overlapping)}
    autotune = Autotuner(ways, tmp_path / "names.json", {})
    for size, names in (
        (8, ["cublas", "split_k-16"]),
        (64, ["cublas", "split_k-64"]),
        (65, ["cublas"]),
        (256, ["cublas"]),
    ):
        assert list(autotune.try_all(size)) == names
    ran = []
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr("octavo.model.gpu.autotune.time_graph", lambda work, stream, *, steps: work() or 1.0)
    autotune.choose([1, 8, 64, 128, 256], ran.append)
    assert (sorted(autotune.names), set(ran)) == ([1, 16, 64], {1, 8, 64})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    assert cache_file(CONFIG, torch.empty(0), ways) != cache_file(CONFIG, torch.empty(0), candidates(CONFIG))


def test_sizes_are_timed_in_the_middle_of_those_that_go_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 256 rows exactly, wide models' products of ours were as fast as the library's, and at 208 slower by 8 %."""
    autotune, ran = Autotuner(candidates(CONFIG), tmp_path / "names.json", {32: "cublas"}), list[int]()
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr("octavo.model.gpu.autotune.time_graph", lambda work, stream, *, steps: work() or 1.0)
    autotune.choose(reversed(batch_sizes(512)), ran.append)
    assert sorted(set(ran)) == [1, 2, 8, 16, 56, 104, 176, 240]
    assert sorted(autotune.names) == [1, 2, 8, 16, 32, 64, 128, 192, 256]


def test_what_was_timed_with_other_kernels_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    now = cache_file(CONFIG, torch.empty(0), candidates(CONFIG))
    monkeypatch.setattr(autotuning, "KERNELS", autotuning.KERNELS - 1)
    assert cache_file(CONFIG, torch.empty(0), candidates(CONFIG)) != now


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
    assert fits_split_k_tiles(FakeWeight(is_cuda, bytes_each)) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "num_ranks", "expected"),
    [
        ("0.5B", 1, ((8, 8, None), (16, 16, 256), (4, 2, None), (1, 1, 512), (4, 1, None))),
        ("7B", 1, ((1, 4, None), (8, 4, None), (1, 4, None), (2, 4, None), (4, 4, None))),
        ("7B", 2, ((2, 2, None), (2, 1, 256), (2, 2, 512), (1, 8, None), (4, 4, None))),
        ("32B", 1, ((1, 4, None), (8, 4, None), (1, 4, None), (2, 4, None), (4, 4, None))),
        ("0.5B", 2, ((2, 2, None), (8, 4, None), (4, 2, None), (8, 8, None), (4, 1, None))),  # the rule's alone
    ],
)
def test_cuts_are_those_that_were_measured(
    shape: str, num_ranks: int, expected: tuple[tuple[int, int, int | None], ...]
) -> None:
    cuts = cuts_of(config_of_rank(PUBLISHED[shape].config, num_ranks))
    assert [cuts.qkv, cuts.output, cuts.gate_up, cuts.down, cuts.head] == [
        Cut(rows=rows, warps=warps, block=block) for rows, warps, block in expected
    ]


def test_every_measured_shape_is_a_published_one_and_none_is_cut_so_with_wider_numbers() -> None:
    configs = [config_of_rank(PUBLISHED[shape].config, ranks) for shape in PUBLISHED for ranks in (1, 2)]
    shapes = {(c.hidden_size, c.num_attention_heads * c.head_dim, c.intermediate_size): c for c in configs}
    assert set(MEASURED) < set(shapes)
    for shape, changed in MEASURED.items():
        measured, by_rule = cuts_of(shapes[shape]), cuts_of(shapes[shape], number_bytes=4)
        for product, cut in changed.items():
            assert getattr(measured, product) == cut != getattr(by_rule, product)


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "number_bytes", "expected"),
    [
        (2, 64, 2, AttentionCut(grain=128, tile=256, warps=8, stages=1)),  # 0.5B
        (2, 128, 2, AttentionCut(grain=128, tile=128, warps=8, stages=1)),  # 1.5B, 3B
        (4, 128, 2, AttentionCut(grain=64, tile=64, warps=8, stages=3)),  # 7B
        (8, 128, 2, AttentionCut(grain=32, tile=32, warps=4, stages=3)),  # 14B, 32B, 72B
        (1, 256, 4, AttentionCut(grain=32, tile=32, warps=8, stages=1)),
        (64, 128, 4, AttentionCut(grain=32, tile=32, warps=4, stages=3)),
        (1, 16, 2, AttentionCut(grain=128, tile=256, warps=8, stages=1)),
    ],
)
def test_long_contexts_are_cut_as_measured(
    num_kv_heads: int, head_dim: int, number_bytes: int, expected: AttentionCut
) -> None:
    heads = {"num_attention_heads": num_kv_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    config = replace(CONFIG, **heads)
    assert cuts_of(config, number_bytes=number_bytes).attention == expected


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("hidden", [16, 64, 512, 2_048, 8_192, 65_536])
@pytest.mark.parametrize("intermediate", [32, 128, 4_864, 29_568, 262_144])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_every_shape_has_cuts_that_a_device_can_run(hidden: int, intermediate: int, head_dim: int, ranks: int) -> None:
    """A cut that it cannot raises ValueError; short rows once had a warp each, 128 in a program."""
    heads = {"num_attention_heads": max(1, hidden // head_dim // ranks), "num_key_value_heads": 1, "head_dim": head_dim}
    cuts = cuts_of(replace(CONFIG, hidden_size=hidden, intermediate_size=intermediate // ranks, **heads))
    assert max(cut.rows for cut in (cuts.output, cuts.down)) <= MAX_ROWS


@pytest.mark.alone  # it compares timings
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_size_is_timed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    weight = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")
    autotune = Autotuner.find(CONFIG, weight)

    def run(size: int) -> None:
        for _ in range(
            1 if isinstance(autotune.path(size), SplitK) or autotune.names.get(size) == "small_batch" else 50
        ):
            weight.add_(1)

    autotune.choose([1, 2, 3, 16, 300], run)
    assert autotune.names[1] == autotune.names[2] == "small_batch"
    assert (autotune.names[16], 300 in autotune.names) == ("split_k-16", False)
    again = Autotuner.find(CONFIG, weight)
    again.choose([1, 2, 16], lambda size: pytest.fail(f"ran {size}"))
    assert again.names == autotune.names


@dataclass(frozen=True)
class Follower(Ranks):
    """A rank that is told what rank 0 says."""

    said: tuple[object, ...] = ()

    def agree(self, value: object) -> object:  # type: ignore[override]
        return dict(self.said) if isinstance(value, dict) else value


def test_ranks_take_the_ways_of_rank_0_and_keep_choices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Follower(rank=1, size=2, said=((1, "cublas"), (2, "small_batch")))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr("octavo.model.gpu.autotune.read_names", lambda file: {1: "small_batch"})
    monkeypatch.setattr("octavo.model.gpu.autotune.fits_overlapping", lambda config, weight: False)
    weight = SimpleNamespace(is_cuda=True, device="cuda:1", dtype=torch.bfloat16, element_size=lambda: 2)
    autotune = Autotuner.find(CONFIG, weight, ranks)  # type: ignore[arg-type]
    assert autotune.names == {1: "cublas", 2: "small_batch"}
    alone = Autotuner.find(CONFIG, weight)  # type: ignore[arg-type]
    assert alone.names == {1: "small_batch"}
    ways = candidates(CONFIG)
    files = {cache_file(CONFIG, torch.empty(0), ways, num_ranks=count) for count in (1, 2, 4)}
    assert len(files) == 3


def test_torch_has_the_sum_by_peers_memory_that_is_called() -> None:
    schema = torch.ops.symm_mem.one_shot_all_reduce_out.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name", "out"]


def test_sums_by_peers_memory_are_left_alone_where_there_is_no_device() -> None:
    for ranks, device in ((Ranks(size=2), "cpu"), (Ranks(size=3), "cuda:0"), (Ranks(), "cuda:0")):
        found = with_peer_sums(
            ranks, hidden_size=64, max_rows=8, dtype=torch.bfloat16, device=torch.device(device), note=pytest.fail
        )
        assert found is ranks


def test_columns_are_joined_by_the_library_where_there_is_no_device() -> None:
    for ranks, device in ((Ranks(size=2), "cpu"), (Ranks(size=3), "cuda:0"), (Ranks(), "cuda:0")):
        found = with_peer_joins(ranks, {torch.int64: 1}, max_rows=8, device=torch.device(device), note=pytest.fail)
        assert found is ranks


class Beside:
    """Joins of rooms of one shape (`PeerJoins`), up to two rows."""

    def __init__(self) -> None:
        self.memory, self.asked = torch.zeros(4, 3), list[int]()

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return self.memory if (shape, dtype) == ((4, 3), torch.float32) else None

    def takes(self, part: torch.Tensor) -> bool:
        return part.data_ptr() == self.memory.data_ptr() and len(part) <= 2

    def concatenate(self, room: torch.Tensor, out: torch.Tensor) -> None:
        self.asked.append(len(room))
        out.copy_(room)


def test_columns_that_lie_where_peers_read_them_are_joined_by_them_as_far_as_that_is_faster() -> None:
    joins, device = Beside(), torch.device("cpu")
    ranks = Ranks(joins=joins)
    room, elsewhere = (ranks.room_of_columns(shape, torch.float32, device) for shape in ((4, 3), (4, 5)))
    assert room is joins.memory
    assert elsewhere.shape == (4, 5)
    for rows in (1, 2, 3, 4):
        for part in (room, elsewhere):
            ranks.concatenate(part[:rows], out=torch.zeros_like(part[:rows]))
    assert joins.asked == [1, 2]


class OneWay:
    """A way to sum that says what it is asked."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, list[str]()

    def takes(self, partial: torch.Tensor) -> bool:
        return partial.numel() <= self.most

    def room(self, like: torch.Tensor) -> torch.Tensor:
        self.asked.append(f"room {like.numel()}")
        return torch.zeros_like(like)

    def first_room(self, like: torch.Tensor) -> torch.Tensor:
        self.asked.append(f"first {like.numel()}")
        return torch.zeros_like(like)

    def sum(self, room: torch.Tensor, out: torch.Tensor) -> None:
        self.asked.append(f"sum {room.numel()}")
        out.fill_(2)

    def add(self, room: torch.Tensor, x: torch.Tensor) -> None:
        self.asked.append(f"add {room.numel()}")
        x += 2


def test_sums_go_by_the_way_that_was_fastest_for_their_size() -> None:
    few, many = OneWay(4), OneWay(64)
    ranks = Ranks(peers=SumsBySize({16: None, 4: few, 64: many}))
    for size in (3, 4, 5, 16, 17, 64, 65):
        x = torch.ones(size)
        ranks.sum(ranks.room(x, plain=x), out=x)
        assert ranks.add_sum(ranks.room(x), x) is x
    asked = [(name, size) for size in (3, 4) for name in ("first", "sum", "room", "add")]
    assert few.asked == [f"{name} {size}" for name, size in asked]
    assert [each.split()[1] for each in many.asked] == ["17"] * 4 + ["64"] * 4


def test_sums_go_by_every_way_that_there_is_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    monkeypatch.setattr(peer_sums, "ways_to_sum", lambda ranks, ways, **_: wanted.append(ways) or {})
    for value in ("", "fastest", "library", "fused", "pushed"):
        monkeypatch.setenv(peer_sums.VARIABLE, value)
        peer_sums.with_peer_sums(
            Ranks(), hidden_size=8, max_rows=8, dtype=torch.bfloat16, device=torch.device("cpu"), note=pytest.fail
        )
    one_shot, fused, pushed = Way.ONE_SHOT, Way.FUSED, Way.PUSHED
    assert wanted == [(one_shot, fused, pushed), (one_shot, fused, pushed), (), (fused,), (pushed,)]
    monkeypatch.setenv(peer_sums.VARIABLE, "quickly")
    with pytest.raises(ValueError, match="OCTAVO_SUMS is 'quickly'; give one of fastest, library"):
        peer_sums.with_peer_sums(
            Ranks(), hidden_size=8, max_rows=8, dtype=torch.bfloat16, device=torch.device("cpu"), note=pytest.fail
        )
