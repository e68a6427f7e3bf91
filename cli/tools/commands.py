"""The commands around a service: top, ps, scale, pull, tour, sizing, verify, doctor, config, keys."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.errors import usage
from octavo.cli.help import PlainCommand, PlainGroup
from octavo.cli.settings.access import CredentialSettings
from octavo.cli.settings.addresses import split_address
from octavo.cli.settings.groups import ALL_KEYS, AllSettings, CallSettings, ClientSettings, ScaleSettings, ServeSettings
from octavo.cli.settings.model_names import check_revision
from octavo.cli.settings.options import PATH, given_path, with_settings
from octavo.cli.settings.resolve import Resolved, Source
from octavo.wire.host import let_threads_sleep

PANEL = "Tools"
WATCH_PANEL = "Watch a service"
TOUR_PANEL = "Call a service"  # where people look for it
AS_SERVED = "As served"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("tour", cls=PlainCommand, rich_help_panel=TOUR_PANEL)(with_settings(ServeSettings, ALL_KEYS)(tour))
    app.command("top", cls=PlainCommand, rich_help_panel=WATCH_PANEL)(with_settings(CallSettings, ALL_KEYS)(top))
    app.command("ps", cls=PlainCommand, rich_help_panel=WATCH_PANEL)(with_settings(CallSettings, ALL_KEYS)(ps))
    app.command("scale", cls=PlainCommand, rich_help_panel=WATCH_PANEL)(with_settings(ScaleSettings, ALL_KEYS)(scale))
    app.command("pull", cls=PlainCommand, rich_help_panel=PANEL)(pull)
    app.command("sizing", cls=PlainCommand, rich_help_panel=PANEL)(sizing)
    app.command("verify", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(CredentialSettings, ALL_KEYS)(verify))
    app.command("doctor", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(ServeSettings, ALL_KEYS)(doctor))
    config = typer.Typer(cls=PlainGroup, help="What the settings are, and where they came from.", no_args_is_help=True)
    config.command("show", cls=PlainCommand)(with_settings(AllSettings, ALL_KEYS)(show))
    config.command("docs", cls=PlainCommand, hidden=True)(docs)
    app.add_typer(config, name="config", rich_help_panel=PANEL)
    about = "Keys: CURVE for gateways and workers on different hosts, API keys for callers."
    keys = typer.Typer(cls=PlainGroup, help=about, no_args_is_help=True)
    keys.command("new", cls=PlainCommand)(new)
    keys.command("new-api", cls=PlainCommand)(new_api)
    app.add_typer(keys, name="keys", rich_help_panel=PANEL)


def tour(resolved: Resolved[ServeSettings]) -> int:
    """Start a service, ask three questions, show receipts, metrics and a live page, stop it. Takes serve's options."""
    from octavo.cli.tools.tour import tour as run

    return run(resolved.settings)


def top(
    resolved: Resolved[CallSettings],
    interval_s: Annotated[
        float, typer.Option("--interval-s", help="Seconds between snapshots.", min=0.2, max=60)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one plain snapshot, as into a pipe.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON.")] = False,
) -> int:
    """Watch a service: workers with their KV blocks, queues, rates, TTFT, requests now, tenants. q quits.

    Keys sort the requests: a age, o output, p prompt, b blocks, s state, t tenant, w worker; r turns the order round.
    """
    from octavo.cli.tools.top import top as run

    return run(resolved.settings, interval_s=interval_s, once=once, as_json=json)


def ps(
    resolved: Resolved[CallSettings],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each service, a line each.")] = False,
) -> int:
    """List what serves on this machine: processes, models, state, requests now; with --host or --port, what is there.

    Of this user's services: `octavo serve` tells of itself in the run directory of its user.
    """
    from octavo.cli.tools.ps import show_local, show_remote

    return show_remote(resolved.settings, as_json=json) if _names_address(resolved) else show_local(as_json=json)


def _names_address(resolved: Resolved[Any]) -> bool:
    """Whether a service is meant by its address."""
    return any(resolved.origins[name].source is not Source.DEFAULT for name in ("host", "port"))


def scale(
    resolved: Resolved[ScaleSettings],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] WORKERS",
            help="Two words, the model and how many; the model may be left out where there is one.",
        ),
    ] = None,
    cluster_gateways: Annotated[
        int | None,
        typer.Option(
            "--cluster-gateways", help="Gateways on other hosts of the cluster that there shall be.", min=0, max=64
        ),
    ] = None,
) -> int:
    """Change how many workers a model of a running service has; those that go finish or hand over what they have.

    Of the service that this user runs here, the one at --host and --port where there are several; with --admin-port of
    the one there. With --cluster-gateways the number of gateways on other hosts, where a service was started with some.
    """
    from octavo.cli.tools.scale import scale as run

    return run(resolved.settings, words or [], cluster_gateways, is_named=_names_address(resolved))


