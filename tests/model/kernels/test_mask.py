"""Masks over logits in place, on a GPU or in Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.sampling.mask import (
    ALWAYS,
    WHILE_SHORT,
    forbid,
    forbid_reference,
    forbid_step,
    num_words,
    packed_mask,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_masks(rows: int, vocab: int, *, seed: int) -> torch.Tensor:
    is_allowed = np.random.default_rng(seed).random((rows, vocab)) < 0.3
    return torch.from_numpy(np.stack([packed_mask(row) for row in is_allowed]))


@pytest.mark.sanitize(only=lambda V, dtype: V != 9000 and dtype == torch.bfloat16)
@pytest.mark.parametrize(("V", "vocab"), [(70, 65), (64, 64), (5000, 4999), (9000, 8193)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_steps_masks_are_applied_to_their_columns(V: int, vocab: int, dtype: torch.dtype) -> None:
    logits, masks = torch.randn(5, V).to(dtype), random_masks(3, vocab, seed=V)
    column = torch.tensor([4, 0, 2], dtype=torch.int32)
    wanted = logits.clone()
    wanted[column.long()] = forbid_reference(logits[column.long()], masks, vocab)
    got = logits.to(DEVICE)
    forbid_step(got, column.to(DEVICE), masks.to(DEVICE), vocab)
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.sanitize
def test_a_rows_own_masks_hold_always_or_while_the_output_is_short() -> None:
    V, R = 150, 6
    always, short = random_masks(R, V, seed=1), random_masks(R, V, seed=2)
    kinds = [0, ALWAYS, WHILE_SHORT, ALWAYS | WHILE_SHORT, WHILE_SHORT, ALWAYS | WHILE_SHORT]
    position, num_prompt, min_tokens = [9, 9, 9, 9, 9, 9], [5] * 6, [9, 9, 5, 5, 4, 4]
    logits, rows = torch.randn(8, V), torch.tensor([3, 1, 5, 0, 2, 4, 0, 0], dtype=torch.int32)
    wanted = logits.clone()
    for b, row in enumerate(rows.tolist()):
        if kinds[row] & ALWAYS:
            wanted[b : b + 1] = forbid_reference(wanted[b : b + 1], always[row : row + 1], V)
        if kinds[row] & WHILE_SHORT and position[row] - num_prompt[row] < min_tokens[row]:
            wanted[b : b + 1] = forbid_reference(wanted[b : b + 1], short[row : row + 1], V)

    def put(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    got = logits.to(DEVICE)
    forbid(
        got, rows.to(DEVICE), put(kinds), put(position), put(num_prompt), put(min_tokens), always.to(DEVICE),
        short.to(DEVICE), V,
    )  # fmt: skip
    assert torch.equal(got.cpu(), wanted)


def test_masks_of_the_wrong_width_are_refused() -> None:
    logits, column = torch.zeros(2, 64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="mask_NW has shape"):
        forbid_step(logits, column, torch.zeros(1, 3, dtype=torch.int32, device=DEVICE), 64)
    with pytest.raises(ValueError, match="fewer than the 65 ids"):
        forbid_step(logits, column, torch.zeros(1, num_words(65), dtype=torch.int32, device=DEVICE), 65)
