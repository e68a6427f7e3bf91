"""The largest of each row against torch's max: ties, ends of rows, rows that start anywhere, NaN and infinities."""

import pytest
import torch

from octavo.model.cpu.native import native_library
from octavo.model.cpu.ops import largest

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C compiler here")


@pytest.mark.parametrize("width", [1, 15, 16, 17, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_it_is_torchs_max(num_rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_rows * width)
    whole = torch.randint(-50, 50, (num_rows, width + 3), generator=generator).float()  # many are equal
    for logits_SV in (whole[:, :width], whole[:, 3:]):
        most_S, index_S = largest(logits_SV)
        assert torch.equal(most_S, logits_SV.amax(1))
        assert index_S.tolist() == [row.index(max(row)) for row in logits_SV.tolist()]


def test_infinities_and_nan_are_seen_wherever_they_stand() -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.zeros(6, 4100)
    rows[0] = -inf
    rows[1, 4099] = inf
    rows[2, 4099] = nan
    rows[3, 0], rows[3, 5] = nan, inf
    rows[4, 2048:] = -inf
    rows[4, 4097] = 1.0
    most_S, index_S = largest(rows)
    assert str(most_S.tolist()) == str([-inf, inf, nan, nan, 1.0, 0.0])
    assert index_S.tolist() == [0, 4099, 0, 0, 4097, 0]


def test_other_dtypes_go_to_torch() -> None:
    most_S, index_S = largest(torch.tensor([[1.0, 3.0, 3.0]], dtype=torch.bfloat16))
    assert (most_S.dtype, most_S.item(), index_S.tolist()) == (torch.bfloat16, 3.0, [1])