def pull(
    model: Annotated[str, typer.Argument(help="Hugging Face id, checkpoint folder, or folio-chat.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None,
) -> int:
    """Download a checkpoint, or what is missing of it, to where serve looks for it; prints the folder.

    HF_HOME is where it goes, HF_ENDPOINT names another hub, HF_TOKEN opens gated models.
    """
    from octavo.cli.tools.pull import pull as run

    check_revision([model], revision)
    return run(model, revision=revision)


def sizing(
    models: Annotated[
        list[str] | None, typer.Argument(help="Published names, checkpoint folders or ids; unset: all published.")
    ] = None,
    memory: Annotated[
        list[float] | None,
        typer.Option(help="GiB of one device; repeat; unset: 16, 24, 48, 80, 141.", min=0.1, max=1e6),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a stream, prompt and output together; unset: 4096, or what the shortest model takes.",
            min=1,
            max=2**24,
        ),
    ] = None,
    quantization: Annotated[str, typer.Option(help="none, int8, fp8 or int8-weights, as of serve.")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="auto or fp8, as of serve.")] = "auto",
    memory_fraction: Annotated[float, typer.Option(help="As of serve.", min=0.05, max=1.0)] = 0.9,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """How many streams of a context fit beside a model into a device's memory; downloads nothing, asks no device."""
    from octavo.cli.tools.sizing import Asked
    from octavo.cli.tools.sizing import sizing as run

    if markdown and json:
        raise usage("a table has one form", "--markdown and --json are given", "give one of them")
    for name, value, words in (
        ("quantization", quantization, ("none", "int8", "fp8", "int8-weights")),
        ("kv-cache-dtype", kv_cache_dtype, ("auto", "fp8")),
    ):
        if value not in words:
            raise usage(f"bad value for --{name}", f"--{name} is {value!r}", f"give one of {', '.join(words)}")
    asked = Asked(
        memory_gib=tuple(dict.fromkeys(memory)) if memory else Asked().memory_gib,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        memory_fraction=memory_fraction,
    )
    return run(models or (), asked, context=context, form="json" if json else "markdown" if markdown else "table")


# The options of `verify`. The first ones say what a worker would be told, and are named as its flags are.
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=AS_SERVED)]
_Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float16 or float32; unset: the checkpoint's.", rich_help_panel=AS_SERVED)
]
_Quantization = Annotated[
    str | None, typer.Option(help="Weights rounded to int8, fp8 or int8-weights.", rich_help_panel=AS_SERVED)
]
_CacheDtype = Annotated[str | None, typer.Option("--kv-cache-dtype", help="A cache of fp8.", rich_help_panel=AS_SERVED)]
_Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The deterministic mode.", rich_help_panel=AS_SERVED)
]
_AttentionBackend = Annotated[
    str | None, typer.Option(help="reference or sdpa; unset: as served.", rich_help_panel=AS_SERVED)
]
_ModelLen = Annotated[
    int | None,
    typer.Option(help="End of the context; unset: the model's.", min=8, max=2**24, rich_help_panel=AS_SERVED),
]
_Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1, max=1024, rich_help_panel=AS_SERVED)]
_Ranks = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", help="Processes with a part each.", min=1, max=64, rich_help_panel=AS_SERVED
    ),
]
_Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")]
_Backends = Annotated[
    list[str] | None, typer.Option(help="Attention backend of the layers' comparison; repeat; unset: all.")
]
_Prompts = Annotated[int, typer.Option(help="Prompts to generate from.", min=1, max=1024)]
_NewTokens = Annotated[int, typer.Option(help="Tokens to generate from each.", min=1, max=65_536)]
_Address = Annotated[
    str | None, typer.Option(help="Instead ask the service at HOST:PORT, which serves this checkpoint.")
]
_ModelName = Annotated[str, typer.Option(help="With --address: name of the served model; unset: the only one.")]
_CheckNumerics = Annotated[
    bool, typer.Option("--check-numerics", help="Instead name the first layer whose activations overflow or turn NaN.")
]
_Limit = Annotated[
    float | None, typer.Option(help="With --check-numerics: the largest magnitude; unset: half of what dtype holds.")
]
_Rounding = Annotated[
    bool, typer.Option("--rounding", help="Instead tell what --quantization and --kv-cache-dtype cost.")
]
_Against = Annotated[
    str | None, typer.Option(help="Instead compare a GPTQ or AWQ checkpoint with the plain one it was made from.")
]


