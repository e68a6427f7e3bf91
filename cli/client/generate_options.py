"""Turns settings and options of `octavo generate` into fields of the request. Pure, but for the files of schemas and
grammars.

Options come in groups: each attribute of a group is an option."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from octavo.cli.errors import shorten, usage
from octavo.cli.settings.groups import ClientSettings
from octavo.cli.settings.options import PATH, given_path
from octavo.cli.settings.setting import UINT32
from octavo.cli.whole_number import whole_number

if TYPE_CHECKING:
    from octavo.client.requests import GenerateFields  # messages: not in every process of a service


def request_fields(settings: ClientSettings) -> "GenerateFields":
    """All fields but the input. Unset ones are left out, so that the model's defaults apply."""
    from octavo.client.requests import GenerateFields

    values = settings.model_dump()
    names = [name for name in ClientSettings.model_fields if name in GenerateFields.__annotations__ and name != "stop"]
    fields = {name: values[name] for name in names if values[name] is not None}
    if settings.model_name:
        fields["model"] = settings.model_name
    if settings.stop:
        fields["stop"] = settings.stop
    return cast("GenerateFields", fields)


def constraint_fields(
    *,
    json_schema: Path | None,
    format_as_annotation: bool,
    json_object: bool,
    regex: str | None,
    ebnf: Path | None,
    choices: Sequence[str] | None,
) -> "GenerateFields":
    """The fields that are given; the files are read. Raises CliError."""
    fields: GenerateFields = {}
    if json_schema is not None:
        fields["json_schema"] = _read(json_schema, "--json-schema")
    if json_object:
        fields["json_object"] = True
    if regex is not None:
        fields["regex"] = regex
    if ebnf is not None:
        fields["ebnf"] = _read(ebnf, "--ebnf")
    if choices:
        fields["choice"] = list(choices)
    if len(fields) > 1:
        raise usage("an output has one constraint at most", f"given were {', '.join(fields)}", "give one of them")
    if format_as_annotation:
        if json_schema is None:
            raise usage(
                "--format-as-annotation is for JSON schemas", "no --json-schema is given", "give one, or leave it out"
            )
        fields["format_as_annotation"] = True
    return fields


def _read(path: Path, flag: str) -> str:
    try:
        if text := path.read_text(encoding="utf-8"):
            return text
        raise usage(f"the file of {flag} is empty", str(path), "give a file that says something")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"is not UTF-8 text, from its byte {error.start + 1} on"
        raise usage(f"cannot read the file of {flag}", f"{path}: {why}", "give a file of UTF-8 text") from None


def output_fields(*, logit_bias: Sequence[str] | None, allowed_ids: str | None, **given: Any) -> "GenerateFields":
    """Fields of the same names; what is None, empty or False is left out. logit_bias: as ID=BIAS. allowed_ids: ids
    separated by commas or blanks. Raises CliError."""
    fields = {name: value for name, value in given.items() if not (value is None or value is False or value == [])}
    if logit_bias:
        fields["logit_bias"] = dict(map(_bias, logit_bias))
    if allowed_ids is not None:
        fields["allowed_token_ids"] = parse_ids(allowed_ids)
    return cast("GenerateFields", fields)


def _bias(word: str) -> tuple[int, float]:
    token, _, bias = word.partition("=")
    try:
        value = float(bias)
    except ValueError:
        value = math.nan
    token_id = _token_id(token)
    if token_id is None or not math.isfinite(value):
        raise usage("bad logit bias", f"--logit-bias is {shorten(word)}, not ID=BIAS", "write it as 151643=-100")
    return token_id, value


def parse_ids(text: str) -> list[int]:
    """Ids separated by commas or blanks. Raises CliError."""
    words = text.replace(",", " ").split()
    ids = [each for each in map(_token_id, words) if each is not None]
    if not ids or len(ids) < len(words):
        raise usage("bad token ids", f"{shorten(text)} is not a list of token ids", "write them as 1,2,3")
    return ids


def _token_id(word: str) -> int | None:
    return whole_number(word, least=0, most=UINT32)  # what a request has room for


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    """What the output must look like; see `cli.client.generate_options`."""

    json_schema: Annotated[
        Path | None,
        typer.Option(
            "--json-schema",
            help="File of a JSON schema that the output must satisfy.",
            parser=given_path,
            metavar=PATH,
        ),
    ] = None
    format_as_annotation: Annotated[
        bool, typer.Option("--format-as-annotation", help="Formats of the schema that are not known mean nothing.")
    ] = False
    json_object: Annotated[bool, typer.Option("--json-object", help="The output must be a JSON object.")] = False
    regex: Annotated[str | None, typer.Option("--regex", help="Regular expression that the output must match.")] = None
    ebnf: Annotated[
        Path | None,
        typer.Option(
            "--ebnf", help="File of a grammar (GBNF) that the output must be of.", parser=given_path, metavar=PATH
        ),
    ] = None
    choices: Annotated[
        list[str] | None, typer.Option("--choice", help="What the output may be; repeat for several.")
    ] = None


def check_shown(outputs: "OutputOptions") -> None:
    """Where no JSON is printed. Raises CliError for what only that has: it would be computed and not be seen."""
    for flag, is_given in (
        ("--logprobs", outputs.logprobs is not None),
        ("--prompt-logprobs", outputs.prompt_logprobs is not None),
        ("--return-prompt", outputs.return_prompt),
    ):
        if is_given:
            raise usage(f"{flag} is of --json", "only JSON has a place for it", "give --json too, or leave it out")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is sampled and what is told; see `cli.client.generate_options`."""

    num_outputs: Annotated[
        int | None,
        typer.Option(
            "--num-outputs", "-n", help="Outputs; all are printed when the last is complete.", min=1, max=UINT32
        ),
    ] = None
    min_tokens: Annotated[
        int | None, typer.Option("--min-tokens", help="No end before so many tokens.", min=0, max=UINT32)
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Leave what ended the text in it.")] = False
    typical_p: Annotated[
        float | None, typer.Option("--typical-p", help="Locally typical sampling, in (0, 1].", min=0, max=1)
    ] = None
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-word", help="Never in the output; repeat for several.")
    ] = None
    logit_bias: Annotated[
        list[str] | None, typer.Option("--logit-bias", help="ID=BIAS added to a token's logit; repeat for several.")
    ] = None
    allowed_ids: Annotated[str | None, typer.Option("--allowed-ids", help="Only these token ids, 1,2,3.")] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", help="Log-probabilities, and of so many likely tokens; with --json.", min=0, max=UINT32
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option("--prompt-logprobs", help="The same of the prompt; with --json.", min=0, max=UINT32)
    ] = None
    echo: Annotated[bool, typer.Option("--echo", help="Begin with the prompt.")] = False
    return_prompt: Annotated[
        bool, typer.Option("--return-prompt", help="Tell the rendered prompt and its ids; with --json.")
    ] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option("--truncate-prompt-tokens", help="Keep so many last tokens of the prompt.", min=1, max=UINT32),
    ] = None
