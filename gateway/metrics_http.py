"""The HTTP endpoint that Prometheus scrapes: a thread of its own, so that a scrape never waits for the event loop."""

from prometheus_client.registry import CollectorRegistry

from gateway.rpc.addresses import BindError, split_host_port
from wire.scrape_server import ScrapeServer, pages_of


class MetricsEndpoint:
    """Owns the listening socket and its thread."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Binds at once. address: host:port. Raises AddressError, BindError."""
        host, port = split_host_port(address)
        try:
            self._server = ScrapeServer(host, port, pages_of(registry))
        except OSError as error:
            raise BindError("--metrics-port", address) from error

    @property
    def port(self) -> int:
        """The one that is bound."""
        return self._server.port

    def close(self) -> None:
        """Idempotent."""
        self._server.close()
