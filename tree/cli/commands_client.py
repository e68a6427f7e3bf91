"""The commands that call a service: chat, generate, embed, models, health, tour."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.options import with_settings
from cli.resolve import Resolved
from cli.settings import ALL_KEYS, ClientSettings, ServeSettings

PANEL = "Call a service"


class InputKind(StrEnum):
    """What the prompt of `octavo generate` is."""

    TEXT = "text"
    CHAT = "chat"
    IDS = "ids"


class PoolingKind(StrEnum):
    """What of the last hidden state becomes a vector."""

    LAST_TOKEN = "last_token"
    MEAN = "mean"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("chat", rich_help_panel=PANEL)(with_settings(ClientSettings, ALL_KEYS)(chat))
    app.command("generate", rich_help_panel=PANEL)(with_settings(ClientSettings, ALL_KEYS)(generate))
    app.command("embed", rich_help_panel=PANEL)(with_settings(ClientSettings, ALL_KEYS)(embed))
    app.command("models", rich_help_panel=PANEL)(with_settings(ClientSettings, ALL_KEYS)(models))
    app.command("health", rich_help_panel=PANEL)(with_settings(ClientSettings, ALL_KEYS)(health))
    app.command("tour", rich_help_panel=PANEL)(with_settings(ServeSettings, ALL_KEYS)(tour))


def chat(
    resolved: Resolved[ClientSettings],
    system: Annotated[str, typer.Option("--system", help="System message before the conversation.")] = "",
    receipt: Annotated[bool, typer.Option("--receipt", help="Print a line of figures after each answer.")] = False,
) -> int:
    """Talk to a model; /reset forgets, /exit ends, Ctrl-C stops an answer."""
    from cli.chat import chat as run

    return run(resolved.settings, system=system, shows_receipts=receipt)


def generate(
    resolved: Resolved[ClientSettings],
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt; - or nothing reads stdin.")] = None,
    as_: Annotated[
        InputKind, typer.Option("--as", help="text as it is, chat for one user message, ids for token ids 1,2,3.")
    ] = InputKind.TEXT,
    chat: Annotated[bool, typer.Option("--chat", help="The same as --as chat.")] = False,
    system: Annotated[str, typer.Option("--system", help="System message before a chat prompt.")] = "",
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="File of a JSON schema that the output must satisfy.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="The output must be a JSON object.")] = False,
    regex: Annotated[str, typer.Option("--regex", help="Regular expression that the output must match.")] = "",
    ebnf: Annotated[
        Path | None, typer.Option("--ebnf", help="File of a grammar (GBNF) that the output must be of.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option("--choice", help="What the output may be; repeat for several.")
    ] = None,
    num_outputs: Annotated[
        int | None, typer.Option("--num-outputs", "-n", help="Outputs; each is printed when it is complete.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option("--min-tokens", help="No end before so many tokens.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Leave what ended the text in it.")] = False,
    typical_p: Annotated[float | None, typer.Option("--typical-p", help="Locally typical sampling, in (0, 1].")] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option("--bad-word", help="Never in the output; repeat for several.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option("--logit-bias", help="ID=BIAS added to a token's logit; repeat for several.")
    ] = None,
    allowed_ids: Annotated[str, typer.Option("--allowed-ids", help="Only these token ids, 1,2,3.")] = "",
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Log-probabilities, and of so many likely tokens; with --json.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option("--prompt-logprobs", help="The same of the prompt; with --json.")
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Begin with the prompt.")] = False,
    return_prompt: Annotated[
        bool, typer.Option("--return-prompt", help="Tell the rendered prompt and its ids; with --json.")
    ] = False,
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option("--truncate-prompt-tokens", help="Keep so many last tokens of the prompt.")
    ] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Print token ids; nothing is detokenized.")] = False,
    receipt: Annotated[bool, typer.Option("--receipt", help="Print where the time went, to stderr.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with text, ids, usage, receipt.")] = False,
) -> int:
    """Generate once, streaming to stdout."""
    from cli.constraint_fields import constraint_fields
    from cli.generate import generate as run
    from cli.generate import prompt_fields, read_prompt
    from cli.output_fields import output_fields

    kind = InputKind.CHAT if chat else as_
    constraint = constraint_fields(
        json_schema=json_schema, json_object=json_object, regex=regex, ebnf=ebnf, choices=choice or ()
    )
    wishes = output_fields(
        num_outputs=num_outputs,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        include_stop=include_stop,
        typical_p=typical_p,
        bad_words=bad_word or [],
        logit_bias=logit_bias or [],
        allowed_ids=allowed_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        return_prompt=return_prompt,
        truncate_prompt_tokens=truncate_prompt_tokens,
    )
    fields = prompt_fields(read_prompt(prompt or []), kind=kind.value, system=system) | constraint | wishes
    output = "token_ids" if token_ids else "text_and_token_ids" if json else "text"
    return run(resolved.settings, fields, output=output, wants_receipt=receipt, wants_json=json)


def embed(
    resolved: Resolved[ClientSettings],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; - or nothing reads stdin, one a line.")] = None,
    pooling: Annotated[
        PoolingKind, typer.Option("--pooling", help="What becomes the vector.")
    ] = PoolingKind.LAST_TOKEN,
    raw: Annotated[bool, typer.Option("--raw", help="Leave vectors as long as they are, instead of length 1.")] = False,
) -> int:
    """Turn texts into vectors: one JSON object a line, with text, values and figures."""
    from cli.embed import embed as run
    from cli.embed import read_texts

    return run(resolved.settings, read_texts(texts or []), pooling=pooling.value, normalize=not raw)


def models(resolved: Resolved[ClientSettings]) -> int:
    """List the models that a service has, with their limits."""
    from cli.models import show_models

    return show_models(resolved.settings)


def health(
    resolved: Resolved[ClientSettings],
    live: Annotated[
        bool, typer.Option("--live", help="Only whether the gateway runs, with or without a worker.")
    ] = False,
) -> int:
    """Exit with 0 where a service takes requests, else 1; for probes of containers."""
    from cli.health import health as run

    return run(resolved.settings, service="" if live else "octavo.v1.InferenceService")


def tour(resolved: Resolved[ServeSettings]) -> int:
    """Start a service, ask three questions, show receipts and metrics, stop it. Takes the options of serve."""
    from cli.tour import tour as run

    return run(resolved.settings)
