"""`octavo scale`: how many workers a model of a running service has, and how many gateways run on other hosts."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from octavo.cli.client.connect import channel_options_of, credentials_of, metadata_of
from octavo.cli.errors import CliError, usage
from octavo.cli.serve.launch import supervisor_socket
from octavo.cli.serve.record import running_services
from octavo.cli.settings.addresses import join_address, reachable
from octavo.cli.settings.groups import ScaleSettings
from octavo.client.options import open_channel
from octavo.gateway.validation.limits import MAX_WORKERS
from octavo.v1 import admin_pb2, admin_pb2_grpc

TIMEOUT_S = 30.0
_ADVICE = {
    grpc.StatusCode.UNAVAILABLE: "start one with `octavo serve`, or give its --host and --admin-port",
    grpc.StatusCode.UNIMPLEMENTED: "is that the admin port of a service of this version?",
    grpc.StatusCode.UNAUTHENTICATED: "give the key in OCTAVO_API_KEY, or a certificate with --client-cert-file",
    grpc.StatusCode.PERMISSION_DENIED: "ask the operator for a key with the scope admin",
    grpc.StatusCode.NOT_FOUND: "`octavo models` lists what is served",
}


def scale(settings: ScaleSettings, words: Sequence[str], num_gateways: int | None, *, is_named: bool) -> int:
    """Print the old and new numbers of workers, of gateways on other hosts, or of both. is_named: host or port identify
    the service. Raises CliError, RunDirError."""
    asked = _read(words) if words or num_gateways is None else None
    with _channel(settings, is_named=is_named) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        if asked is not None:
            model, number = asked
            request = admin_pb2.ScaleRequest(model=model, num_workers=number)
            told = _ask(stub.Scale, request, settings, "workers")
            _show(told.model, number, "worker", told.num_workers_before, "octavo top")
        if num_gateways is not None:
            gateways = admin_pb2.ScaleGatewaysRequest(num_gateways=num_gateways)
            before = _ask(stub.ScaleGateways, gateways, settings, "gateways").num_gateways_before
            _show("on other hosts", num_gateways, "gateway", before, "octavo ps")
    return 0


def _ask(method: Callable[..., Any], request: Message, settings: ScaleSettings, of_what: str) -> Any:
    """The answer. Raises CliError."""
    try:
        return method(request, timeout=TIMEOUT_S, metadata=metadata_of(settings))
    except grpc.RpcError as error:
        advice = _ADVICE.get(error.code(), "docs/operations.md tells when the number can be changed")
        details = " ".join(str(error.details()).split())
        raise CliError(f"the number of {of_what} stays as it is", details, advice) from None


def _show(whose: str, number: int, what: str, before: int, command: str) -> None:
    change = "as it was" if before == number else f"was {before}; `{command}` shows them come and go"
    print(f"{whose}: {number} {what}{'s' * (number != 1)} ({change})")  # noqa: T201


def _read(words: Sequence[str]) -> tuple[str, int]:
    """Model ("" for the only one) and number. Raises CliError."""
    if len(words) not in (1, 2):
        advice = "octavo scale MODEL WORKERS, or octavo scale --cluster-gateways N"
        raise usage("bad command line", f"{len(words)} words were given", advice)
    number = words[-1]
    if not re.fullmatch("[0-9]{1,9}", number) or not 1 <= int(number) <= MAX_WORKERS:
        numbers = f"{number[:40]!r} is not a number from 1 to {MAX_WORKERS}"
        raise usage("bad number of workers", numbers, "octavo scale MODEL WORKERS")
    return (words[0] if len(words) == 2 else ""), int(number)


def _channel(settings: ScaleSettings, *, is_named: bool) -> grpc.Channel:
    """To the admin port if given, else to the supervisor of the service of this user that is named, or of the only one.
    Raises CliError, RunDirError."""
    if settings.admin_port is not None:
        address = join_address(settings.host, settings.admin_port)
        return open_channel(address, credentials_of(settings), channel_options_of(settings))
    services = running_services()
    found = ", ".join(each.address for each in services) or "none"
    if is_named and settings.port:  # 0 was any: nothing is said of it
        address = join_address(reachable(settings.host), settings.port)
        services = [each for each in services if each.address == address]
        if not services:
            raise CliError(
                "no such service runs here",
                f"--host and --port say {address}; of this user there run here: {found}",
                "give them as `octavo ps` shows the service, or the --admin-port of one elsewhere",
            )
    if len(services) != 1:
        raise CliError(
            "which service is meant?",
            f"of this user there run here: {found}",
            "give the --host and --port of one",
        )
    return open_channel(f"unix:{supervisor_socket(Path(services[0].run_dir)).absolute()}", None, [])
