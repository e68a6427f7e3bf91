"""Addresses as written on the command line, and the default socket between the processes of a host."""

from collections.abc import Iterable
from pathlib import Path

from octavo.cli.errors import CliError, shorten, usage
from octavo.cli.settings.setting import is_host
from octavo.cli.whole_number import whole_number
from octavo.wire.endpoints import Endpoint, EndpointError, parse_endpoint, require_proof
from octavo.wire.run_dir import RunDirError, default_run_dir, ensure_run_dir


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
    host = host.removeprefix("[").removesuffix("]")
    if not host or not is_host(host) or port is None:
        raise usage("bad value for --address", f"{shorten(text)} is not HOST:PORT", "write it as 127.0.0.1:50051")
    return host, port


def endpoints_of(
    flag: str, addresses: Iterable[str], *, advice: str = "write it as ipc:///folder/name.sock or tcp://host:port"
) -> list[Endpoint]:
    """The endpoints that a flag names. Raises CliError."""
    try:
        return [parse_endpoint(address) for address in addresses]
    except EndpointError as error:
        raise usage(f"bad value for {flag}", str(error), advice) from None


def require_proofs(flag: str, addresses: Iterable[str], *, has_key: bool, has_token: bool) -> None:
    """`wire.endpoints.require_proof` of each, with the flag's name in the error. Raises CliError."""
    for endpoint in endpoints_of(flag, addresses):
        try:
            require_proof(endpoint, has_key=has_key, has_token=has_token)
        except EndpointError as error:
            advice = "docs/several-hosts.md tells which keys go where; an ipc:// address needs none"
            raise usage(f"bad value for {flag}", str(error), advice) from None


def make_folders_of_sockets(flag: str, addresses: Iterable[str]) -> None:
    """Make the folders of ipc endpoints, or check them: whoever can enter one can pass for a worker. Raises CliError,
    which a start would blame on the run directory."""
    for endpoint in endpoints_of(flag, addresses):
        try:
            if endpoint.path is not None:
                ensure_run_dir(endpoint.path.parent)
        except RunDirError as error:
            advice = f"mend the folder, or name another with {flag}"
            raise CliError(f"the folder of {flag} cannot be used", str(error), advice) from None
