"""The commands around a service: verify, doctor, config, keys."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.options import with_settings
from cli.resolve import Resolved
from cli.settings import ALL_KEYS, AllSettings, ServeSettings

PANEL = "Tools"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("verify", rich_help_panel=PANEL)(verify)
    app.command("doctor", rich_help_panel=PANEL)(with_settings(ServeSettings, ALL_KEYS)(doctor))
    config = typer.Typer(help="What the settings are, and where they came from.", no_args_is_help=True)
    config.command("show")(with_settings(AllSettings, ALL_KEYS)(show))
    config.command("docs", hidden=True)(docs)
    app.add_typer(config, name="config", rich_help_panel=PANEL)
    keys = typer.Typer(help="Keys: CURVE for gateways and workers on different hosts, API keys for callers.",
                       no_args_is_help=True)  # fmt: skip
    keys.command("new")(new)
    keys.command("new-api")(new_api)
    app.add_typer(keys, name="keys", rich_help_panel=PANEL)


def verify(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, folio-chat, or Hugging Face id.")],
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; unset: the checkpoint's.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Attention backend; repeat; unset: all of them.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts to generate from.", min=1)] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate from each.", min=1)] = 32,
    check_numerics: Annotated[
        bool,
        typer.Option("--check-numerics", help="Instead name the first layer whose activations overflow or turn NaN."),
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(help="With --check-numerics: the largest magnitude; unset: half of what dtype holds."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Instead compare a GPTQ or AWQ checkpoint with the plain one it was made from.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Instead compare with the same weights rounded to int8 or fp8.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option("--kv-cache-dtype", help="Instead compare with a KV cache rounded to fp8.")
    ] = None,
) -> int:
    """Compare a checkpoint with transformers: RoPE, hidden states, logits, greedy tokens, for every backend."""
    from cli.verify import check_numerics as look
    from cli.verify import is_packed
    from cli.verify import rounding as run_rounding
    from cli.verify import verify as run

    if check_numerics:
        return look(model, revision=revision, dtype=dtype, limit=limit, num_prompts=prompts)
    if against or quantization or kv_cache_dtype or is_packed(model, revision=revision):
        return run_rounding(
            model,
            revision=revision,
            dtype=dtype,
            against=against,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            num_prompts=prompts,
            max_new_tokens=max_new_tokens,
        )
    return run(
        model,
        revision=revision,
        dtype=dtype,
        backends=backend or (),
        num_prompts=prompts,
        max_new_tokens=max_new_tokens,
    )


def doctor(resolved: Resolved[ServeSettings]) -> int:
    """Look whether this machine is ready: Python, packages, torch, devices, memory, ports, run directory."""
    from cli.doctor import doctor as run

    return run(resolved.settings)


def show(
    resolved: Resolved[AllSettings],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Every setting with its value and source. Takes every flag, to see what it would do."""
    from cli.config_show import show_config

    return show_config(resolved, as_json=json)


def docs() -> int:
    """Print docs/configuration.md."""
    from cli.config_docs import configuration_page

    print(configuration_page(), end="")  # noqa: T201
    return 0


def new(
    name: Annotated[str, typer.Argument(help="Name of the pair: NAME.key is secret, NAME.pub is for its peers.")],
    folder: Annotated[Path, typer.Option("--folder", help="Where to put them; made 0700 if new.")] = Path("keys"),
) -> int:
    """Make a CURVE key pair."""
    from wire.keys import generate_keys, save_keys

    secret, public = save_keys(generate_keys(), folder, name)
    print(f"{secret}  (secret: for its owner only)\n{public}  (for its peers)")  # noqa: T201
    return 0


def new_api(
    name: Annotated[str, typer.Argument(help="Name of the key, as the log will show it.")],
    file: Annotated[
        Path, typer.Option("--file", help="File of keys (--api-keys-file of the gateway); made 0600 if new.")
    ] = Path("keys/api-keys.toml"),
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose it is; unset: the name.")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="generate, models, health, reflection, admin; repeat; unset: the first two."),
    ] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="Until when, as 2027-01-31T00:00:00Z.")] = None,
) -> int:
    """Make an API key: its SHA-256 goes into the file, the key itself is printed once."""
    from cli.api_key import add_api_key

    key = add_api_key(name, file, tenant=tenant, scopes=scope or (), expires=expires)
    print(key)  # noqa: T201
    print(f"{file} has its SHA-256; the key itself is kept nowhere else", file=sys.stderr)  # noqa: T201
    return 0
