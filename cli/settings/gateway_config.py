"""Turns settings into the gateway's frozen configuration: addresses, limits, TLS, access.

Only `check_access` reads files. Of models it knows the names alone.
"""

from pathlib import Path

from octavo.cli.errors import usage
from octavo.cli.settings.access import AccessSettings
from octavo.cli.settings.addresses import default_endpoint, endpoints_of, join_address, require_proofs
from octavo.cli.settings.groups import GatewaySettings, ServeSettings
from octavo.cli.settings.model_names import model_ports, name_of_model
from octavo.cli.settings.setting import expanded
from octavo.gateway.auth.authenticator import Scope
from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.config import (
    AccessConfig,
    ConnectionConfig,
    Dialects,
    Exposure,
    GatewayConfig,
    LogFormat,
    PageConfig,
    PeerConfig,
    PortSharing,
    ProcessLimits,
    RequestLimits,
    TlsConfig,
)
from octavo.gateway.rpc.addresses import check_exposure, check_plain
from octavo.gateway.workers.config import WorkerPoolConfig

NO_SCOPE = "none"


def access_config(settings: AccessSettings) -> AccessConfig:
    """The gateway's access configuration. Raises CliError for TLS settings that are incomplete, and for an unknown
    scope."""
    return AccessConfig(
        tls=_tls_config(settings),
        api_keys_file=settings.api_keys_file,
        public_scopes=_scopes(settings.public_scopes),
        prefix_salt_secret=settings.prefix_salt_secret,
    )


def check_access(settings: AccessSettings) -> None:
    """Load the access files once, so that errors in them are reported before anything starts. Raises CliError,
    AccessFileError."""
    AccessReloader(access_config(settings)).load()


def check_exposed(settings: ServeSettings) -> None:
    """Raises AddressError if other hosts could reach anything in plain text without --exposure insecure. A gateway
    would report that later, and name the chosen port."""
    exposure = Exposure(settings.exposure)
    check_plain(join_address(settings.metrics_host, settings.metrics_port), exposure, setting="--metrics-host")
    if settings.tls_cert_file is None:
        check_exposure(join_address(settings.host, settings.port), exposure, setting="--host")
        if settings.openai is not None:
            check_exposure(join_address(settings.openai_host, settings.openai), exposure, setting="--openai-host")


def _tls_config(settings: AccessSettings) -> TlsConfig | None:
    cert, key, authority = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert is None and key is None and authority is None:
        return None
    if cert is None or key is None:
        given = "--tls-cert-file" if cert else "--tls-key-file" if key else "--tls-client-ca-file"
        raise usage(
            "TLS needs a certificate and its key", f"only {given} is given", "give --tls-cert-file and --tls-key-file"
        )
    return TlsConfig(cert_file=cert, key_file=key, client_ca_file=authority)


def _scopes(words: tuple[str, ...]) -> tuple[str, ...]:
    if words == (NO_SCOPE,):
        return ()
    for word in words:
        if word not in list(Scope):
            raise usage("bad value for --public-scopes", f"there is no scope {word!r}", f"scopes: {', '.join(Scope)}")
    return words


def require_control_endpoint(settings: GatewaySettings | ServeSettings) -> None:
    """Raises CliError if other gateways are named, and nothing by which they reach this one."""
    if not settings.control_endpoint and (settings.peer_endpoint or settings.peer_endpoints_file):
        raise usage(
            f"{'--peer-endpoint' if settings.peer_endpoint else '--peer-endpoints-file'} needs --control-endpoint",
            "the other gateways could not reach those of this host",
            "give --control-endpoint tcp://host:port as well",
        )


