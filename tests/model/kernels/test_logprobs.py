"""Log-probabilities on the device against a softmax and a sort, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.sampling.columns import MAX_BIASES
from octavo.model.kernels.sampling.logprobs import MAX_TOP, LogprobParts, find_largest, logprobs_reference, take_chosen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def answers(logits: torch.Tensor, token: torch.Tensor, wanted: list[int], vocab: int) -> torch.Tensor:
    """Words of the answers on the CPU; -1 where nothing was written. Row b of the batch is row B - 1 - b."""
    B = len(logits)
    parts = LogprobParts(B, vocab, DEVICE)
    parts.answer_BX.fill_(-1)
    rows = torch.arange(B - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    wanted_R = torch.tensor(wanted[::-1], dtype=torch.int32, device=DEVICE)
    none, ids = (
        torch.zeros(B, dtype=torch.int32, device=DEVICE),
        torch.zeros(B, MAX_BIASES, dtype=torch.int32, device=DEVICE),
    )
    values = torch.zeros(B, MAX_BIASES, device=DEVICE)
    on_device = logits.to(DEVICE)
    find_largest(on_device, rows, wanted_R, parts)
    take_chosen(on_device, rows, token.to(DEVICE), wanted_R, none, ids, values, values, parts)
    return parts.answer_BX.cpu()


@pytest.mark.sanitize(only=lambda V, dtype: V == 4100 and dtype == torch.bfloat16)
@pytest.mark.parametrize(("V", "vocab"), [(40, 33), (4100, 4097), (9000, 8192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_come_in_order_of_equal_ones_the_least_id_first(V: int, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(V)
    logits = (torch.randn(4, V) * 4).to(dtype)
    logits[2, :vocab] = 1.5
    logits[3, 5:vocab:64] = 12.0  # more groups with the largest value than are looked at
    logits[:, vocab:] = 1e4
    token = torch.tensor([3, 30, 0, 32], dtype=torch.int32)
    words = answers(logits, token, [MAX_TOP + 1] * 4, vocab)
    chosen, ids, top = logprobs_reference(logits, token, vocab)
    assert torch.equal(words[:, 1 : 1 + MAX_TOP].long(), ids)
    torch.testing.assert_close(words.view(torch.float32)[:, 0], chosen, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(words.view(torch.float32)[:, 1 + MAX_TOP :], top, atol=2e-5, rtol=1e-6)


@pytest.mark.sanitize
def test_rows_get_as_many_as_they_want_and_others_nothing() -> None:
    torch.manual_seed(0)
    logits, token = torch.randn(3, 500), torch.tensor([1, 2, 3], dtype=torch.int32)
    words = answers(logits, token, [0, 1, 4], 500)
    assert words[0].tolist() == [-1] * words.shape[1]
    assert (words[1, 1:] == -1).all()
    assert (words[2, 4 : 1 + MAX_TOP] == -1).all()
    chosen, ids, _ = logprobs_reference(logits, token, 500)
    assert words[2, 1:4].tolist() == ids[2, :3].tolist()
    torch.testing.assert_close(words.view(torch.float32)[1:, 0], chosen[1:], atol=2e-5, rtol=1e-6)


def test_a_row_of_nan_hurts_no_other() -> None:
    logits = torch.randn(2, 100)
    logits[0] = torch.nan
    token = torch.zeros(2, dtype=torch.int32)
    words = answers(logits, token, [3, 3], 100)
    torch.testing.assert_close(words.view(torch.float32)[1, 0], logprobs_reference(logits, token, 100)[0][1])


def test_logits_that_are_too_narrow_are_refused() -> None:
    one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="need 10 ids"):
        find_largest(torch.zeros(1, 9, device=DEVICE), one, one, LogprobParts(1, 10, DEVICE))