def verify(
    resolved: Resolved[CredentialSettings],
    model: Annotated[str, typer.Argument(help="Checkpoint folder, folio-chat, or Hugging Face id.")],
    device: _Device = "auto",
    dtype: _Dtype = None,
    quantization: _Quantization = None,
    kv_cache_dtype: _CacheDtype = None,
    deterministic: _Deterministic = False,
    attention_backend: _AttentionBackend = None,
    max_model_len: _ModelLen = None,
    num_threads: _Threads = None,
    tensor_parallel_size: _Ranks = 1,
    revision: _Revision = None,
    backend: _Backends = None,
    prompts: _Prompts = 8,
    max_new_tokens: _NewTokens = 16,
    address: _Address = None,
    model_name: _ModelName = "",
    check_numerics: _CheckNumerics = False,
    limit: _Limit = None,
    rounding: _Rounding = False,
    against: _Against = None,
) -> int:
    """Compare a checkpoint, as a worker serves it, with transformers; or a running service (--address).

    Loads and runs as `octavo worker` with the same flags does, and once more in float32; positions go to the end of
    the context. Limits are in units of transformers' own error in the served type.
    """
    let_threads_sleep()
    from octavo.cli.tools.verify import Served, check_instead
    from octavo.cli.tools.verify import check_numerics as look
    from octavo.cli.tools.verify import rounding as run_rounding
    from octavo.cli.tools.verify import verify as run
    from octavo.worker.config import Deterministic

    served = Served(
        model=model,
        revision=revision,
        device=device,
        dtype=None if dtype == "auto" else dtype,
        quantization=None if quantization == "none" else quantization,
        kv_cache_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
        deterministic=Deterministic.ON if deterministic else Deterministic.OFF,
        attention_backend=None if attention_backend == "auto" else attention_backend,
        max_model_len=max_model_len,
        num_threads=num_threads,
        tensor_parallel_size=tensor_parallel_size,
    )
    check_revision([model], revision)
    if limit is not None and not check_numerics:
        raise usage("--limit is of --check-numerics", f"--limit is {limit:g}", "give both, or neither")
    if model_name and address is None:
        raise usage("--model-name is of --address", f"--model-name is {model_name}", "give both, or neither")
    instead = {"--address": address is not None, "--check-numerics": check_numerics}
    instead |= {"--against": against is not None, "--rounding": rounding and against is None}
    if chosen := [flag for flag, is_chosen in instead.items() if is_chosen]:
        check_instead(served, chosen)
    if check_numerics:
        return look(model, revision=revision, dtype=served.dtype, limit=limit, num_prompts=prompts)
    if rounding or against is not None:
        return run_rounding(served, against=against, num_prompts=prompts, max_new_tokens=max_new_tokens)
    if address is not None:
        from octavo.cli.explain import explain
        from octavo.cli.tools.verify_service import verify_service
        from octavo.client.errors import OctavoError

        host, port = split_address(address)
        settings = ClientSettings(**resolved.settings.model_dump(), host=host, port=port, model_name=model_name)
        try:
            return verify_service(settings, served, num_prompts=prompts, max_new_tokens=max_new_tokens)
        except OctavoError as error:
            raise explain(error, address="--address") from error
    return run(served, backends=backend or (), num_prompts=prompts, max_new_tokens=max_new_tokens)


def doctor(resolved: Resolved[ServeSettings]) -> int:
    """Look whether this machine is ready: packages, torch, devices, models, memory, disk, compiler, ports.

    The exit code is 1 where something is missing that serving with these options needs.
    """
    from octavo.cli.tools.doctor import doctor as run

    return run(resolved.settings)


def show(
    resolved: Resolved[AllSettings],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Every setting with its value and source. Takes every flag, to see what it would do."""
    from octavo.cli.settings.config_show import show_config

    return show_config(resolved, as_json=json)


def docs() -> int:
    """Print docs/configuration.md."""
    from octavo.cli.settings.config_show import configuration_page

    print(configuration_page(), end="")  # noqa: T201
    return 0


def new(
    name: Annotated[str, typer.Argument(help="Name of the pair: NAME.key is secret, NAME.pub is for its peers.")],
    folder: Annotated[
        Path, typer.Option("--folder", help="Where to put them; made 0700 if new.", parser=given_path, metavar=PATH)
    ] = Path("keys"),
) -> int:
    """Make a CURVE key pair."""
    from octavo.cli.errors import CliError
    from octavo.wire.keys import KeyFileError, generate_keys, save_keys

    try:
        secret, public = save_keys(generate_keys(), folder, name)
    except (KeyFileError, OSError) as error:  # of a command that makes some it is no wrong setting
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise CliError("the keys cannot be written", why, "give another name or --folder") from None
    print(f"{secret}  (secret: for its owner only)\n{public}  (for its peers)")  # noqa: T201
    return 0


def new_api(
    name: Annotated[str, typer.Argument(help="Name of the key, as the log will show it.")],
    file: Annotated[
        Path,
        typer.Option(
            "--file",
            help="File of keys (--api-keys-file of the gateway); made 0600 if new.",
            parser=given_path,
            metavar=PATH,
        ),
    ] = Path("keys/api-keys.toml"),
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose it is; unset: the name.")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="generate, models, health, reflection, admin; repeat; unset: the first two."),
    ] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="Until when, as 2027-01-31T00:00:00Z.")] = None,
) -> int:
    """Make an API key: its SHA-256 goes into the file, the key itself is printed once."""
    from octavo.cli.tools.api_key import add_api_key

    key = add_api_key(name, file, tenant=tenant, scopes=scope or (), expires=expires)
    print(key)  # noqa: T201
    print(f"{file} has its SHA-256; the key itself is kept nowhere else", file=sys.stderr)  # noqa: T201
    return 0
