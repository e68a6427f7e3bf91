"""The gRPC server: its options, and the ports that it binds."""

from enum import Enum

import grpc

from octavo.gateway.auth.tls import TlsListener
from octavo.gateway.config import GatewayConfig, PortSharing
from octavo.gateway.rpc.addresses import BindError, check_exposure

_SPARE_RPCS = 1024  # room besides requests in flight: health watches, model listings, refusals

_MOST_PENDING = 1 << 14
"""Calls not taken in yet, some kilobytes each."""

INTERNAL_MAX_CONNECTIONS = 16  # for listeners that callers do not use: administration, status


class Callers(Enum):
    """Whose calls one connection carries."""

    EACH = "each"  # one caller's, who may have so many at a time and waits with the others
    ALL = "all"  # everybody's, from the front for HTTP: to wait there would be out of every limit's and queue's sight


def server_options(
    config: GatewayConfig, *, max_connections: int, callers: Callers = Callers.EACH
) -> list[tuple[str, int]]:
    """Channel arguments of gRPC's C core (grpc/impl/channel_arg_names.h). max_connections: per listening address; more
    are accepted and closed. callers: whose calls a connection carries."""
    limits, connection = config.limits, config.connection
    max_streams = limits.max_streams_per_connection if callers is Callers.EACH else _max_rpcs(config)
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", limits.max_metadata_bytes // 2),  # above it refusals are likely …
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),  # … and above this one certain
        ("grpc.max_concurrent_streams", max_streams),
        # Clients hold back calls beyond that number. The core would count ended calls that Python still references,
        # and reset those that take their place.
        ("grpc.http.overload_protection", 0),
        # Calls that arrive together and wait for the event loop; beyond these numbers the core cancels them silently.
        # Calls that exceed our own limits are refused with a reason when their turn comes.
        ("grpc.server.max_pending_requests", _MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MOST_PENDING),
        ("grpc.keepalive_time_ms", _ms(connection.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _ms(connection.keepalive_timeout_s)),
        # A bandwidth-probing ping delays keepalive pings, by a minute unless this says otherwise.
        ("grpc.http2.ping_timeout_ms", _ms(connection.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(connection.min_ping_interval_s)),
        ("grpc.http2.max_ping_strikes", connection.max_ping_strikes),
        ("grpc.server_handshake_timeout_ms", _ms(connection.handshake_timeout_s)),
        ("grpc.http2.settings_timeout", _ms(connection.settings_timeout_s)),
        # Time without a call; pings and their acknowledgements do not count.
        ("grpc.max_connection_idle_ms", _ms(connection.max_idle_s)),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.so_reuseport", int(config.port_sharing is PortSharing.SHARED)),
    ]


def _max_rpcs(config: GatewayConfig) -> int:
    """RPCs that a server accepts at once, over all connections."""
    return config.limits.max_requests + _SPARE_RPCS


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def new_server(
    config: GatewayConfig,
    *interceptors: grpc.aio.ServerInterceptor,
    max_connections: int = INTERNAL_MAX_CONNECTIONS,
    callers: Callers = Callers.EACH,
) -> grpc.aio.Server:
    """A server that is neither bound nor started yet; call it on the event loop that will run the server. interceptors:
    outermost first. callers: whose calls a connection carries."""
    server = grpc.aio.server(
        interceptors=interceptors,
        options=server_options(config, max_connections=max_connections, callers=callers),
        maximum_concurrent_rpcs=_max_rpcs(config),
    )
    # The library keeps a pending request for every registered method. With generic handlers, which servicers register
    # too, it finds the same methods and keeps a single one.
    server.add_registered_method_handlers = _register_nothing  # type: ignore[method-assign]
    return server


def _register_nothing(service_name: str, method_handlers: object) -> None:
    """Replaces `grpc.aio.Server.add_registered_method_handlers`, so that only generic handlers are used."""


def bind(server: grpc.aio.Server, config: GatewayConfig, address: str, tls: TlsListener | None, *, setting: str) -> str:
    """Bind an address; returns it with the actual port. tls None: plain text. setting: the flags that the address comes
    from, for messages. Raises AddressError, BindError."""
    if tls is None:
        check_exposure(address, config.exposure, setting=setting)
    try:
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.credentials)
    except RuntimeError as error:
        raise BindError(setting, address) from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
