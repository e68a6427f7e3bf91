"""Callers of a service on the oracle, who know every token that they must get."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from octavo import AsyncClient, OctavoError
from octavo.client.requests import generate_request
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.oracle.model import OracleModel, oracle_tokens

MODEL_LEN = 4096


@dataclass(slots=True, kw_only=True)
class Ending:
    """How a request ended. error: None if it is complete."""

    error: BaseException | None = None

    @property
    def reason(self) -> str | None:
        """Our own reason; None for a complete output; "UNKNOWN" if there is none."""
        if self.error is None:
            return None
        return self.error.reason or "UNKNOWN" if isinstance(self.error, OctavoError) else type(self.error).__name__

    @property
    def code(self) -> str:
        """Name of the gRPC status."""
        if self.error is None:
            return "OK"
        return self.error.code.name if isinstance(self.error, OctavoError) else type(self.error).__name__


@dataclass(slots=True, kw_only=True)
class Call(Ending):
    """One request and its outcome. Times are monotonic seconds."""

    prompt: list[int]
    max_tokens: int
    seed: int = 0
    token_ids: list[int] = field(default_factory=list)
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def longest_pause_s(self) -> float:
        """Longest time between two arrivals, or before the first."""
        times = [self.sent_s, *self.arrivals_s]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def golden(call: Call, model: OracleModel) -> list[int]:
    """Every token of the output without faults."""
    sampling = SamplingParams(temperature=0.0, seed=call.seed, max_tokens=call.max_tokens, ignore_eos=True)
    return oracle_tokens(call.prompt, sampling, model=model, max_total_tokens=MODEL_LEN)


def request(call: Call) -> pb.GenerateRequest:
    """The message of a call."""
    return generate_request(
        token_ids=call.prompt, temperature=0, seed=call.seed, max_tokens=call.max_tokens, ignore_eos=True,
        output="token_ids",
    )  # fmt: skip


async def run(client: AsyncClient, call: Call, *, timeout_s: float | None = None) -> Call:
    """Run a call to its end, whatever that is."""
    call.sent_s = time.monotonic()
    stream = client.stream(request(call), timeout_s=timeout_s)
    try:
        async for delta in stream.deltas():
            call.token_ids += delta.token_ids
            call.arrivals_s.append(time.monotonic())
    except (OctavoError, asyncio.CancelledError) as error:
        call.error = without_call(error)
    call.ended_s = time.monotonic()
    return call


def without_call(error: BaseException) -> BaseException:
    """The error without its frames and causes, which would keep the call and its connection alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def calls(count: int, *, max_tokens: int, first: int = 10) -> list[Call]:
    """Different prompts, some with a common prefix."""
    return [Call(prompt=[7, 8, 9, first + n], max_tokens=max_tokens, seed=first + n) for n in range(count)]


async def run_all(client: AsyncClient, wanted: Sequence[Call]) -> list[Call]:
    """Run all calls at once."""
    return list(await asyncio.gather(*(run(client, call) for call in wanted)))
