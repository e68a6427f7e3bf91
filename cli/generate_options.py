"""Options of `octavo generate` that become fields of the request, in groups: each attribute is an option."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    """What the output must look like; see `cli.constraint_fields`."""

    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="File of a JSON schema that the output must satisfy.")
    ] = None
    format_as_annotation: Annotated[
        bool, typer.Option("--format-as-annotation", help="Formats of the schema that are not known mean nothing.")
    ] = False
    json_object: Annotated[bool, typer.Option("--json-object", help="The output must be a JSON object.")] = False
    regex: Annotated[str, typer.Option("--regex", help="Regular expression that the output must match.")] = ""
    ebnf: Annotated[
        Path | None, typer.Option("--ebnf", help="File of a grammar (GBNF) that the output must be of.")
    ] = None
    choices: Annotated[
        list[str] | None, typer.Option("--choice", help="What the output may be; repeat for several.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is sampled and what is told; see `cli.output_fields`."""

    num_outputs: Annotated[
        int | None, typer.Option("--num-outputs", "-n", help="Outputs; each is printed when it is complete.")
    ] = None
    min_tokens: Annotated[int | None, typer.Option("--min-tokens", help="No end before so many tokens.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Leave what ended the text in it.")] = False
    typical_p: Annotated[float | None, typer.Option("--typical-p", help="Locally typical sampling, in (0, 1].")] = None
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-word", help="Never in the output; repeat for several.")
    ] = None
    logit_bias: Annotated[
        list[str] | None, typer.Option("--logit-bias", help="ID=BIAS added to a token's logit; repeat for several.")
    ] = None
    allowed_ids: Annotated[str, typer.Option("--allowed-ids", help="Only these token ids, 1,2,3.")] = ""
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Log-probabilities, and of so many likely tokens; with --json.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option("--prompt-logprobs", help="The same of the prompt; with --json.")
    ] = None
    echo: Annotated[bool, typer.Option("--echo", help="Begin with the prompt.")] = False
    return_prompt: Annotated[
        bool, typer.Option("--return-prompt", help="Tell the rendered prompt and its ids; with --json.")
    ] = False
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option("--truncate-prompt-tokens", help="Keep so many last tokens of the prompt.")
    ] = None
