"""Sums over ranks on one device: what the other rank would bring is there before it is asked for, so nothing waits.

For sanitizers, under which two kernels do not run beside each other; tests/gpu/test_gpu_ranks.py has two devices.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.small_batch import divided_sum as divided_sum_module
from octavo.model.kernels.small_batch import peer_sum as peer_sum_module
from octavo.model.kernels.small_batch.divided_sum import divided_sum, meet_peers, room_shape, share_of
from octavo.model.kernels.small_batch.divided_sum import num_programs as divided_programs
from octavo.model.kernels.small_batch.peer_sum import BLOCK, num_programs, peer_join, peer_sum
from octavo.model.kernels.small_batch.pushed_sum import WORDS, num_turns, pushed_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, RANK = 2, 0


def told_before(programs: int) -> tuple[torch.Tensor, ...]:
    """Counts of both ranks: the other one is a hundred sums ahead."""
    counts = torch.zeros(SIZE, programs, SIZE, dtype=torch.int32, device=DEVICE)
    counts[RANK, :, 1 - RANK] = 100
    return tuple(counts)


@pytest.mark.sanitize
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("num_numbers", "most_programs"), [(48, 9), (2 * BLOCK + 48, 9), (2 * BLOCK + 48, 1)])
def test_rooms_are_added_up(num_numbers: int, most_programs: int, adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sum_module, "MAX_PROGRAMS", most_programs)
    rooms = torch.randn(SIZE, num_numbers).to(DEVICE)
    out = torch.full((num_numbers,), 2.0, device=DEVICE)
    counts = told_before(num_programs(num_numbers))
    peer_sum(tuple(rooms), counts, out, rank=RANK, adds=adds)
    torch.testing.assert_close(out, rooms.sum(0) + 2.0 * adds)
    assert (counts[1 - RANK][:, RANK] == 1).all()


@pytest.mark.sanitize
def test_columns_are_put_side_by_side() -> None:
    rooms, out = torch.randn(SIZE, 5 * 700).to(DEVICE), torch.full((5, SIZE * 700), torch.nan, device=DEVICE)
    peer_join(tuple(rooms), told_before(num_programs(5 * 700)), out, rank=RANK)
    assert torch.equal(out, torch.cat([room.view(5, 700) for room in rooms], dim=1))


@pytest.mark.sanitize
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_came_with_their_turn_are_added_up(dtype: torch.dtype, adds: bool) -> None:
    num_numbers = 3 * WORDS + 20
    mine, theirs = (torch.randint(-9, 9, (num_numbers,)).to(dtype).to(DEVICE) for _ in range(SIZE))
    words = theirs.view(torch.int32).long() & 0xFFFF_FFFF
    inboxes = torch.zeros(SIZE, 2, SIZE, num_turns(len(words)) * WORDS, dtype=torch.int64, device=DEVICE)
    inboxes[RANK, 1, 1 - RANK, : len(words)] = (1 << 32) | words
    turns = torch.zeros(num_turns(len(words)), dtype=torch.int32, device=DEVICE)
    out = torch.full((num_numbers,), 2.0, dtype=dtype, device=DEVICE)
    pushed_sum(mine, tuple(inboxes), turns, out, rank=RANK, adds=adds)
    assert torch.equal(out, mine + theirs + 2 * adds)
    sent = inboxes[1 - RANK, 1, RANK, : len(words)]
    assert torch.equal(sent, (1 << 32) | (mine.view(torch.int32).long() & 0xFFFF_FFFF))


@pytest.mark.sanitize
@pytest.mark.parametrize(("num_rows", "most_programs"), [(300, 9), (300, 1), (100, 9)])
def test_a_share_of_rows_is_added_up(num_rows: int, most_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_sum_module, "MAX_PROGRAMS", most_programs)
    width, share = 48, share_of(num_rows, RANK, SIZE)
    rooms_GRD = torch.randn(room_shape(num_rows, width, SIZE)).to(DEVICE)
    x_TD = torch.randn(num_rows, width).to(DEVICE)
    expected = x_TD.clone()
    expected[share] += rooms_GRD.sum(0)[: share.stop - share.start]
    counts = told_before(divided_programs(num_rows, width, SIZE))
    divided_sum(rooms_GRD, x_TD, counts, rank=RANK)
    torch.testing.assert_close(x_TD, expected)
    assert (counts[1 - RANK][:, RANK] == 1).all()


@pytest.mark.sanitize
def test_a_meeting_tells_the_other_rank_once() -> None:
    counts = told_before(2)
    meet_peers(counts, rank=RANK)
    assert counts[1 - RANK][:, RANK].tolist() == [1, 0]
