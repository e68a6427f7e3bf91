"""The commands that call a service: chat, generate, embed, cancel, models, health."""

from enum import StrEnum
from typing import Annotated

import typer

from octavo.cli.client.generate_options import ConstraintOptions, OutputOptions
from octavo.cli.errors import usage
from octavo.cli.help import PlainCommand
from octavo.cli.settings.groups import ALL_KEYS, CallSettings, ClientSettings, HealthSettings, RequestSettings
from octavo.cli.settings.options import with_settings
from octavo.cli.settings.resolve import Resolved

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
    app.command("chat", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(ClientSettings, ALL_KEYS)(chat))
    app.command("generate", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(ClientSettings, ALL_KEYS)(generate))
    app.command("embed", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(RequestSettings, ALL_KEYS)(embed))
    app.command("cancel", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(CallSettings, ALL_KEYS)(cancel))
    app.command("models", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(CallSettings, ALL_KEYS)(models))
    app.command("health", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(HealthSettings, ALL_KEYS)(health))


def chat(
    resolved: Resolved[ClientSettings],
    system: Annotated[str, typer.Option("--system", help="System message before the conversation.")] = "",
    receipt: Annotated[bool, typer.Option("--receipt", help="Print a line of figures after each answer.")] = False,
) -> int:
    """Talk to a model; /reset forgets, /exit ends, Ctrl-C stops an answer."""
    from octavo.cli.client.chat import chat as run

    return run(resolved.settings, system=system, shows_receipts=receipt)


def generate(
    resolved: Resolved[ClientSettings],
    *,
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt; - or nothing reads stdin.")] = None,
    as_: Annotated[
        InputKind | None,
        typer.Option("--as", help="text (the default) as it is, chat for one user message, ids for token ids 1,2,3."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The same as --as chat.")] = False,
    system: Annotated[str, typer.Option("--system", help="System message before a chat prompt.")] = "",
    constraint: ConstraintOptions,
    outputs: OutputOptions,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Print token ids; nothing is detokenized.")] = False,
    receipt: Annotated[bool, typer.Option("--receipt", help="Print where the time went, to stderr.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with text, ids, usage, receipt.")] = False,
) -> int:
    """Generate once, streaming to stdout."""
    from octavo.cli.client.generate import generate as run
    from octavo.cli.client.generate import prompt_fields, read_prompt
    from octavo.cli.client.generate_options import check_shown, constraint_fields, output_fields

    if chat and as_ not in (None, InputKind.CHAT):
        raise usage("the prompt is one thing", f"--chat and --as {as_} are two", "give one of them")
    if not json:
        check_shown(outputs)
    kind = InputKind.CHAT if chat else as_ or InputKind.TEXT
    fields = (
        prompt_fields(read_prompt(prompt or []), kind=kind.value, system=system)
        | constraint_fields(**vars(constraint))
        | output_fields(**vars(outputs))
    )
    output = "token_ids" if token_ids else "text_and_token_ids" if json else "text"
    return run(resolved.settings, fields, output=output, wants_receipt=receipt, wants_json=json)


def embed(
    resolved: Resolved[RequestSettings],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; - or nothing reads stdin, one a line.")] = None,
    pooling: Annotated[
        PoolingKind, typer.Option("--pooling", help="What becomes the vector.")
    ] = PoolingKind.LAST_TOKEN,
    raw: Annotated[bool, typer.Option("--raw", help="Leave vectors as long as they are, instead of length 1.")] = False,
) -> int:
    """Turn texts into vectors: one JSON object a line, with text, values and figures."""
    from octavo.cli.client.calls import embed as run
    from octavo.cli.client.calls import read_texts

    return run(resolved.settings, read_texts(texts or []), pooling=pooling.value, normalize=not raw)


def cancel(
    resolved: Resolved[CallSettings],
    request_id: Annotated[str, typer.Argument(help="Its id, as its caller chose it or x-request-id told it.")],
) -> int:
    """End a request of your own, at whichever gateway it runs; exit with 0 where it was in flight, else 1."""
    from octavo.cli.client.calls import cancel as run

    return run(resolved.settings, request_id)


def models(
    resolved: Resolved[CallSettings],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, with every field.")] = False,
) -> int:
    """List the models that a service has, with their limits."""
    from octavo.cli.client.calls import show_models

    return show_models(resolved.settings, as_json=json)


def health(
    resolved: Resolved[HealthSettings],
    live: Annotated[
        bool, typer.Option("--live", help="Only whether the gateway runs, with or without a worker.")
    ] = False,
    worker: Annotated[
        bool, typer.Option("--worker", help="Whether the worker at --worker-metrics-port is loaded and registered.")
    ] = False,
) -> int:
    """Exit with 0 where a service takes requests for all its models (or for --model-name), else 1; for probes of
    containers."""
    from octavo.cli.client.calls import gateway_health, worker_health

    if worker and (live or resolved.settings.model_name):
        other = "--live" if live else "--model-name"
        raise usage("a worker is asked one thing", f"--worker and {other} are given", "give one of them")
    if worker:
        return worker_health(resolved.settings)
    ready = "octavo.v1.InferenceService"
    if resolved.settings.model_name:
        ready = f"{ready}/{resolved.settings.model_name}"
    return gateway_health(resolved.settings, service="" if live else ready)
