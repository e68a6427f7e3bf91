"""The table of rounding errors: what it is fed, and how it is written."""

from pathlib import Path

import pytest
import torch

from bench.cpu.quant_error import PIECE_TOKENS, pieces, recorded, table
from octavo.model import load_model, resolve_checkpoint
from octavo.model.verify.rounding_error import Rounding, RoundingError, measure, round_model

FOLDER = resolve_checkpoint("folio-chat")
HELD_OUT = Path(__file__).resolve().parents[3] / "bench" / "held_out.txt"


def test_texts_are_cut_and_the_recorded_answers_taken_where_there_are_none(tmp_path: Path) -> None:
    answers = pieces(FOLDER, [], 10)
    assert [len(piece) > 2 for piece in answers] == [True] * len(recorded(FOLDER))
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a mouse. " * 200)
    found = pieces(FOLDER, [text], 1100)
    assert [len(piece) for piece in found] == [PIECE_TOKENS, PIECE_TOKENS, 1100 - 2 * PIECE_TOKENS]


def test_the_table_has_a_line_for_each_rounding() -> None:
    error = RoundingError(
        perplexity=2.5, before=2.4, relative_error=0.0123, divergence=0.001, same_choice=0.975, same_outputs=3,
        num_outputs=4, mean_prefix=11.6,
    )  # fmt: skip
    assert table({"fp8 weights": error}).splitlines()[2] == (
        "| fp8 weights | 2.500 | 0.0123 | 0.00100 | 97.5% | 3 of 4, 12 tokens |"
    )


LIMITS = {
    Rounding.FP8_WEIGHTS_AND_TOKENS: (0.10, 0.82),
    Rounding.FP8_CACHE: (0.10, 0.88),
    Rounding.FP8_ALL_AND_TOKENS: (0.10, 0.80),
}
"""How far perplexity may move, as a part of it, and the least share of equal first choices: docs/quantization.md."""


@pytest.mark.parametrize("rounding", LIMITS, ids=lambda rounding: rounding.value)
def test_fp8_costs_no_more_than_the_page_says(rounding: Rounding) -> None:
    before, rounded = load_model(FOLDER, dtype=torch.float32), load_model(FOLDER, dtype=torch.bfloat16)
    round_model(rounded, rounding)
    error = measure(rounded, before, pieces(FOLDER, [HELD_OUT], 512), [], kv_dtype=rounding.kv_dtype)
    moved, same_choice = LIMITS[rounding]
    assert abs(error.perplexity / error.before - 1) < moved
    assert error.same_choice > same_choice
    assert error.divergence < 0.2
