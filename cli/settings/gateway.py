"""Settings of a gateway, shared by `octavo gateway` and `octavo serve`."""

from pathlib import Path
from typing import Literal

from octavo.cli.settings.setting import DAY_MS, INT32, MANY, MOST_SECONDS, Host, Names, Settings, setting


class AddressSettings(Settings):
    """Where the gRPC service is; servers and clients share these settings."""

    host: Host = setting("127.0.0.1", "Address of the gRPC service", panel="Addresses")
    port: int = setting(
        50051, "Port of the gRPC service; 0: serve and gateway take a free one", panel="Addresses", ge=0, le=65535
    )


class AdminPortSettings(Settings):
    """Where operators reach a gateway; servers and `octavo scale` share this setting."""

    admin_port: int | None = setting(
        None,
        "Port of AdminService (abort, load, audit, drain, scale) on --host; unset: not served",
        panel="Addresses",
        ge=0,
        le=65535,
    )


class ListenSettings(AdminPortSettings, AddressSettings):
    """Where callers reach the gateway."""

    exposure: Literal["loopback-only", "insecure"] = setting(
        "loopback-only", "insecure: allow addresses beyond loopback, in plain text", panel="Addresses"
    )
    dialects: Literal["installed", "none"] = setting(
        "installed",
        "Contracts of others on the same port: KServe, openengine, vLLM, VllmEngine if its stubs are there; or none",
        panel="Addresses",
    )
    model_port: Names = setting(
        (),
        "NAME=PORT: a further port, where callers who name no model mean NAME, as VllmEngine's callers; repeat",
        panel="Addresses",
    )
    metrics_port: int = setting(
        9090,
        "Port of the gateway's /metrics; gateway n of serve adds 100 n; 0 takes a free one",
        panel="Watching",
        ge=0,
        le=65535,
    )


class LimitSettings(Settings):
    """What callers may ask of one gateway process."""

    max_requests: int = setting(4096, "Outputs in flight, per gateway", panel="Limits", ge=1, le=MANY)
    max_service_requests: int | None = setting(
        None,
        "Outputs in flight at all gateways together, those of the others as they told them last; unset: any",
        panel="Limits",
        ge=1,
        le=MANY,
    )
    max_prompt_bytes: int = setting(
        2 * 2**20, "Bytes of a prompt's text or rendered chat", panel="Limits", ge=1, le=INT32
    )
    max_message_bytes: int = setting(4 * 2**20, "Bytes of a gRPC message", panel="Limits", ge=1024, le=INT32)
    max_streams_per_connection: int = setting(512, "Calls in flight on one connection", panel="Limits", ge=1, le=MANY)
    pause_pending_tokens: int = setting(
        512, "Tokens that a slow reader may leave unread before its output is paused", panel="Limits", ge=1, le=INT32
    )
    max_pending_tokens: int = setting(
        16384, "Tokens that a slow reader may leave unread before its stream ends", panel="Limits", ge=1, le=INT32
    )
    write_stall_s: float = setting(
        30.0, "Seconds that one message may wait for its reader", panel="Limits", gt=0, le=MOST_SECONDS
    )
    pushback_ms: int = setting(
        500, "Milliseconds after which refused callers are told to retry", panel="Limits", ge=0, le=DAY_MS
    )
    tokenizer_threads: int = setting(2, "Threads that tokenize, per gateway", panel="Limits", ge=1, le=1024)
    template_cpu_s: float = setting(
        2.0,
        "Seconds of CPU time that a checkpoint's template may take for one chat",
        panel="Limits",
        gt=0,
        le=MOST_SECONDS,
    )
    keepalive_time_s: float = setting(
        20.0, "Seconds of silence before a client is pinged", panel="Limits", gt=0, le=MOST_SECONDS
    )
    keepalive_timeout_s: float = setting(
        10.0, "Seconds to wait for the answer to a ping", panel="Limits", gt=0, le=MOST_SECONDS
    )
    max_connections: int | None = setting(
        None,
        "Callers' connections, per gateway; unset: what ulimit -n has room for, 8192 at most",
        panel="Limits",
        ge=1,
        le=MANY,
    )
    max_connections_per_peer: int | None = setting(
        None, "Connections of one address, per gateway; unset: half of all", panel="Limits", ge=1, le=MANY
    )
    max_connection_idle_s: float = setting(
        300.0, "Seconds without a call after which a connection is closed", panel="Limits", gt=0, le=MOST_SECONDS
    )


class SupervisionSettings(Settings):
    """When a gateway gives up a worker."""

    heartbeat_timeout_s: float = setting(
        5.0, "Seconds of silence after which a worker is lost", panel="Faults", gt=0, le=MOST_SECONDS
    )
    stall_timeout_s: float = setting(
        30.0, "Seconds without a step, with work, that end a worker", panel="Faults", gt=0, le=MOST_SECONDS
    )
    max_migrations: int = setting(
        3,
        "Times that an output goes on at another worker when its own is lost; 0: never",
        panel="Faults",
        ge=0,
        le=MANY,
    )
    migration_timeout_s: float = setting(
        60.0, "Seconds that such an output waits for a worker of its model", panel="Faults", gt=0, le=MOST_SECONDS
    )


class WorkerEndpointSettings(Settings):
    """Where workers reach the gateway."""

    worker_endpoint: Names = setting(
        (),
        "Where workers connect: ipc:///path or tcp://host:port; unset: gateway-0.sock in the run directory",
        panel="Workers",
    )
    expected_model: Names = setting(
        (),
        "Models that the service is to have, as --model of their workers names them; repeat; health is SERVING when "
        "all of them are ready, and their names are UNAVAILABLE until then; unset: whatever workers bring",
        panel="Workers",
    )
    allowed_worker_keys: Names = setting((), "Public CURVE key files of workers that may connect", panel="Workers")
    port_sharing: Literal["exclusive", "shared"] = setting(
        "exclusive", "shared: several gateways of this host listen on one port", panel="Addresses"
    )


class PeerSettings(Settings):
    """The other gateways of a service with several; `octavo serve` sets these for its own."""

    gateway_key_file: Path | None = setting(
        None, "Secret CURVE key of the gateway (octavo keys new); tcp endpoints need it", panel="Workers"
    )
    control_endpoint: str = setting(
        "",
        "Where the other gateways of the service reach this one: ipc:///path, or tcp://host:port with "
        "--gateway-key-file, one pair for all of them (gateway n of serve adds n to the port); unset: it is the only "
        "one, or serve's are the only ones",
        panel="Gateways",
    )
    peer_endpoint: Names = setting(
        (),
        "Control endpoints of the other gateways; repeat; its own may be among them; a host name stands for all of its "
        "addresses and is looked up every five seconds",
        panel="Gateways",
    )
    peer_endpoints_file: Path | None = setting(
        None,
        "File with further such endpoints, one on each line; it is looked at twice a second, and gateways that it no "
        "longer lists are left once they are silent",
        panel="Gateways",
    )


class PageSettings(Settings):
    """The live page."""

    page: Literal["auto", "on", "off"] = setting(
        "auto",
        "Live page of the service, over HTTP; auto: serve has one, octavo gateway where --page-port is given",
        panel="Watching",
    )
    page_port: int | None = setting(
        None,
        "Port of the live page, which the first gateway of serve has; 0 takes a free one; unset: 50080, or a free one "
        "where that is busy",
        panel="Watching",
        ge=0,
        le=65535,
    )
    page_host: Host = setting("127.0.0.1", "Address of the live page", panel="Watching")
    page_name: Names = setting(
        (), "Host name by which browsers reach the live page, beside addresses and localhost; repeat", panel="Watching"
    )
