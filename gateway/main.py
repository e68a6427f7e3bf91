"""Entry point of a gateway process."""

from gateway.config import GatewayConfig


def main(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT (drain first; the second signal stops at once). Exit code: 0 stopped as asked,
    1 could not start. Imports no torch."""
    raise NotImplementedError