def gateway_config(settings: GatewaySettings) -> GatewayConfig:
    """The gateway's configuration. Raises CliError for settings that are incomplete or exclude each other."""
    require_control_endpoint(settings)
    endpoints_of("--control-endpoint", [settings.control_endpoint] if settings.control_endpoint else [])
    endpoints_of("--peer-endpoint", settings.peer_endpoint)
    return GatewayConfig(
        workers=_pool_config(settings),
        expected_models=tuple(map(name_of_model, settings.expected_model)),
        peers=PeerConfig(
            endpoint=settings.control_endpoint,
            others=settings.peer_endpoint,
            others_file=settings.peer_endpoints_file,
            key_file=settings.gateway_key_file,
        ),
        listen_address=join_address(settings.host, settings.port),
        model_addresses=tuple(
            (name, join_address(settings.host, port)) for name, port in model_ports(settings.model_port)
        ),
        admin_address=None if settings.admin_port is None else join_address(settings.host, settings.admin_port),
        metrics_address=join_address(settings.metrics_host, settings.metrics_port),
        page=_page_config(settings),
        status_address=None if settings.status_socket is None else f"unix:{settings.status_socket.absolute()}",
        front_address=None if settings.front_socket is None else f"unix:{settings.front_socket.absolute()}",
        supervisor_address=None
        if settings.supervisor_socket is None
        else f"unix:{settings.supervisor_socket.absolute()}",
        exposure=Exposure(settings.exposure),
        access=access_config(settings),
        dialects=Dialects(settings.dialects),
        port_sharing=PortSharing(settings.port_sharing),
        limits=RequestLimits(
            max_message_bytes=settings.max_message_bytes,
            max_streams_per_connection=settings.max_streams_per_connection,
            max_requests=settings.max_requests,
            max_service_requests=settings.max_service_requests,
            max_prompt_bytes=settings.max_prompt_bytes,
            tokenizer_threads=settings.tokenizer_threads,
            pause_pending_tokens=settings.pause_pending_tokens,
            max_pending_tokens=settings.max_pending_tokens,
            write_stall_s=settings.write_stall_s,
            pushback_ms=settings.pushback_ms,
            grammar=settings.grammar_limits,
            constraint_timeout_s=settings.constraint_timeout_s,
            render=ProcessLimits(cpu_s=settings.template_cpu_s),
        ),
        connection=ConnectionConfig(
            keepalive_time_s=settings.keepalive_time_s,
            keepalive_timeout_s=settings.keepalive_timeout_s,
            max_idle_s=settings.max_connection_idle_s,
            max_connections=settings.max_connections,
            max_connections_per_peer=settings.max_connections_per_peer,
        ),
        drain_grace_s=settings.drain_grace_s,
        log_format=LogFormat(settings.log_format),
        log_level=settings.log_level,
    )


def _page_config(settings: GatewaySettings) -> PageConfig | None:
    if settings.page == "off" or (settings.page == "auto" and settings.page_port is None):
        return None
    return PageConfig(host=settings.page_host, port=settings.page_port, names=settings.page_name)


def _key_file(text: str) -> Path:
    try:
        return expanded(text)
    except ValueError as error:
        raise usage(
            "bad value for --allowed-worker-keys", f"{text!r}: {error}", "name a file of a public key"
        ) from None


def _pool_config(settings: GatewaySettings) -> WorkerPoolConfig:
    if settings.allowed_worker_keys and settings.gateway_key_file is None:
        raise usage(
            "--allowed-worker-keys needs --gateway-key-file",
            "a gateway without a key of its own asks no worker for one",
            "give both; `octavo keys new gateway` makes it",
        )
    has_key, has_token = settings.gateway_key_file is not None, bool(settings.registration_token)
    require_proofs("--worker-endpoint", settings.worker_endpoint, has_key=has_key, has_token=has_token)
    return WorkerPoolConfig(
        endpoints=settings.worker_endpoint or (default_endpoint(settings.run_dir),),
        registration_token=settings.registration_token,
        server_key_file=settings.gateway_key_file,
        allowed_key_files=tuple(map(_key_file, settings.allowed_worker_keys)),
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        max_migrations=settings.max_migrations,
        migration_timeout_s=settings.migration_timeout_s,
    )
