"""From options of `octavo generate` to fields of a request: what is sampled, and what is told. Pure."""

from collections.abc import Sequence
from typing import Any

from octavo.client_requests import GenerateFields

from cli.errors import usage


def output_fields(*, logit_bias: Sequence[str], allowed_ids: str, **given: Any) -> GenerateFields:
    """Fields of the same names; what is None, empty or False is left out. logit_bias: as ID=BIAS. allowed_ids: ids
    separated by commas or blanks. Raises CliError."""
    fields = {name: value for name, value in given.items() if not (value is None or value is False or value == [])}
    if logit_bias:
        fields["logit_bias"] = dict(map(_bias, logit_bias))
    if allowed_ids:
        fields["allowed_token_ids"] = _ids(allowed_ids)
    return GenerateFields(**fields)  # type: ignore[typeddict-item]


def _bias(word: str) -> tuple[int, float]:
    token, _, bias = word.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise usage("bad logit bias", f"{word!r} is not ID=BIAS", "write it as 151643=-100") from None


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise usage("bad token ids", f"{text!r} is not a list of numbers", "write them as 1,2,3")
    return [int(word) for word in words]
