"""What is sent to the rows' state: whole buffers after every send, against writing each word at once."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model.gpu.state import SAMPLING_COLUMNS, RowLayout, RowState
from octavo.model.kernels.row_changes import HEADER_WORDS, apply_changes_reference
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.cuda.staging import StagedRows, StagingBuffer
from octavo.worker.scheduler.plan import NewRequest, Slot

SLOTS, WIDTH = 5, 4


class Side:
    """The host's changes, the upload, and a device's state that the reference keeps."""

    def __init__(self, num_payload: int = 3) -> None:
        self.state = RowState(num_slots=SLOTS, table_width=WIDTH, scratch_block=90, device="cpu")
        self.changes = StagedRows(self.state.layout)
        self.upload = StagingBuffer(self.changes, num_payload=num_payload, num_buffers=2, device=torch.device("cpu"))

    def send(self, num_payload: int = 0) -> None:
        self.upload.send(num_payload)
        apply_changes_reference(self.upload.device_U, self.state.words_W)


def join(slot: int, tokens: list[int], *, num_prompt: int, **sampling: object) -> NewRequest:
    return NewRequest(
        slot=Slot(slot),
        request_id="r",
        token_ids_T=np.asarray(tokens, np.int32),
        num_prompt_tokens=num_prompt,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def test_a_join_sets_its_row_and_no_other() -> None:
    side = Side()
    before = side.state.words_W.clone()
    sampling = dict.fromkeys(SAMPLING_COLUMNS, 7) | {"method": 0, "top_p": 0.8, "log_min_p": -np.inf, "repetition": 1.5}
    side.changes.join(join(3, [8, 9, 10], num_prompt=2, temperature=0.5, seed=2**64 - 3), sampling)
    side.send()
    state = side.state
    assert (state.last_token_R[3], state.position_R[3], state.num_prompt_R[3]) == (10, 2, 2)
    assert (state.temperature_R[3].item(), state.seed_R[3].item()) == (0.5, -3)
    got = {name: round(column_R[3].item(), 6) for name, column_R in state.sampling_columns.items()}
    assert got == sampling
    assert int((state.words_W != before).sum()) == 6 + len(sampling) - 1


def test_a_row_with_a_method_of_its_own_is_greedy_for_the_steps_sampler() -> None:
    side = Side()
    sampling = dict.fromkeys(SAMPLING_COLUMNS, 0) | {"method": 1, "temperature": 0.5}
    side.changes.join(join(3, [8, 9], num_prompt=2, temperature=0.5), sampling)
    side.send()
    assert (side.state.temperature_R[3], side.state.sampling_columns["temperature"][3]) == (0.0, 0.5)


def test_the_last_of_two_blocks_for_a_place_is_the_one() -> None:
    side = Side()
    side.changes.put_blocks(np.asarray([[1, 0, 7], [1, 2, 8], [1, 0, 9]], np.int32))
    side.changes.put_blocks(np.asarray([[1, 2, 6]], np.int32))
    side.send()
    assert side.state.table_RM[1].tolist() == [9, 90, 6, 90]


def test_a_step_without_changes_sends_nothing_and_one_with_a_payload_keeps_it() -> None:
    side = Side()
    side.changes.set_batch(np.asarray([2, 0], np.int32), 4)
    side.upload.payload(3)[:] = 5, 6, 7
    side.send(3)
    assert side.state.batch_A.tolist() == [2, 0, 5, 5, 5]
    assert side.upload.device_U[HEADER_WORDS : HEADER_WORDS + 3].tolist() == [5, 6, 7]
    side.upload.device_U[1:] = -1
    side.changes.set_batch(np.asarray([2, 0], np.int32), 4)
    side.send()
    assert (side.upload.device_U[1:] == -1).all(), "copied though nothing changed"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(st.integers(0, SLOTS - 1), unique=True), st.integers(0, 2)), max_size=12))
def test_the_batch_on_the_device_is_always_the_one_asked_for(batches: list[tuple[list[int], int]]) -> None:
    side = Side()
    for slots, spare in batches:
        size = min(len(slots) + spare, SLOTS)
        side.changes.set_batch(np.asarray(slots, np.int32), size)
        side.send()
        assert side.state.batch_A[:size].tolist() == slots + [SLOTS] * (size - len(slots))


@pytest.mark.parametrize(("rows", "width", "batch"), [(1, 1, 1), (257, 129, 256), (33, 7, 40)])
def test_columns_do_not_overlap_and_begin_on_128_bytes(rows: int, width: int, batch: int) -> None:
    layout = RowLayout.of(num_rows=rows, table_width=width, max_batch=batch)
    spans = sorted(
        [
            (layout.seed, 2 * rows), (layout.last_token, rows), (layout.position, rows), (layout.num_prompt, rows),
            (layout.temperature, rows), (layout.batch, batch), (layout.table, rows * width),
            *((start, rows) for start in layout.sampling.values()),
        ]
    )  # fmt: skip
    assert all(start % 32 == 0 for start, _ in spans)
    ends = [start + count for start, count in spans]
    assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False))
    assert ends[-1] <= layout.num_words
