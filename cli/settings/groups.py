"""The settings of each command, composed of groups. Each setting is defined once, in one of the groups; its flag, its
variable OCTAVO_… and its key in octavo.toml are derived from its name."""

from pathlib import Path
from typing import Literal

from octavo.cli.settings.access import AccessSettings, CredentialSettings
from octavo.cli.settings.gateway import (
    AddressSettings,
    AdminPortSettings,
    LimitSettings,
    ListenSettings,
    PageSettings,
    PeerSettings,
    SupervisionSettings,
    WorkerEndpointSettings,
)
from octavo.cli.settings.model import (
    ConstraintCheckSettings,
    GrammarSettings,
    MemorySettings,
    ModelSettings,
    OracleSettings,
    SchedulingSettings,
)
from octavo.cli.settings.setting import INT32, MOST_SECONDS, UINT32, Host, Names, Settings, setting


class ProcessSettings(Settings):
    """Settings that every process of the service has."""

    run_dir: Path | None = setting(
        None, "Folder of the sockets between processes (0700); unset: serve makes a new one", panel="Process"
    )
    registration_token: str = setting(
        "", "Word that workers must give to gateways; set it through the environment; serve draws one", panel="Workers",
        secrecy="secret",
    )  # fmt: skip
    drain_grace_s: float = setting(
        30.0, "Seconds that requests in flight get at shutdown", panel="Faults", ge=0, le=MOST_SECONDS
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe log lines", panel="Process")
    log_format: Literal["auto", "console", "json"] = setting(
        "auto", "Log lines for people (console) or programs (json); auto looks at the terminal", panel="Process"
    )


class WorkerLinkSettings(Settings):
    """How a worker finds its gateways."""

    gateway_endpoint: Names = setting(
        (), "Gateways to connect to; unset: gateway-0.sock in the run directory", panel="Workers"
    )
    gateway_endpoints_file: Path | None = setting(
        None,
        "File with further gateways to connect to, an endpoint on each line; it is looked at twice a second, and "
        "gateways that it no longer lists are left",
        panel="Workers",
    )
    worker_id: str = setting("", "Name of this worker; unset: host name and process id", panel="Workers")
    worker_key_file: Path | None = setting(None, "Secret CURVE key of this worker, for tcp", panel="Workers")
    gateway_public_key_file: Path | None = setting(None, "Public CURVE key of the gateways, for tcp", panel="Workers")


class MetricsHostSettings(Settings):
    """Where /metrics is, on every process."""

    metrics_host: Host = setting("127.0.0.1", "Address of /metrics, of gateways and workers", panel="Watching")


class WorkerMetricsSettings(MetricsHostSettings):
    """Where a worker's /metrics and /ready are."""

    worker_metrics_port: int = setting(
        9091,
        "Port of the worker's /metrics; worker n of serve adds n; 0 takes a free one",
        panel="Watching",
        ge=0,
        le=65535,
    )


class WorkerWatchSettings(WorkerMetricsSettings):
    """What a worker reports about itself, and how it watches itself."""

    heartbeat_interval_s: float = setting(
        0.5, "Seconds between a worker's heartbeats", panel="Faults", gt=0, le=MOST_SECONDS
    )
    stall_exit_s: float = setting(
        40.0,
        "Seconds without a step, with work, after which a worker ends itself",
        panel="Faults",
        gt=0,
        le=MOST_SECONDS,
    )
    audit_every_steps: int = setting(
        1000,
        "Engine steps between two audits of pools up to 16,384 KV blocks, beside those without work; 0: no audits",
        panel="Watching",
        ge=0,
        le=INT32,
    )


class WorkerSettings(
    OracleSettings,
    WorkerWatchSettings,
    WorkerLinkSettings,
    ProcessSettings,
    GrammarSettings,
    SchedulingSettings,
    MemorySettings,
    ModelSettings,
):
    """`octavo worker`."""


class GatewaySettings(
    MetricsHostSettings,
    PageSettings,
    ProcessSettings,
    SupervisionSettings,
    ConstraintCheckSettings,
    LimitSettings,
    PeerSettings,
    WorkerEndpointSettings,
    AccessSettings,
    ListenSettings,
):
    """`octavo gateway`."""


class FrontAddressSettings(Settings):
    """Where OpenAI's HTTP interface is."""

    openai: int | None = setting(
        None,
        "Port of OpenAI's HTTP interface; 0 takes a free one; unset: not served",
        panel="Addresses",
        ge=0,
        le=65535,
    )
    openai_host: Host = setting("127.0.0.1", "Address of OpenAI's HTTP interface", panel="Addresses")


class FrontSettings(ProcessSettings, FrontAddressSettings):
    """`octavo openai`, which serve starts."""

    front_target: Names = setting((), "Where the gateways are", panel="Addresses", visibility="hidden")
    tls_cert_file: Path | None = setting(None, "Certificate chain (PEM); with it it speaks HTTPS", panel="Access")
    tls_key_file: Path | None = setting(None, "Key of that certificate (PEM)", panel="Access")
    max_message_bytes: int = setting(4 * 2**20, "Bytes of a request", panel="Limits", ge=1024, le=INT32)


class ServeSettings(
    FrontAddressSettings,
    OracleSettings,
    WorkerWatchSettings,
    PageSettings,
    ProcessSettings,
    SupervisionSettings,
    ConstraintCheckSettings,
    GrammarSettings,
    LimitSettings,
    PeerSettings,
    AccessSettings,
    ListenSettings,
    SchedulingSettings,
    MemorySettings,
    ModelSettings,
):
    """`octavo serve`."""

    cluster: str = setting(
        "",
        "Ray cluster whose hosts the workers run on: ray://HEAD, HOST:PORT of the head where this host is part of it, "
        "or auto for the one that runs here; unset: this host",
        panel="Service",
    )
    cluster_address: str = setting(
        "", "Address at which the cluster's hosts reach this one; unset: as Ray knows it", panel="Service"
    )
    cluster_gateways: int = setting(
        0,
        "Gateways on other hosts of the cluster beside those here, each on a host of its own where there are as many; "
        "callers reach each at its own address",
        panel="Service",
        ge=0,
        le=64,
    )
    autoscale: str = setting(
        "",
        "MIN:MAX: let the load choose the number of workers of each model, between these; unset: --workers, and what "
        "octavo scale asks for",
        panel="Service",
    )
    autoscale_queue_s: float = setting(
        2.0, "Seconds of waiting beyond which there shall be more workers", panel="Service", gt=0, le=MOST_SECONDS
    )
    autoscale_usage: float = setting(
        0.8, "Share of KV blocks, or of running outputs, beyond which there shall be more", panel="Service", gt=0, le=1
    )
    autoscale_up_s: float = setting(15.0, "Seconds between two steps up", panel="Service", ge=0, le=MOST_SECONDS)
    autoscale_down_s: float = setting(
        300.0, "Seconds of quiet before a worker goes, and between two that go", panel="Service", ge=0, le=MOST_SECONDS
    )
    workers: int = setting(1, "Workers of each model", panel="Service", ge=1, le=64)
    gateways: int | None = setting(
        None,
        "Gateway processes, all on one port; unset: 1 where the model computes on the CPU or on a cluster, one for "
        "every two cores, at most 8, where it has a GPU",
        panel="Service",
        ge=1,
        le=64,
    )
    startup_timeout_s: float = setting(
        600.0, "Seconds until the service must be ready", panel="Service", gt=0, le=MOST_SECONDS
    )

    @property
    def num_gateways(self) -> int:
        """Gateways on this host: as many as were asked for; 1 before `octavo serve` has chosen."""
        return self.gateways or 1


class CallSettings(CredentialSettings, AddressSettings):
    """Where a service is, and how a client authenticates."""


class ScaleSettings(AdminPortSettings, CallSettings):
    """`octavo scale`."""


class ModelNameSettings(Settings):
    """Which of a service's models is meant."""

    model_name: str = setting("", "Name of the served model; unset: the only one", panel="Request")


class RequestSettings(ModelNameSettings, CallSettings):
    """`octavo embed`: a request of any kind."""

    timeout_s: float | None = setting(
        None, "Deadline of a request in seconds; unset: none", panel="Request", gt=0, le=MOST_SECONDS
    )


class ClientSettings(RequestSettings):
    """`octavo chat` and `octavo generate`."""

    max_tokens: int | None = setting(
        None, "Tokens to generate at most; unset: to the end of the context", panel="Request", ge=1, le=UINT32
    )
    temperature: float | None = setting(None, "0 is greedy; unset: the model's default", panel="Request", ge=0, le=100)
    top_p: float | None = setting(None, "Keep the most probable tokens that reach this", panel="Request", gt=0, le=1)
    top_k: int | None = setting(
        None, "Keep this many most probable tokens; 0 keeps all", panel="Request", ge=0, le=UINT32
    )
    min_p: float | None = setting(
        None, "Drop tokens less probable than this times the best", panel="Request", ge=0, le=1
    )
    top_n_sigma: float | None = setting(
        None, "Drop tokens so many standard deviations below the best; 0 keeps all", panel="Request", ge=0, le=100
    )
    seed: int | None = setting(None, "The same seed gives the same tokens", panel="Request", ge=0, le=2**64 - 1)
    repetition_penalty: float | None = setting(
        None, "Divides logits of tokens seen; 1 is off", panel="Request", gt=0, le=100
    )
    stop: Names = setting((), "Text that ends the output; repeat for several", panel="Request")


class HealthSettings(WorkerMetricsSettings, ModelNameSettings, CallSettings):
    """`octavo health`."""


class AllSettings(ClientSettings, WorkerSettings, GatewaySettings, ServeSettings):
    """Every setting, for `octavo config show`."""

    front_target: Names = setting((), "Where the gateways are", panel="Addresses", visibility="hidden")


COMMANDS: dict[str, type[Settings]] = {
    "serve": ServeSettings,
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "client": ClientSettings,
}
"""The groups by the command that uses them; `client` stands for the commands that call a service, each of which uses
some of these settings."""

ALL_KEYS = frozenset(AllSettings.model_fields)
"""Every key that the configuration file may contain."""
