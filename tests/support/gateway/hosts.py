"""Gateways of several hosts, here 127.0.0.1 and 127.0.0.2 and so on, and their callers."""

from collections.abc import Callable
from typing import Any

from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.rpc_errors import refused
from tests.support.services.service import free_port

IDS = common_pb2.TokenIds(ids=[4])
KEY = "octavo-the-key-of-ann-0123456789"
AS_ANN = (("x-api-key", KEY),)
Hosts = Callable[..., Any]


def address(n: int) -> str:
    return f"tcp://127.0.0.{n + 1}:{free_port()}"


def met(served: Any) -> int:
    """How many gateways have reported their use to this one."""
    return len(served.gateway.control._limits._states)


async def begun(served: Any, request_id: str, *, max_tokens: int | None = None) -> Any:
    """A request of the tenant that its worker accepted and never answers."""
    num_before = len(served.pool.runs)
    stop = None if max_tokens is None else pb.StopConditions(max_tokens=max_tokens)
    request = pb.GenerateRequest(request_id=request_id, token_ids=IDS, stop=stop)
    call = served.inference.Generate(request, metadata=AS_ANN)
    await served.until(lambda: len(served.pool.runs) > num_before)
    return call


async def refusal_of(served: Any, *, max_tokens: int = 5) -> Any:
    request = pb.GenerateRequest(token_ids=IDS, stop=pb.StopConditions(max_tokens=max_tokens))
    return await refused(served.inference.Generate(request, metadata=AS_ANN))


def elsewhere(served: Any) -> int:
    """Outputs of the tenant that the other gateways have reported to this one."""
    return sum(each.use.num_in_flight for each in served.gateway.tracker.quotas._peer_uses.get("ann", {}).values())
