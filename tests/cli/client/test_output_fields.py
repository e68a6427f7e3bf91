"""Options of `octavo generate` as fields of a request."""

import pytest

from octavo.cli.client.generate_options import output_fields
from octavo.cli.errors import CliError
from octavo.cli.main import main


def test_only_what_is_given_is_asked_for() -> None:
    assert output_fields(logit_bias=[], allowed_ids=None, num_outputs=None, echo=False, bad_words=[]) == {}
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


@pytest.mark.parametrize("wrong", ["7", "x=1", "7=x", "=", "7=nan", "7=-inf", "7=1e400", f"{5000 * '9'}=1", "٧=1"])
def test_a_bias_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(CliError, match="bad logit bias"):
        output_fields(logit_bias=[wrong], allowed_ids=None)


@pytest.mark.parametrize("wrong", ["1,x", "4294967296", 5000 * "9", "٧"])
def test_ids_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(CliError, match="bad token ids") as caught:
        output_fields(logit_bias=[], allowed_ids=wrong)
    assert len(caught.value.numbers) < 300


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--as", "ids", "99999999999"], "'99999999999' is not a list of token ids"),
        (["x", "--logit-bias", "-5=1"], "--logit-bias is '-5=1', not ID=BIAS"),
        (["x", "--num-outputs", "-3"], "Invalid value for '--num-outputs' / '-n': Input should be"),
        (["caf\udcff"], "text: is not UTF-8 text, from its character 4 on"),
        (["x", "--allowed-ids", ""], "'' is not a list of token ids"),
        (["x", "--logprobs", "3"], "only JSON has a place for it"),
        (["x", "--prompt-logprobs", "3"], "only JSON has a place for it"),
        (["x", "--return-prompt"], "only JSON has a place for it"),
        (["x", "--json-schema", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["x", "--ebnf", __file__[: -len("/test_output_fields.py")]], __file__[: -len("/test_output_fields.py")]),
        (["x", "--system", "Be brief."], "the prompt is no chat"),
        (["1", "--chat", "--as", "ids"], "--chat and --as ids are two"),
        (["x", "--top-k", "4294967296"], "--top-k is 4294967296: input should be less than"),
        (["x", "--max-tokens", "4294967296"], "--max-tokens is 4294967296: input should be less than"),
        (["x", "--seed", "18446744073709551616"], "--seed is 18446744073709551616: input should be less than"),
    ],
)
def test_what_no_request_can_hold_is_a_mistake_on_the_command_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--port", "1", *words]) == 2
    _, numbers, _ = capsys.readouterr().err.splitlines()
    assert numbers.strip().startswith(told)
