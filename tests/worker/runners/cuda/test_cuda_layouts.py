"""Shapes of mixed steps: whole inputs of a padded plan, and which shape a step gets."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig
from octavo.worker.runners.cuda.staging import MixedLayout, MixedShapes, worst_layout
from octavo.worker.scheduler.plan import Chunk, StepPlan
from tests.support.worker.hand_plans import chunk

SHAPES = MixedShapes.of(max_slots=12, max_batch_tokens=100)


def plan_of(decodes: list[int], *chunks: Chunk) -> StepPlan:
    return StepPlan(
        step=1,
        decode_slots_S=np.asarray(decodes, np.int32),
        decode_positions_S=np.full(len(decodes), 30, np.int32),
        prefill=chunks,
    )


def test_a_padded_plan_has_scratch_rows_tokens_of_no_row_and_empty_tiles() -> None:
    plan = plan_of([4, 2], chunk(7, 3, 2, last=False), chunk(5, 0, 3))
    layout = MixedLayout(num_decodes=3, num_chunk_tokens=7, num_tiles=4, num_ends=2)
    tokens = [np.arange(100 * slot, 100 * slot + 20, dtype=np.int32) for slot in range(9)]
    words = np.full(layout.num_words, 77, np.int32)
    layout.fill(words, plan, tokens, scratch_row=9)
    inputs = layout.inputs(torch.from_numpy(words))
    assert inputs.num_decodes == 3
    assert inputs.ids_T.tolist() == [-1, -1, -1, 703, 704, 500, 501, 502, 0, 0]
    assert inputs.row_T.tolist() == [4, 2, 9, 7, 7, 5, 5, 5, -1, -1]
    assert inputs.position_T.tolist() == [0, 0, 0, 3, 4, 0, 1, 2, 0, 0]
    assert inputs.tiles_W4.tolist() == [[7, 3, 3, 2], [5, 5, 0, 3], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert inputs.last_tiles_W4.tolist() == [[5, 5, 0, 3], *[[0, 0, 0, 0]] * 3]
    assert inputs.rows_S.tolist() == [4, 2, 9, 5, 9]
    assert inputs.last_S.tolist() == [0, 1, 0, 7, 0]
    assert (inputs.ended_E.tolist(), inputs.position_E.tolist()) == ([5, 9], [2, 0])


@pytest.mark.parametrize("are_all_read", [False, True])
def test_the_last_layer_attends_from_the_tiles_that_are_read(are_all_read: bool) -> None:
    plan = plan_of([4], chunk(7, 40, 300), chunk(5, 0, 128), chunk(6, 128, 257, last=False))
    layout = MixedLayout.exact(plan)
    words = np.empty(layout.num_words, np.int32)
    tokens = [np.zeros(400, np.int32)] * 9
    layout.fill(words, plan, tokens, scratch_row=9, are_all_read=are_all_read)
    inputs = layout.inputs(torch.from_numpy(words))
    tiles = {tuple(tile) for tile in inputs.tiles_W4.tolist()}
    last_tiles = {tuple(tile) for tile in inputs.last_tiles_W4.tolist() if tile[3]}
    assert last_tiles == (tiles if are_all_read else {(7, 257, 296, 44), (5, 301, 0, 128)})
    assert last_tiles <= tiles, "another tile has other bits"


@pytest.mark.parametrize(
    ("num_decodes", "lengths", "expected"),
    [
        (0, [1], (0, 16)),
        (0, [16], (0, 16)),
        (0, [17], (0, 32)),
        (1, [5, 5], (8, 16)),
        (9, [5, 5], (12, 16)),
        (12, [5], (12, 16)),
        (0, [5, 5, 5], (0, 64)),  # three chunks have no room in a step of 32 tokens
        (0, [100], (0, 100)),
        (0, [101], None),
        (13, [1], None),
    ],
)
def test_a_step_gets_the_smallest_shape_it_fits_into(
    num_decodes: int, lengths: list[int], expected: tuple[int, int] | None
) -> None:
    plan = plan_of(list(range(num_decodes)), *(chunk(i, 0, length) for i, length in enumerate(lengths)))
    found = SHAPES.find(MixedLayout.exact(plan), len(lengths))
    assert (found and (found.num_decodes, found.num_chunk_tokens)) == expected
    assert found is None or found in SHAPES.layouts()


@pytest.mark.parametrize("max_batch_tokens", [16, 40, 256, 2048, 8192])
@pytest.mark.parametrize("share", ["all cached", "half", "none"])
def test_every_plan_of_no_more_chunks_than_it_has_room_for_is_recorded(max_batch_tokens: int, share: str) -> None:
    """Of 256 prompts at once that are cached but for less than a block, or not."""
    shapes = MixedShapes.of(max_slots=256, max_batch_tokens=max_batch_tokens)
    rng = np.random.default_rng(0)
    for num_chunks in range(1, shapes.max_chunks + 1):
        longest = {"all cached": 16, "half": 200, "none": 1024}[share]
        lengths = rng.integers(1, longest + 1, num_chunks)
        lengths = np.maximum(1, np.minimum(lengths, (max_batch_tokens - num_chunks) // num_chunks)).tolist()
        plan = plan_of(list(range(256 - num_chunks)), *(chunk(i, 0, length) for i, length in enumerate(lengths)))
        if sum(lengths) <= max_batch_tokens:
            assert shapes.find(MixedLayout.exact(plan), num_chunks) in shapes.layouts()
    crowd = plan_of([], *(chunk(i, 0, 1) for i in range(shapes.max_chunks + 1)))
    assert shapes.find(MixedLayout.exact(crowd), shapes.max_chunks + 1) is None


@pytest.mark.parametrize("lengths", [[100], [1] * 6, [33, 33, 34], [1, 99]])
def test_every_shape_found_has_room_for_its_tiles_and_ends(lengths: list[int]) -> None:
    plan = plan_of([], *(chunk(i, 0, length) for i, length in enumerate(lengths)))
    exact = MixedLayout.exact(plan)
    found = SHAPES.find(exact, len(lengths))
    assert found is not None
    assert found.num_tiles >= exact.num_tiles
    assert found.num_ends >= exact.num_ends


def test_no_layout_is_longer_than_the_worst_and_none_overlaps_itself() -> None:
    worst = worst_layout(max_slots=12, max_batch_tokens=100)
    for layout in SHAPES.layouts():
        assert layout.num_words <= worst.num_words
        ends = [0, *(section.stop for section in layout.sections.values())]
        assert all(section.start >= end for section, end in zip(layout.sections.values(), ends, strict=False))


def test_shapes_come_largest_first() -> None:
    sizes = [layout.num_chunk_tokens for layout in SHAPES.layouts()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == len(SHAPES.decode_sizes) * len(SHAPES.token_sizes) == 3 * 4


def test_the_rows_of_a_step_are_those_of_the_largest_that_is_recorded() -> None:
    config = CudaRunnerConfig(
        num_blocks=1, block_size=16, max_slots=256, max_model_len=2048, vocab_size=9, max_batch_tokens=8192
    )
    assert config.max_rows == 8192 + 256
    assert replace(config, max_batch_tokens=20_000).max_rows == 20_000
