"""Bad words against a plain comparison of lists, on a GPU or in Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.sampling.bad_words import MAX_LENGTH, MAX_WORDS, RING, ban, banned_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, SMALL = 40, 3  # of so few different tokens, words come up often


@pytest.mark.sanitize
def test_what_would_complete_a_word_is_forbidden_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    R = 24
    columns = {name: torch.zeros(R, dtype=torch.int32) for name in ("position", "num_prompt", "num_words")}
    last, length = torch.zeros(R, MAX_WORDS, dtype=torch.int32), torch.zeros(R, MAX_WORDS, dtype=torch.int32)
    begin = torch.randint(0, SMALL, (R, MAX_LENGTH, MAX_WORDS), dtype=torch.int32)
    said = torch.randint(0, SMALL, (R, RING), dtype=torch.int32)
    wanted: list[set[int]] = []
    for row in range(R):
        num_prompt, output = int(rng.integers(1, 50)), rng.integers(0, SMALL, rng.integers(0, 70)).tolist()
        words = [tuple(rng.integers(0, SMALL, rng.integers(2, 7)).tolist()) for _ in range(rng.integers(0, MAX_WORDS))]
        if len(output) >= MAX_LENGTH:
            words += [(*output[-MAX_LENGTH:], 35)][: MAX_WORDS - len(words)]
        words = [(*word[:-1], int(rng.integers(3, V))) for word in words]
        columns["position"][row], columns["num_prompt"][row] = num_prompt + len(output), num_prompt
        columns["num_words"][row] = len(words)
        for n, word in enumerate(words):
            last[row, n], length[row, n] = word[-1], len(word) - 1
            begin[row, : len(word) - 1, n] = torch.tensor(word[-2::-1])
        for index, token in enumerate(output):
            said[row, (num_prompt + index) % RING] = token
        wanted.append(banned_reference(output, words))
    rows = torch.randperm(R).to(torch.int32)
    logits = torch.zeros(R, V + 3, device=DEVICE)
    ban(
        logits, rows.to(DEVICE), *(column.to(DEVICE) for column in columns.values()), last.to(DEVICE),
        length.to(DEVICE), begin.to(DEVICE), said.to(DEVICE), V,
    )  # fmt: skip
    found = [set(torch.nonzero(row == -torch.inf).flatten().tolist()) for row in logits.cpu()]
    assert found == [wanted[row] for row in rows.tolist()]
    assert sum(map(bool, wanted)) > 10
    assert not all(map(bool, wanted))


def test_a_table_of_another_shape_is_refused() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    small = torch.zeros(1, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="last_RN has shape"):
        ban(torch.zeros(1, 9), one, one, one, one, small, small, small, small, 9)
