"""How the clients connect: channel options and the retry policy that the server expects.

A refusal before the first message (no worker yet, queue full) is retried by the gRPC library itself, after the delay
that the server asks for (`grpc-retry-pushback-ms`, gRFC A6). A stream that has begun is never replayed.
"""

import contextlib
import ipaddress
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import SupportsFloat

import grpc

MAX_MESSAGE_BYTES = 16 * 2**20
_LONGEST_S = 1e9
"""Longer timeouts are passed as none: gRPC counts nanoseconds since 1970 in 63 bits, which overflow at 9.2e9 s."""


def service_config(*statuses: str, **others: object) -> str:
    """A gRPC service config, as JSON, that retries calls refused with these statuses. others: its further entries."""
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": statuses,
    }
    services = [{"service": "octavo.v1.InferenceService"}, {"service": "octavo.v1.ModelService"}]
    return json.dumps({"methodConfig": [{"name": services, "retryPolicy": policy}]} | others)


SERVICE_CONFIG = service_config("UNAVAILABLE", "RESOURCE_EXHAUSTED")
_IN_TURNS = service_config("UNAVAILABLE", "RESOURCE_EXHAUSTED", loadBalancingConfig=[{"round_robin": {}}])

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", SERVICE_CONFIG),
    ("grpc.enable_retries", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


MAX_PORT = 65_535
_WITHOUT_PORTS = ("unix:", "unix-abstract:", "vsock:")
NO_PROXY = ("grpc.enable_http_proxy", 0)


def channel_options(extra: Sequence[tuple[str, str | int]] = ()) -> list[tuple[str, str | int]]:
    """Our options, overridden by the caller's `extra`."""
    return list((dict(CHANNEL_OPTIONS) | dict(extra)).items())


def _is_of_this_host(target: str) -> bool:
    """Whether the target is localhost or a loopback address. No proxy can reach it, although `http_proxy` applies to
    every host that `no_proxy` does not list."""
    host = target.rpartition("/")[2].rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:")
    host = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def dialled(target: str, extra: Sequence[tuple[str, str | int]]) -> tuple[str, list[tuple[str, str | int]]]:
    """The target in gRPC's form, and the channel options. Comma-separated addresses are gateways of one service: calls
    go in turn to those that answer. Raises TypeError if the target is not a string, ValueError if it is empty, has a
    port that there is not (gRPC would take another one), or is a list with host names, of which gRPC would look up only
    one, or with both IPv4 and IPv6."""
    if not isinstance(target, str):
        raise TypeError(f"target: is text, as 127.0.0.1:50051, not {target!r}")
    if not target:
        raise ValueError("target: is empty; give HOST:PORT")
    for _, colon, port in (each.strip().rpartition(":") for each in target.split(",")):
        if colon and port.isdecimal() and int(port) > MAX_PORT and not target.startswith(_WITHOUT_PORTS):
            raise ValueError(f"{target!r}: a port is at most {MAX_PORT}, not {port}")
    if all(map(_is_of_this_host, target.split(","))):
        extra = [NO_PROXY, *extra]
    if "," not in target:
        return target, channel_options(extra)
    if not target.startswith(("ipv4:", "ipv6:")):
        parts = [each.strip() for each in target.split(",")]
        versions = {_version_of(part, target) for part in parts}
        if len(versions) > 1:
            raise ValueError(f"{target!r}: a list of servers has addresses of IPv4 alone, or of IPv6")
        target = f"ipv{versions.pop()}:{','.join(parts)}"
    return target, channel_options([("grpc.service_config", _IN_TURNS), *extra])


def _version_of(address: str, target: str) -> int:
    """4 or 6. Raises ValueError if it is no IP address with a port."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        raise ValueError(f"{target!r}: a list of servers has addresses with ports alone, not {address!r}") from None


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, extra: Sequence[tuple[str, str | int]] = ()
) -> grpc.Channel:
    """A channel to the target; plain text if credentials is None. Raises TypeError, ValueError as `dialled`."""
    target, options = dialled(target, extra)
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)


def open_aio_channel(
    target: str, credentials: grpc.ChannelCredentials | None, extra: Sequence[tuple[str, str | int]] = ()
) -> grpc.aio.Channel:
    """The same for asyncio."""
    target, options = dialled(target, extra)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options)
    return grpc.aio.secure_channel(target, credentials, options)


def tls_credentials(
    *, ca_file: str | Path | None = None, cert_file: str | Path | None = None, key_file: str | Path | None = None
) -> grpc.ChannelCredentials:
    """Credentials for a server with TLS.

    ca_file: PEM file of the authority to trust; None: gRPC's default roots. cert_file and key_file: PEM files of this
    client's certificate and private key, if the server asks for one. Raises OSError if a file cannot be read,
    ValueError if only one of cert_file and key_file is given.
    """
    if (cert_file is None) != (key_file is None):
        raise ValueError("a client certificate needs both cert_file and key_file")
    ca, cert, key = (None if each is None else Path(each).read_bytes() for each in (ca_file, cert_file, key_file))
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def call_timeout(timeout_s: float | None) -> float | None:
    """The timeout of a call as gRPC takes it. None if it is above `_LONGEST_S`: gRPC would treat a timeout that
    overflows as already expired. Raises ValueError for NaN, and for what is no number."""
    is_number = isinstance(timeout_s, SupportsFloat)
    if timeout_s is None or (is_number and timeout_s > _LONGEST_S):
        return None
    if not is_number or math.isnan(timeout_s):
        raise ValueError(f"timeout_s: {timeout_s!r} is no number of seconds")
    return float(timeout_s)


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...] | None:
    """The metadata that every call carries; None without a key. Raises ValueError for a key that no header can hold,
    TypeError for one that is no text."""
    if not api_key:
        return None
    if not isinstance(api_key, str):
        raise TypeError(f"api_key: is text, not a value of type {type(api_key).__name__}")  # a secret is not shown
    if not api_key.isascii() or not api_key.isprintable():
        raise ValueError("an API key has visible ASCII characters only")
    return (("authorization", f"Bearer {api_key}"),)
