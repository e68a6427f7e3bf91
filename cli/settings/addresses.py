"""Addresses as written on the command line, and the default socket between the processes of a host."""

from pathlib import Path

from octavo.cli.errors import shorten, usage
from octavo.cli.whole_number import whole_number
from octavo.wire.run_dir import default_run_dir


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def default_endpoint(run_dir: Path | None) -> str:
    """The default endpoint between a single gateway and its workers."""
    return f"ipc://{(run_dir or default_run_dir()).absolute()}/gateway-0.sock"


def reachable(host: str) -> str:
    """An address at which a listener on this host can be called: loopback for a wildcard, else `host` itself."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host)


def split_address(text: str) -> tuple[str, int]:
    """Split HOST:PORT into its parts, the host without brackets. Raises CliError."""
    host, _, word = text.rpartition(":")
    port = whole_number(word, least=1, most=65_535)
    if not host or port is None:
        raise usage("bad value for --address", f"{shorten(text)} is not HOST:PORT", "write it as 127.0.0.1:50051")
    return host.removeprefix("[").removesuffix("]"), port
