"""Sums over ranks through memory that all of them read: as processes that share it, in Triton's interpreter."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.small_batch import divided_sum as divided_sum_module
from octavo.model.kernels.small_batch import peer_sum as peer_sum_module
from octavo.model.kernels.small_batch.divided_sum import divided_sum, meet_peers, room_shape, share_of
from octavo.model.kernels.small_batch.divided_sum import num_programs as divided_programs
from octavo.model.kernels.small_batch.peer_sum import BLOCK, num_programs, peer_join, peer_sum
from octavo.model.kernels.small_batch.pushed_sum import WORDS, num_turns, num_words, pushed_sum
from octavo.model.parallel import Ranks
from tests.support.model.interpreter import WARNINGS
from tests.support.model.ranks import on_ranks

pytestmark = [
    *WARNINGS,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_gpu_ranks.py has the ranks of devices"),
]
NUM_SUMS = 6
SIZES = (64, BLOCK + 48, 16)


def shared(path: Path, rank: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Of a rank, seen from any."""
    return torch.from_file(str(path / f"{dtype}-{rank}".replace("torch.", "")), shared=True, size=size, dtype=dtype)


def part(rank: int, number: int, size: int) -> torch.Tensor:
    """What a rank brings to one of the sums."""
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * number + rank))


def sums_in_turns(ranks: Ranks, folder: Path, first: int, most_programs: int) -> dict[str, object]:
    """Sums of several sizes through two rooms in turns; every other one is added to what there is. first: where counts
    begin."""
    peer_sum_module.MAX_PROGRAMS, peer_sum_module.LARGE_BLOCK = most_programs, 1024
    most, everyone = max(SIZES), range(ranks.size)
    memory = [shared(folder, rank, torch.float32, 2 * most) for rank in everyone]
    counts = [shared(folder, rank, torch.int32, num_programs(most) * ranks.size) for rank in everyone]
    memory[ranks.rank].fill_(torch.nan)
    counts[ranks.rank].fill_(first)
    ranks.least(0)
    found = {}
    for number in range(NUM_SUMS):
        size, turn = SIZES[number // 2 % len(SIZES)], number % 2
        rooms = tuple(each[turn * most : (turn + 1) * most] for each in memory)
        rooms[ranks.rank][:size] = part(ranks.rank, number, size)
        out = torch.full((size,), float(number))
        peer_sum(rooms, tuple(counts), out, rank=ranks.rank, adds=turn == 1)
        found[f"sum {number}"] = out
    return {**found, "counts": counts[ranks.rank].tolist()}


@pytest.mark.parametrize(
    ("size", "first", "most_programs"),
    [(2, 0, 9), (2, 2**31 - 2, 9), (4, 0, 9), (2, 0, 1)],
    ids=["two", "counts wrap", "four", "a program goes from block to block"],
)
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(
    size: int, first: int, most_programs: int, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    found = on_ranks(size, sums_in_turns, tmp_path, tmp_path / "memory", first, most_programs)
    for number in range(NUM_SUMS):
        length = SIZES[number // 2 % len(SIZES)]
        wanted = torch.zeros(length)
        for rank in range(size):
            wanted += part(rank, number, length)
        if number % 2:
            wanted += float(number)
        for rank in found:
            assert np.array_equal(rank[f"sum {number}"], wanted.numpy())
    told = [first + NUM_SUMS] * size + ([first + 2] * size if most_programs > 1 else [])  # two sums of two programs
    assert found[0]["counts"] == np.array(told, np.int64).astype(np.int32).tolist()


JOINS = (((3, 48), torch.bfloat16), ((5, 1), torch.int64), ((40, 80), torch.bfloat16))


def columns(rank: int, number: int) -> torch.Tensor:
    """What a rank brings to one of the joins."""
    shape, dtype = JOINS[number % len(JOINS)]
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(-(2**30), 2**30, shape, generator=generator).to(dtype)


def joins_in_turns(ranks: Ranks, folder: Path, first: int, most_programs: int) -> dict[str, object]:
    """Joins of several shapes and dtypes, with a meeting between those that overwrite a room."""
    peer_sum_module.MAX_PROGRAMS, peer_sum_module.LARGE_BLOCK = most_programs, 1024
    most, everyone = 40 * 80, range(ranks.size)
    memory = {dtype: [shared(folder, rank, dtype, most) for rank in everyone] for _, dtype in JOINS}
    counts = [shared(folder, rank, torch.int32, num_programs(most) * ranks.size) for rank in everyone]
    counts[ranks.rank].fill_(first)
    found: dict[str, object] = {}
    for number in range(2 * len(JOINS)):
        ranks.least(0)
        (num_rows, width), dtype = JOINS[number % len(JOINS)]
        memory[dtype][ranks.rank][: num_rows * width] = columns(ranks.rank, number).flatten()
        out = torch.zeros(num_rows, ranks.size * width, dtype=dtype)
        peer_join(tuple(memory[dtype]), tuple(counts), out, rank=ranks.rank)
        found[f"join {number}"] = out.double()
    return found


@pytest.mark.parametrize(
    ("size", "first", "most_programs"),
    [(2, 0, 9), (2, 2**31 - 2, 9), (4, 0, 9), (2, 0, 1)],
    ids=["two", "counts wrap", "four", "a program goes from block to block"],
)
def test_every_rank_gets_the_columns_of_all(size: int, first: int, most_programs: int, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    found = on_ranks(size, joins_in_turns, tmp_path, tmp_path / "memory", first, most_programs)
    for number in range(2 * len(JOINS)):
        wanted = torch.cat([columns(rank, number) for rank in range(size)], dim=1).float().numpy()
        for rank in found:
            assert np.array_equal(rank[f"join {number}"], wanted)


PUSHED_SIZES = (64, 2 * WORDS + 48, 16)


def pushed_in_turns(ranks: Ranks, folder: Path, first: int, dtype: torch.dtype) -> dict[str, object]:
    """Sums of several sizes; every other one is added to what there is. first: where turns begin."""
    words, everyone = num_turns(max(PUSHED_SIZES)) * WORDS, range(ranks.size)
    memory = [shared(folder, rank, torch.int64, 2 * ranks.size * words) for rank in everyone]
    memory[ranks.rank].zero_()
    inboxes = tuple(each.view(2, ranks.size, words) for each in memory)
    turns = torch.full((words // WORDS,), first, dtype=torch.int32)
    ranks.least(0)
    found: dict[str, object] = {}
    for number in range(NUM_SUMS):
        size = PUSHED_SIZES[number // 2 % len(PUSHED_SIZES)]
        out, mine = torch.full((size,), float(number), dtype=dtype), part(ranks.rank, number, size).to(dtype)
        pushed_sum(mine, inboxes, turns, out, rank=ranks.rank, adds=number % 2 == 1)
        found[f"sum {number}"] = out
    return {**found, "turns": turns.tolist()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "first"), [(2, 0), (2, 2**31 - 3), (4, 0)], ids=["two", "turns wrap", "four"])
def test_numbers_that_come_with_their_turn_are_summed_in_the_order_of_the_ranks(
    size: int, first: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    found = on_ranks(size, pushed_in_turns, tmp_path, tmp_path / "memory", first, dtype)
    for number in range(NUM_SUMS):
        length = PUSHED_SIZES[number // 2 % len(PUSHED_SIZES)]
        wanted = torch.zeros(length)
        for rank in range(size):
            wanted += part(rank, number, length).to(dtype)
        if number % 2:
            wanted += float(number)
        off = 0.0 if dtype is torch.float32 else 2**-7  # the interpreter cuts where a device rounds
        for rank in found:
            np.testing.assert_allclose(rank[f"sum {number}"], wanted.numpy(), rtol=off)
            assert np.array_equal(rank[f"sum {number}"], found[0][f"sum {number}"])
    counts = [NUM_SUMS] + [2] * (num_words(PUSHED_SIZES[1], dtype) > WORDS) + [2] * (dtype is torch.float32)
    turns = np.array(found[0]["turns"], np.int64) - first
    assert [int(each) % 2**32 for each in turns[: len(counts)]] == counts


WIDTH, MOST_ROWS = 48, 200
DIVIDED_ROWS = (7, MOST_ROWS, 1, 130)


def divided_in_turns(ranks: Ranks, folder: Path, first: int) -> dict[str, object]:
    """Sums of several sizes, one after the other through one room, each added to what there is. first: where counts
    begin."""
    divided_sum_module.GRAIN = 4
    everyone, shape = range(ranks.size), room_shape(MOST_ROWS, WIDTH, ranks.size)
    elements = math.prod(shape)
    memory = [shared(folder, rank, torch.float32, elements + MOST_ROWS * WIDTH) for rank in everyone]
    rooms = [each[:elements].view(shape) for each in memory]
    streams = [each[elements:].view(MOST_ROWS, WIDTH) for each in memory]
    size = divided_programs(MOST_ROWS, WIDTH, ranks.size) * ranks.size
    counts = [shared(folder, rank, torch.int32, size) for rank in everyone]
    rooms[ranks.rank].fill_(torch.nan)
    streams[ranks.rank].fill_(1.0)
    counts[ranks.rank].fill_(first)
    ranks.least(0)
    found: dict[str, object] = {}
    for number, rows in enumerate(DIVIDED_ROWS):
        product = part(ranks.rank, number, rows * WIDTH).view(rows, WIDTH)
        for peer in everyone:
            theirs = share_of(rows, peer, ranks.size)
            rooms[peer][ranks.rank, : theirs.stop - theirs.start] = product[theirs]
        divided_sum(rooms[ranks.rank], streams[ranks.rank][:rows], tuple(counts), rank=ranks.rank)
        mine = share_of(rows, ranks.rank, ranks.size)
        for peer in everyone:
            streams[peer][mine] = streams[ranks.rank][mine]
        meet_peers(tuple(counts), rank=ranks.rank)
        found[f"sum {number}"] = streams[ranks.rank].clone()
    return found


@pytest.mark.parametrize(("size", "first"), [(2, 0), (2, 2**31 - 2), (4, 0)], ids=["two", "counts wrap", "four"])
def test_every_rank_has_the_shares_that_all_have_summed(size: int, first: int, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    found = on_ranks(size, divided_in_turns, tmp_path, tmp_path / "memory", first)
    wanted = torch.ones(MOST_ROWS, WIDTH)
    for number, rows in enumerate(DIVIDED_ROWS):
        total = torch.zeros(rows, WIDTH)
        for rank in range(size):
            total += part(rank, number, rows * WIDTH).view(rows, WIDTH)
        wanted[:rows] = total + wanted[:rows]
        for each in found:
            assert np.array_equal(each[f"sum {number}"], wanted.numpy())


def test_shares_are_all_rows_in_whole_tiles() -> None:
    for num_rows, size, starts in ((8448, 2, [0, 4224]), (1023, 2, [0, 512]), (100, 4, [0, 100, 100, 100])):
        shares = [share_of(num_rows, rank, size) for rank in range(size)]
        assert [each.start for each in shares] == starts
        assert [each.stop for each in shares] == [*starts[1:], num_rows]
        assert room_shape(num_rows, 16, size)[1] >= max(each.stop - each.start for each in shares)


def test_shares_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_sum_module, "GRAIN", 4)
    rooms, stream, counts = torch.zeros(2, 4, 16), torch.zeros(8, 16), torch.zeros(2, dtype=torch.int32)
    for room, x, each, wanted in (
        (rooms, stream, (counts,), "rank 0 has 2 parts of a room and 1 counts"),
        (rooms, torch.zeros(9, 16), (counts, counts), "does not fit rooms"),
        (rooms[:, :3], stream, (counts, counts), "does not fit rooms"),
        (rooms, stream.bfloat16(), (counts, counts), "does not fit rooms"),
        (rooms, stream[:, :8], (counts, counts), "does not fit rooms"),
        (rooms, stream, (counts, counts.long()), "need 2 counts of int32"),
        (rooms, stream, (counts, counts[:1]), "need 2 counts of int32"),
    ):
        with pytest.raises(ValueError, match=wanted):
            divided_sum(room, x, each, rank=0)
    with pytest.raises(ValueError, match="1 programs need 2 counts of int32"):
        meet_peers((counts, counts[:1]), rank=0)


def test_what_does_not_fit_is_refused() -> None:
    room, counts, out = torch.zeros(64), torch.zeros(2, dtype=torch.int32), torch.zeros(64)
    peer_sum((room,), (counts,), out, rank=0, adds=False)
    for rooms, each, wanted in (
        ((room, room), (counts,), "rank 0 has 2 rooms and 1 counts"),
        ((room[:32],), (counts,), "its rooms do not fit"),
        ((room.bfloat16(),), (counts,), "its rooms do not fit"),
        ((room,), (counts.long(),), "1 programs need 1 counts of int32"),
        ((room,), (counts[:0],), "1 programs need 1 counts of int32"),
    ):
        with pytest.raises(ValueError, match=wanted):
            peer_sum(rooms, each, out, rank=0, adds=False)


def test_columns_that_do_not_fit_are_refused() -> None:
    room, counts, out = torch.zeros(64), torch.zeros(2, dtype=torch.int32), torch.zeros(4, 16)
    peer_join((room,), (counts,), out, rank=0)
    for rooms, each, wanted in (
        ((room, room), (counts,), "rank 0 has 2 rooms and 1 counts"),
        ((room[:32],), (counts,), "its rooms do not fit"),
        ((room.bfloat16(),), (counts,), "its rooms do not fit"),
        ((room,) * 3, (counts,) * 3, "3 ranks do not have equal columns"),
        ((room,), (counts.long(),), "1 programs need 1 counts of int32"),
    ):
        with pytest.raises(ValueError, match=wanted):
            peer_join(rooms, each, out, rank=0)


def test_what_does_not_fit_an_inbox_is_refused() -> None:
    x, inbox, turns = torch.zeros(256), torch.zeros(2, 2, WORDS, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for partial, inboxes, out, wanted in (
        (x[:128], (inbox,), x[:128], "rank 0 has 1 inboxes"),
        (x[:128], (inbox.int(), inbox), x[:128], "each is int64 of 2 parts of 2 ranks"),
        (x[:128], (inbox, inbox), x[:64], "unlike out"),
        (x[:128].half(), (inbox, inbox), x[:128].half(), "makes no words of 32 bits"),
        (x[:3].bfloat16(), (inbox, inbox), x[:3].bfloat16(), "makes no words of 32 bits"),
        (x, (inbox, inbox), x, "a sum of 256 words has inboxes of 128 and 1 turns"),
    ):
        with pytest.raises(ValueError, match=wanted):
            pushed_sum(partial, inboxes, turns, out, rank=0, adds=False)
