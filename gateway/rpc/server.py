"""The gRPC server: its options, and the ports that it binds."""

from enum import Enum

import grpc

from octavo.gateway.auth.tls import TlsListener
from octavo.gateway.config import GatewayConfig, PortSharing
from octavo.gateway.rpc.addresses import BindError, check_exposure

_SPARE_RPCS = 1024  # beside requests in flight: health watches, model listings, refusals

_MOST_PENDING = 1 << 14
"""Calls not taken in yet, some kilobytes each."""

INTERNAL_MAX_CONNECTIONS = 16  # of listeners that callers do not use: administration, status


class Callers(Enum):
    """Whose calls one connection has."""

    EACH = "each"  # one caller's, who may have so many at a time and waits with the others
    ALL = "all"  # everybody's, from the front for HTTP: to wait there would be out of every limit's and queue's sight


def server_options(
    config: GatewayConfig, *, max_connections: int, callers: Callers = Callers.EACH
) -> list[tuple[str, int]]:
    """Channel arguments of gRPC's C core (grpc/impl/channel_arg_names.h). max_connections: of each address that is
    listened at; those beyond are accepted and closed. callers: whose calls a connection has."""
    limits, connection = config.limits, config.connection
    max_streams = limits.max_streams_per_connection if callers is Callers.EACH else _max_rpcs(config)
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", limits.max_metadata_bytes // 2),  # above it refusals are likely …
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),  # … and above this one certain
        ("grpc.max_concurrent_streams", max_streams),
        # The client waits with calls beyond that number. The core would count ended ones that Python has not let go,
        # and reset those that take their place.
        ("grpc.http.overload_protection", 0),
        # Calls that came together and wait for the event loop; beyond these numbers it cancels them without a word.
        # What is too much for us is refused by name when its turn comes.
        ("grpc.server.max_pending_requests", _MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MOST_PENDING),
        ("grpc.keepalive_time_ms", _ms(connection.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _ms(connection.keepalive_timeout_s)),
        # A ping that measures bandwidth holds the keepalive's back, for a minute unless this says otherwise.
        ("grpc.http2.ping_timeout_ms", _ms(connection.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(connection.min_ping_interval_s)),
        ("grpc.http2.max_ping_strikes", connection.max_ping_strikes),
        ("grpc.server_handshake_timeout_ms", _ms(connection.handshake_timeout_s)),
        ("grpc.http2.settings_timeout", _ms(connection.settings_timeout_s)),
        # Without a call; a ping, or its acknowledgement, is none.
        ("grpc.max_connection_idle_ms", _ms(connection.max_idle_s)),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.so_reuseport", int(config.port_sharing is PortSharing.SHARED)),
    ]


def _max_rpcs(config: GatewayConfig) -> int:
    """That a server takes, on all connections."""
    return config.limits.max_requests + _SPARE_RPCS


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def new_server(
    config: GatewayConfig,
    *interceptors: grpc.aio.ServerInterceptor,
    max_connections: int = INTERNAL_MAX_CONNECTIONS,
    callers: Callers = Callers.EACH,
) -> grpc.aio.Server:
    """A server that is not started or bound yet. Call on the event loop that it will run on. interceptors: the
    outermost first. callers: whose calls a connection has."""
    server = grpc.aio.server(
        interceptors=interceptors,
        options=server_options(config, max_connections=max_connections, callers=callers),
        maximum_concurrent_rpcs=_max_rpcs(config),
    )
    # The library waits for every registered method anew at each request. By generic handlers, which servicers have too,
    # it finds the same methods and waits for one thing.
    server.add_registered_method_handlers = _register_nothing  # type: ignore[method-assign]
    return server


def _register_nothing(service_name: str, method_handlers: object) -> None:
    """In place of `grpc.aio.Server.add_registered_method_handlers`."""


def bind(server: grpc.aio.Server, config: GatewayConfig, address: str, tls: TlsListener | None, *, setting: str) -> str:
    """Listen; the address with the port that was bound. tls None: in plain text. setting: the flags that the address
    comes from, for messages. Raises AddressError, BindError."""
    if tls is None:
        check_exposure(address, config.exposure, setting=setting)
    try:
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.credentials)
    except RuntimeError as error:
        raise BindError(setting, address) from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
