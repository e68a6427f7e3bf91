"""The one-pass sampler against its reference, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.sampling.sample import SampleParts, VocabularyPart, sample_and_advance, sample_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Rows:
    """State of R rows on the device, the last one scratch."""

    def __init__(self, R: int) -> None:
        self.temperature = torch.tensor([0.0, 0.6, 1.0, 1.7] * R)[:R].to(DEVICE)
        self.seed = (torch.randint(-(2**62), 2**62, (R,)) * 2 + 1).to(DEVICE)
        self.num_prompt = torch.randint(1, 9, (R,), dtype=torch.int32).to(DEVICE)
        self.position = (self.num_prompt + torch.arange(R, device=DEVICE, dtype=torch.int32) - 1).contiguous()
        self.last_token = torch.full((R,), -5, dtype=torch.int32, device=DEVICE)


def sample_cut(
    rows: Rows, logits: torch.Tensor, index: list[int], vocab_size: int, num_ranks: int
) -> tuple[list[int], list[bool]]:
    """As `num_ranks` ranks do, of which each has some columns: first the candidates of all, then each rank's choice."""
    B, width, kept = len(index), logits.shape[1] // num_ranks, list[torch.Tensor]()
    rows_B = torch.tensor(index, dtype=torch.int32, device=DEVICE)
    before = (rows.position.clone(), rows.last_token.clone())
    found = []
    for turn in range(2 * num_ranks):
        rank = turn % num_ranks

        def gather(mine: torch.Tensor, out: torch.Tensor, turn: int = turn) -> None:
            if turn < num_ranks:
                kept.append(mine.clone())
                out.fill_(-1)
            else:
                out.copy_(torch.cat(kept, dim=1))

        rows.position.copy_(before[0])
        rows.last_token.copy_(before[1])
        token = torch.full((B,), -7, dtype=torch.int32, device=DEVICE)
        finite = torch.full((B,), 9, dtype=torch.int8, device=DEVICE)
        of_ranks = VocabularyPart(first=rank * width, num_ranks=num_ranks, gather=gather)
        sample_and_advance(
            logits[:, rank * width : (rank + 1) * width].contiguous().to(DEVICE), rows_B, rows.temperature, rows.seed,
            rows.num_prompt, rows.last_token, rows.position, token, finite,
            SampleParts(B, vocab_size, DEVICE, num_columns=width, of_ranks=of_ranks),
        )  # fmt: skip
        found.append((token.tolist(), [bool(flag) for flag in finite.tolist()], rows.last_token.tolist()))
    assert all(each == found[-1] for each in found[num_ranks:])
    return found[-1][:2]


@pytest.mark.sanitize(only=lambda num_ranks, spread: num_ranks == 2 and spread == 3.0)
@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 8999), (4, 4400), (3, 9000)])
@pytest.mark.parametrize("spread", [0.0, 0.05, 3.0])
def test_ranks_that_have_some_columns_each_choose_the_tokens_of_one(
    num_ranks: int, vocab_size: int, spread: float
) -> None:
    """Equal logits, of which the first counts, parts without an id, noise that decides, and what is not finite."""
    torch.manual_seed(5)
    index, V = [13, 0, 5, 2, 7, 3, 11, 1, 6], 9000
    logits = (torch.randn(len(index), V) * spread).bfloat16()
    logits[1] = -0.0
    logits[1, 2000:] = 0.0
    logits[4, 3000] = float("nan")
    logits[5, 10] = float("inf")
    logits[6] = float("-inf")
    logits[:, vocab_size:] = 100.0
    one, several = (Rows(14) for _ in range(2) if torch.manual_seed(6))
    one.temperature[[0, 3]] = several.temperature[[0, 3]] = 0.0
    expected = sample(one, logits, index, vocab_size)
    assert sample_cut(several, logits, index, vocab_size, num_ranks) == expected
    assert (several.position == one.position).all()
    assert (several.last_token == one.last_token).all()
    assert expected[1][4:7] == [False] * 3


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


@pytest.mark.sanitize(only=lambda V: V != 4096)
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
