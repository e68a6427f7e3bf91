"""The HTTP endpoint that Prometheus scrapes: threads of its own, so that a scrape never waits for the event loop."""

from prometheus_client import start_http_server
from prometheus_client.registry import CollectorRegistry

from gateway.rpc.addresses import BindError, split_host_port


class MetricsEndpoint:
    """Owns the listening socket and its threads."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Binds at once. address: host:port. Raises AddressError, BindError."""
        host, port = split_host_port(address)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise BindError("--metrics-port", address) from error

    @property
    def port(self) -> int:
        """The one that is bound."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)
