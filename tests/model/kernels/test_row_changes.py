"""Changes of the rows' state: whole buffers against the obvious reference, and what a second step finds."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.row_changes import HEADER_WORDS, LANES, apply_changes, apply_changes_reference, send_result

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAYLOAD = 5


def upload(index: np.ndarray, values: np.ndarray, *, size: int) -> torch.Tensor:
    """A header, a payload of noise, the changes, and stale words behind them."""
    words = np.random.default_rng(1).integers(-(2**31), 2**31, size).astype(np.int32)
    first = HEADER_WORDS + PAYLOAD
    words[:2] = len(index), first
    words[first : first + 2 * len(index)] = np.concatenate([index, values])
    return torch.from_numpy(words).to(DEVICE)


@pytest.mark.sanitize(only=lambda count: count == 1025)
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_every_change_lands_and_nothing_else_moves(count: int) -> None:
    rng = np.random.default_rng(count)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, 5000).astype(np.int32))
    index = rng.permutation(5000)[:count].astype(np.int32)
    sent = upload(index, rng.integers(-(2**31), 2**31, count).astype(np.int32), size=8000)
    expected = words.clone()
    apply_changes_reference(sent.cpu().clone(), expected)
    got = words.to(DEVICE)
    apply_changes(sent, got)
    assert torch.equal(got.cpu(), expected)
    assert sent[0].item() == 0
    got[:100] = 7
    apply_changes(sent, got)
    assert (got[:100] == 7).all(), "a step to which nothing was sent changed something"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="words_W"):
        apply_changes(torch.zeros(8, dtype=torch.int32), torch.zeros(8))


@pytest.mark.sanitize
@pytest.mark.parametrize("count", [5, LANES, 3 * LANES + 7])
def test_results_come_to_the_host_whole(count: int) -> None:
    is_pinned = DEVICE == "cuda"
    results = [torch.randint(0, 256, (count,), dtype=torch.uint8).to(DEVICE) for _ in range(2)]
    host = [torch.full((count,), 77, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
    for result, buffer in zip(results, host, strict=True):
        send_result(result, buffer)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for result, buffer in zip(results, host, strict=True):
        assert torch.equal(buffer, result.cpu())


def test_results_for_memory_that_does_not_fit_are_refused() -> None:
    result = torch.zeros(8, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="host_Y has shape"):
        send_result(result, torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(ValueError, match="host_Y is torch"):
        send_result(result, torch.zeros(8, dtype=torch.int8))
