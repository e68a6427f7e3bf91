"""The one-pass sampler against its reference, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.sampling.sample import SampleParts, sample_and_advance, sample_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Rows:
    """State of R rows on the device, the last one scratch."""

    def __init__(self, R: int) -> None:
        self.temperature = torch.tensor([0.0, 0.6, 1.0, 1.7] * R)[:R].to(DEVICE)
        self.seed = (torch.randint(-(2**62), 2**62, (R,)) * 2 + 1).to(DEVICE)
        self.num_prompt = torch.randint(1, 9, (R,), dtype=torch.int32).to(DEVICE)
        self.position = (self.num_prompt + torch.arange(R, device=DEVICE, dtype=torch.int32) - 1).contiguous()
        self.last_token = torch.full((R,), -5, dtype=torch.int32, device=DEVICE)


def sample(rows: Rows, logits: torch.Tensor, index: list[int], vocab_size: int) -> tuple[list[int], list[bool]]:
    B = len(index)
    token = torch.full((B,), -7, dtype=torch.int32, device=DEVICE)
    finite = torch.full((B,), 9, dtype=torch.int8, device=DEVICE)
    rows_B = torch.tensor(index, dtype=torch.int32, device=DEVICE)
    sample_and_advance(
        logits.to(DEVICE), rows_B, rows.temperature, rows.seed, rows.num_prompt, rows.last_token, rows.position,
        token, finite, SampleParts(B, vocab_size, DEVICE),
    )  # fmt: skip
    return token.tolist(), [bool(flag) for flag in finite.tolist()]


@pytest.mark.parametrize(("V", "vocab_size"), [(40, 33), (9000, 8999), (4096, 4096)])
def test_tokens_equal_those_of_the_reference_and_rows_move_on(V: int, vocab_size: int) -> None:
    torch.manual_seed(0)
    rows, index = Rows(14), [13, 0, 5, 2, 7, 3, 11, 1, 6]
    logits = torch.randn(len(index), V) * 3
    logits[:, vocab_size:] = 100.0
    before = rows.position.clone()
    at = torch.tensor(index)
    output_index = (rows.position + 1 - rows.num_prompt).cpu()[at]
    expected, _ = sample_reference(logits, rows.temperature.cpu()[at], rows.seed.cpu()[at], output_index, vocab_size)
    tokens, finite = sample(rows, logits, index, vocab_size)
    assert tokens == expected.tolist()
    assert finite == [True] * len(index)
    assert rows.last_token[at[1:].to(DEVICE)].tolist() == tokens[1:]
    assert (rows.position - before).tolist() == [int(row in index and row != 13) for row in range(14)]
    assert int(rows.last_token[13]) == -5


@pytest.mark.parametrize("spread", [0.0, 0.05, 40.0])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.6, 50.0])
def test_a_part_whose_bound_is_not_the_highest_may_win(spread: float, temperature: float) -> None:
    """Flat, ordinary and steep rows of many parts: the first of equal ones when greedy, the exact draw otherwise."""
    torch.manual_seed(2)
    rows, index, V = Rows(4), [0, 1, 2], 16_000
    rows.temperature[:] = temperature
    logits = (torch.randn(3, V) * spread).bfloat16()
    output_index = (rows.position + 1 - rows.num_prompt).cpu()[:3]
    expected, _ = sample_reference(logits, rows.temperature.cpu()[:3], rows.seed.cpu()[:3], output_index, V - 7)
    assert sample(rows, logits, index, V - 7) == (expected.tolist(), [True] * 3)


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(1)
    rows = Rows(2)
    rows.temperature[0] = 0.8
    logits = torch.randn(1, 6) * 2
    counts = torch.zeros(6)
    num_draws = 4000 if DEVICE == "cuda" else 300
    for index in range(num_draws):
        rows.position[0] = index
        counts[sample(rows, logits, [0], 6)[0][0]] += 1
    expected = torch.softmax(logits[0] / 0.8, dim=0) * num_draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5  # chi-squared, 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_and_hurts_no_other(bad: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5000)
    clean = sample(Rows(5), logits, [0, 1, 2], 5000)[0]
    torch.manual_seed(0)
    torch.randn(3, 5000)
    broken = logits.clone()
    broken[1, 4500] = bad
    tokens, finite = sample(Rows(5), broken, [0, 1, 2], 5000)
    assert finite == [True, False, True]
    assert 0 <= tokens[1] < 5000
    assert tokens[0] == int(logits[0].argmax())
    assert len(clean) == 3


def test_nothing_finite_at_all_is_told() -> None:
    assert sample(Rows(3), torch.full((1, 70), float("-inf")), [0], 70)[1] == [False]
