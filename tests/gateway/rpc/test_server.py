"""The options that the gRPC server is made with."""

from octavo.gateway.config import ConnectionConfig, GatewayConfig
from octavo.gateway.rpc.server import Callers, server_options
from octavo.gateway.workers.config import WorkerPoolConfig


def test_gateways_that_ping_idle_connections_are_not_sent_away() -> None:
    options = dict(server_options(GatewayConfig(workers=WorkerPoolConfig(endpoints=())), max_connections=9))
    names = ("min_ping_interval_without_data_ms", "max_ping_strikes", "max_pings_without_data")
    assert [options[f"grpc.http2.{name}"] for name in names] == [10_000, 0, 0]
    assert options["grpc.keepalive_permit_without_calls"] == 1


def test_every_option_of_the_connection_reaches_the_server() -> None:
    connection = ConnectionConfig(
        keepalive_time_s=1.5,
        keepalive_timeout_s=2.5,
        min_ping_interval_s=3.5,
        max_ping_strikes=4,
        handshake_timeout_s=5,
        settings_timeout_s=6,
        max_idle_s=7.5,
    )
    config = GatewayConfig(workers=WorkerPoolConfig(endpoints=()), connection=connection)
    options = dict(server_options(config, max_connections=9))
    assert options["grpc.keepalive_time_ms"] == 1500
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 2500
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 3500
    assert options["grpc.http2.max_ping_strikes"] == 4
    assert options["grpc.server_handshake_timeout_ms"] == 5000
    assert options["grpc.http2.settings_timeout"] == 6000
    assert options["grpc.max_connection_idle_ms"] == 7500
    assert options["grpc.max_allowed_incoming_connections"] == 9


def test_the_fronts_connection_takes_the_calls_of_all_of_its_callers() -> None:
    """What is beyond a connection's number waits in the client: no limit, queue or metric knows of it, and nobody
    passes it."""
    config = GatewayConfig(workers=WorkerPoolConfig(endpoints=()))
    each, everybody = (
        dict(server_options(config, max_connections=9, callers=callers))["grpc.max_concurrent_streams"]
        for callers in Callers
    )
    assert each == config.limits.max_streams_per_connection < config.limits.max_requests < everybody
