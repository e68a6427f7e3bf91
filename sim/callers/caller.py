"""A simulated caller: calls, reads at its own pace, cancels, stalls, calls again, and compares with the oracle.

Knows the service only by its contract: ``Started? Delta* (Finished + OK | status with our trailers)``.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from sim.callers.excuses import Excuses
from sim.callers.expectation import Expectation, outputs_of
from sim.edges.loop import SimLoop
from sim.edges.rpc import SimCall, Status
from sim.journal import Journal
from sim.processes.gateway import SimGateway
from sim.scenario import RequestSpec

REDIAL_S = 0.25
FORMATS = {
    "text": pb.OUTPUT_FORMAT_TEXT,
    "ids": pb.OUTPUT_FORMAT_TOKEN_IDS,
    "both": pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS,
}


def message_of(spec: RequestSpec, request_id: str, *, cache_salt: str) -> pb.GenerateRequest:
    """The request message that a caller sends."""
    request = pb.GenerateRequest(
        request_id=request_id,
        token_ids=common_pb2.TokenIds(ids=spec.prompt),
        sampling=pb.SamplingParams(temperature=0.0, seed=spec.seed),
        stop=pb.StopConditions(
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            strings=spec.stop_strings,
            token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
        ),
        output=pb.OutputOptions(format=FORMATS[spec.output], logprobs=spec.logprobs),
        num_outputs=spec.num_outputs if spec.num_outputs > 1 else None,
        priority=spec.priority,
        cache_salt=cache_salt,
    )
    if not spec.min_tokens:
        request.stop.ClearField("min_tokens")
    return request


@dataclass(slots=True)
class _Got:
    """What was received of one output."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    finished: Any = None


class Caller:
    """One request of one tenant. gateway_of: the gateway that currently serves at an index, or None."""

    def __init__(
        self,
        spec: RequestSpec,
        loop: SimLoop,
        journal: Journal,
        gateway_of: Callable[[int], SimGateway | None],
        expectation: Expectation,
        excuses: Excuses,
    ) -> None:
        self._spec, self._loop, self._journal = spec, loop, journal
        self._gateway_of = gateway_of
        self._expectation, self._excuses = expectation, excuses
        self.status: Status | None = None
        self._got = [_Got() for _ in range(spec.num_outputs)]
        self._started = 0

    async def run(self) -> None:
        """From the first call to the end of the last retry."""
        for attempt in range(self._spec.retries + 1):
            await self._call_once(attempt)
            if not self._may_retry() or attempt == self._spec.retries:
                break
            await asyncio.sleep(self._pushback_s())
        assert self.status is not None
        reason = self.status.trailers.get("x-error-reason", "")
        self._journal.outcomes[f"{self.status.code} {reason}".strip()] += 1

    async def _call_once(self, attempt: int) -> None:
        spec = self._spec
        self._got, self._started = [_Got() for _ in range(spec.num_outputs)], 0
        self._journal.counts["requests"] += 1
        gateway = self._gateway_of(spec.gateway)
        if gateway is None:
            self.status = Status(code="UNAVAILABLE", message="connection refused")
            return
        name = spec.request_id or f"r{spec.index}"
        call = gateway.call(
            message_of(spec, name, cache_salt=gateway.salt_for(spec.tenant)),
            name=f"r{spec.index}.{attempt}",
            is_unary=spec.is_unary,
            timeout_s=spec.timeout_s,
            tenant=spec.tenant,
        )
        timer = self._loop.call_later(spec.cancel_after_s, call.cancel) if spec.cancel_after_s is not None else None
        await self._read(call)
        if timer is not None:
            timer.cancel()
        self.status = call.status
        self._judge(call)

    async def _read(self, call: SimCall) -> None:
        spec, num_read = self._spec, 0
        while (message := await call.read()) is not None:
            is_over = all(got.finished is not None for got in self._got)
            self._journal.check(not is_over, f"{call.name}: a message after Finished")
            self._take(call, message)
            num_read += 1
            if spec.stall_after == num_read:
                await asyncio.sleep(spec.stall_s)
            elif spec.pace_s:
                await asyncio.sleep(spec.pace_s)

    def _take(self, call: SimCall, message: Any) -> None:
        if isinstance(message, pb.CompleteResponse):
            self._started = 1
            outputs: list[Any] = [message, *message.further_outputs]
            for got, output in zip(self._got, outputs, strict=True):
                got.texts, got.ids = [output.text], list(output.token_ids)
                got.num_logprobs, got.finished = len(output.logprobs), output.finished
            return
        kind = message.WhichOneof("event")
        if kind == "started":
            is_first = not self._started and not any(got.ids for got in self._got)
            self._journal.check(is_first, f"{call.name}: Started is not the first")
            self._started += 1
        elif kind == "delta":
            self._journal.check(self._started == 1, f"{call.name}: a Delta before Started")
            got = self._got[message.delta.output_index]
            self._journal.check(got.finished is None, f"{call.name}: a Delta of an output after its Finished")
            got.texts.append(message.delta.text)
            got.ids.extend(message.delta.token_ids)
            got.num_logprobs += len(message.delta.logprobs)
        else:
            got = self._got[message.finished.output_index]
            self._journal.check(got.finished is None, f"{call.name}: a second Finished of an output")
            got.finished = message.finished

    # ------------------------------------------------------------ judgement

    def _judge(self, call: SimCall) -> None:
        journal, status, name = self._journal, call.status, call.name
        assert status is not None
        journal.counts["tokens"] += sum(len(got.ids) for got in self._got)
        journal.check(status.code != "UNKNOWN", f"{name}: UNKNOWN: {status.message}")
        is_ours = bool(status.trailers)
        if status.code == "OK":
            is_whole = all(got.finished is not None for got in self._got)
            journal.check(is_whole, f"{name}: OK without Finished")
        elif is_ours:
            trailers = status.trailers
            journal.check(trailers.get("x-error-reason"), lambda: f"{name}: {status} has no reason")
            journal.check("x-tokens-delivered" in trailers, lambda: f"{name}: {status} does not tell what came")
        else:
            library_codes = ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE")
            journal.check(status.code in library_codes, lambda: f"{name}: {status} without our trailers")
        for index, (got, spec) in enumerate(zip(self._got, outputs_of(self._spec), strict=True)):
            if index and got.finished is not None:
                got.finished.usage.cached_tokens = 0  # it shares the whole prompt with the first output
            for problem in self._expectation.problems(
                spec, "".join(got.texts), got.ids, got.num_logprobs, got.finished, is_ok=status.code == "OK"
            ):
                journal.violate(f"{name}: output {index}: {problem}")
        if wrong := self._excuses.problem(self._spec, status):
            journal.violate(f"{name}: {wrong}")
        journal.counts["checks"] += 2

    def _may_retry(self) -> bool:
        status = self.status
        assert status is not None
        retryable = status.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
        return retryable and int(status.trailers.get("x-tokens-delivered", 0)) == 0

    def _pushback_s(self) -> float:
        assert self.status is not None
        pushback = self.status.trailers.get("grpc-retry-pushback-ms")
        return REDIAL_S if pushback is None else int(pushback) / 1000
