"""Biased logits beside the others, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.sampling.columns import MAX_BIASES, move_biased, move_biased_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.sanitize(only=lambda dtype: dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_float32_and_their_places_become_minus_infinity(dtype: torch.dtype) -> None:
    R, V = 5, 3000
    biases = {
        0: {7: 1.25},
        2: {token: token / 1000 - 1.0 for token in range(0, 2 * MAX_BIASES, 2)},
        3: {9: -100.0, 8: 2},
    }
    count = torch.zeros(R, dtype=torch.int32)
    ids, values = torch.zeros(R, MAX_BIASES, dtype=torch.int32), torch.zeros(R, MAX_BIASES)
    for row, wanted in biases.items():
        count[row] = len(wanted)
        ids[row, : len(wanted)], values[row, : len(wanted)] = (
            torch.tensor(list(wanted)),
            torch.tensor(list(wanted.values())),
        )
    rows = torch.tensor([4, 3, 2, 1, 0], dtype=torch.int32)
    logits = torch.randn(5, V).to(dtype)
    got, sums = logits.clone().to(DEVICE), torch.full((6, MAX_BIASES), torch.nan, device=DEVICE)
    move_biased(got, rows.to(DEVICE), count.to(DEVICE), ids.to(DEVICE), values.to(DEVICE), sums)
    expected = move_biased_reference(logits, rows, biases)
    assert torch.equal(got.cpu(), logits)
    for b, row in enumerate(rows.tolist()):
        found = dict(zip(ids[row, : int(count[row])].tolist(), sums[b, : int(count[row])].tolist(), strict=True))
        assert found == pytest.approx(expected[b], abs=1e-6, rel=1e-6)
    assert bool(sums[[0, 3, 5]].isnan().all())


def test_a_table_of_another_width_is_refused() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="bias_id_RA has shape"):
        move_biased(
            torch.zeros(1, 9), one, one, torch.zeros(1, 5, dtype=torch.int32), torch.zeros(1, 5), torch.zeros(1, 5)
        )
