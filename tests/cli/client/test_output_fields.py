"""Options of `octavo generate` as fields of a request."""

import pytest

from octavo.cli.client.generate_options import output_fields
from octavo.cli.errors import CliError


def test_only_what_is_given_is_asked_for() -> None:
    assert output_fields(logit_bias=[], allowed_ids="", num_outputs=None, echo=False, bad_words=[]) == {}
    assert output_fields(
        logit_bias=["7=1.5", "9=-100"], allowed_ids="1, 2 3", num_outputs=2, echo=True, bad_words=["x"], logprobs=0
    ) == {
        "logit_bias": {7: 1.5, 9: -100.0},
        "allowed_token_ids": [1, 2, 3],
        "num_outputs": 2,
        "echo": True,
        "bad_words": ["x"],
        "logprobs": 0,
    }


@pytest.mark.parametrize("wrong", ["7", "x=1", "7=x", "="])
def test_a_bias_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(CliError, match="bad logit bias"):
        output_fields(logit_bias=[wrong], allowed_ids="")


def test_ids_that_are_none_are_refused() -> None:
    with pytest.raises(CliError, match="bad token ids"):
        output_fields(logit_bias=[], allowed_ids="1,x")
