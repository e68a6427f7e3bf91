"""Deadlines: the wire's and the request's own, whichever is first; a status, or what there is."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import grpc
import pytest
import structlog

import octavo.gateway.requests.input_processor
from octavo.gateway.requests.input_processor import BACKSTOP_S, FIGURES_S, PARTIAL_MARGIN_S, Deadline, deadline_of
from octavo.gateway.streams.stream import AtDeadline, OutputStream
from octavo.gateway.text.model_text import ModelText
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import WireFinishReason
from tests.support.gateway import kserve_calls
from tests.support.gateway.fake_pool import FakePool, FakeRun
from tests.support.gateway.rpc_errors import refused


@pytest.mark.parametrize(
    ("wire_s", "own_s", "at_end", "expected"),
    [
        (None, None, AtDeadline.STATUS, Deadline()),
        (5.0, None, AtDeadline.STATUS, Deadline(end_s=105.0)),
        (5.0, 7.0, AtDeadline.STATUS, Deadline(end_s=105.0, needs_backstop=True)),
        (None, 2.0, AtDeadline.STATUS, Deadline(end_s=102.0, needs_backstop=True)),
        (5.0, None, AtDeadline.PARTIAL, Deadline(end_s=105.0 - PARTIAL_MARGIN_S, at_end=AtDeadline.PARTIAL,
                                                 needs_backstop=True)),
        (5.0, 2.0, AtDeadline.PARTIAL, Deadline(end_s=102.0, at_end=AtDeadline.PARTIAL, needs_backstop=True,
                                                figures_s=FIGURES_S)),
        (None, 2.0, AtDeadline.PARTIAL, Deadline(end_s=102.0, at_end=AtDeadline.PARTIAL, needs_backstop=True,
                                                 figures_s=FIGURES_S)),
        (2.0, 1.75, AtDeadline.PARTIAL, Deadline(end_s=101.75, at_end=AtDeadline.PARTIAL, needs_backstop=True,
                                                 figures_s=0.25 - PARTIAL_MARGIN_S - BACKSTOP_S)),
        (0.0625, None, AtDeadline.PARTIAL, Deadline(end_s=100.03125, at_end=AtDeadline.PARTIAL, needs_backstop=True)),
    ],
)  # fmt: skip
def test_the_earlier_one_counts(
    wire_s: float | None, own_s: float | None, at_end: AtDeadline, expected: Deadline
) -> None:
    deadline = deadline_of(arrived_s=100.0, wire_timeout_s=wire_s, timeout_s=own_s, at_end=at_end)
    assert replace(deadline, figures_s=round(deadline.figures_s, 6)) == replace(
        expected, figures_s=round(expected.figures_s, 6)
    )


def hello(model_text: ModelText, *, ends: bool) -> FakePool:
    """A worker that says "Hello" at once; at the deadline it ends the output, or is in a long step."""
    ids = model_text.encode("Hello", max_bytes=100).ids_T.tolist()

    def run(run: FakeRun) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(run.tokens, ids)
        if ends and run.request.timeout_s is not None:
            loop.call_later(run.request.timeout_s, run.finish, WireFinishReason.DEADLINE)

    return FakePool(on_run=run, answers_cancels=False)


T = TypeVar("T")


async def in_time(ask: Callable[[], Awaitable[T]]) -> T:
    """What a call gets that reaches a worker: a pause of the machine may take all its time before."""
    for _ in range(20):
        try:
            return await ask()
        except grpc.aio.AioRpcError as error:
            if "before the request was sent to a worker" not in str(error.details()):
                raise
    raise AssertionError("no call reached a worker in time")


@pytest.mark.parametrize("ends", [True, False], ids=["worker ends it", "worker is late"])
@pytest.mark.parametrize("own_s", [None, 0.4])
async def test_a_partial_answer_comes_before_the_wires_deadline(
    serve: Any, tiny_text: ModelText, monkeypatch: pytest.MonkeyPatch, ends: bool, own_s: float | None
) -> None:
    """The margin is two seconds here, not 50 ms: on a busy machine the answer may be long under way."""
    wire_s, margin_s = 4.0, 2.0
    monkeypatch.setattr(octavo.gateway.requests.input_processor, "PARTIAL_MARGIN_S", margin_s)
    request = pb.GenerateRequest(text="x", return_partial_on_deadline=True, timeout_s=own_s)
    async with serve(pool := hello(tiny_text, ends=ends)) as served:

        async def stream() -> list[pb.GenerateResponse]:
            return [event async for event in served.inference.Generate(request, timeout=wire_s)]

        events = await in_time(stream)
        complete = pb.CompleteRequest(generate=request)
        whole = await in_time(lambda: served.inference.Complete(complete, timeout=wire_s))
    assert "".join(event.delta.text for event in events) == whole.text == "Hello"
    for finished in (events[-1].finished, whole.finished):
        assert finished.reason == pb.FINISH_REASON_DEADLINE
        assert finished.receipt.computed_tokens == (5 if ends else 0)
    assert len(pool.cancelled) == (0 if ends else 2)
    latest_s = wire_s + 0.1 - margin_s  # gRPC rounds deadlines up on the wire
    assert all(run.request.timeout_s is not None and run.request.timeout_s <= latest_s for run in pool.runs)
    assert served.gateway.meters.of_model("tiny").finished == {"deadline": 2}


async def test_figures_that_come_with_the_end_of_a_long_step_are_in_a_partial_answer(
    serve: Any, tiny_text: ModelText
) -> None:
    """The worker's end comes as soon as the gateway has cut the output, not by the clock."""
    ids = tiny_text.encode("Hello", max_bytes=100).ids_T.tolist()

    def end_when_cut(run: FakeRun) -> None:
        if cast(OutputStream, run.sink).is_partial:
            run.tokens(ids)  # too late
            run.finish(WireFinishReason.DEADLINE)
        else:
            asyncio.get_running_loop().call_later(0.01, end_when_cut, run)

    def run(run: FakeRun) -> None:
        run.tokens(ids)
        end_when_cut(run)

    request = pb.GenerateRequest(text="x", return_partial_on_deadline=True, timeout_s=0.2)
    async with serve(FakePool(on_run=run)) as served:
        complete = pb.CompleteRequest(generate=request)
        response = await in_time(lambda: served.inference.Complete(complete, timeout=30))
    assert (response.text, response.finished.reason) == ("Hello", pb.FINISH_REASON_DEADLINE)
    assert response.finished.receipt.computed_tokens == 5


@pytest.mark.parametrize("ends", [True, False], ids=["worker ends it", "worker is late"])
async def test_the_requests_own_deadline_ends_it_with_a_status(serve: Any, tiny_text: ModelText, ends: bool) -> None:
    request = pb.GenerateRequest(text="x", timeout_s=0.1)
    async with serve(hello(tiny_text, ends=ends)) as served:
        refusal = await refused(served.inference.Generate(request, timeout=30))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        unary = await refused(served.inference.Complete(pb.CompleteRequest(generate=request)))
        assert (unary.code, unary.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        await served.until(lambda: len(served.gateway.tracker) == 0)


async def test_time_that_is_over_while_tokenizing_costs_no_worker_anything(serve: Any) -> None:
    async with serve(pool := FakePool()) as served:

        async def never(steps: Any, **_: Any) -> Any:
            await asyncio.sleep(60)

        served.gateway.text.run_steps = never
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x", timeout_s=0.05)))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        assert served.gateway.tracker.admission.counts().num_entered == 0
    assert pool.runs == []


async def test_a_partial_answer_never_ends_in_half_a_character(serve: Any, tiny_text: ModelText) -> None:
    ids = tiny_text.encode("Hello", max_bytes=100).ids_T.tolist()
    half = next(index for index, row in enumerate(tiny_text.table.all_bytes) if row == b"\xe4")

    def run(run: FakeRun) -> None:
        run.tokens([*ids, half])
        run.finish(WireFinishReason.DEADLINE)

    request = pb.GenerateRequest(text="x", return_partial_on_deadline=True, timeout_s=30)
    request.stop.strings.append("lo!")
    async with serve(FakePool(on_run=run)) as served:
        response = await served.inference.Complete(pb.CompleteRequest(generate=request))
    assert response.text == "Hello"


# ---------------------------------------------------------------- how an expired call is counted


def stuck_text(served: Any) -> None:
    """Nothing is ever tokenized."""

    async def never(work: Any, **_: Any) -> Any:
        await asyncio.sleep(60)

    served.gateway.text.run_steps = never


def silent(run: FakeRun) -> None:
    """A worker that has the request in its queue."""


def one_token(run: FakeRun) -> None:
    """A worker that has begun, and is in a long step."""
    asyncio.get_running_loop().call_soon(run.tokens, [70])


IDS = common_pb2.TokenIds(ids=[4])
BY_IDS = pb.GenerateRequest(token_ids=IDS)
CALLS: dict[str, Callable[[Any], Any]] = {
    "Generate": lambda served: served.inference.Generate(BY_IDS, timeout=0.1),
    "Complete": lambda served: served.inference.Complete(pb.CompleteRequest(generate=BY_IDS), timeout=0.1),
    "Embed": lambda served: served.inference.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=IDS)]), timeout=0.1),
    "ModelInfer": lambda served: kserve_calls.stub_of(served).ModelInfer(kserve_calls.request("Hello"), timeout=0.1),
}


async def how_it_was_counted(served: Any, call: Any, capture: list[Any]) -> tuple[Any, ...]:
    """Code and reason as the caller, the metrics and the log have them."""
    refusal = await refused(call)
    await served.until(lambda: served.gateway.meters.rpcs)
    ((_, code, reason),) = served.gateway.meters.rpcs
    (line,) = [line for line in capture if line["event"] == "end"]
    return refusal.code.name, code, reason, line["code"], line["reason"]


EXPIRED = ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "DEADLINE", "DEADLINE_EXCEEDED", "DEADLINE")


@pytest.mark.parametrize("on_run", [silent, one_token], ids=["queued at the worker", "begun"])
@pytest.mark.parametrize("method", CALLS)
async def test_a_wire_deadline_is_counted_as_what_it_is(serve: Any, method: str, on_run: Any) -> None:
    async with serve(FakePool(on_run=on_run, answers_cancels=False)) as served:
        with structlog.testing.capture_logs() as capture:
            assert await how_it_was_counted(served, CALLS[method](served), capture) == EXPIRED


async def test_a_wire_deadline_that_passes_while_tokenizing_is_counted_as_what_it_is(serve: Any) -> None:
    async with serve() as served:
        stuck_text(served)
        with structlog.testing.capture_logs() as capture:
            call = served.inference.Generate(pb.GenerateRequest(text="x"), timeout=0.1)
            assert await how_it_was_counted(served, call, capture) == EXPIRED


async def test_a_wire_deadline_of_a_stream_that_runs_is_counted_as_what_it_is(serve: Any) -> None:
    async def speak(run: FakeRun) -> None:
        while not run.is_cancelled:
            run.tokens([70])
            await asyncio.sleep(0.005)

    tasks: list[Any] = []
    pool = FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))), answers_cancels=False)
    async with serve(pool) as served:
        with structlog.testing.capture_logs() as capture:
            call = served.inference.Generate(BY_IDS, timeout=0.3)
            assert await how_it_was_counted(served, call, capture) == EXPIRED


async def test_a_caller_that_leaves_long_before_its_deadline_is_counted_as_cancelled(serve: Any) -> None:
    async with serve(FakePool(on_run=silent, answers_cancels=False)) as served:
        call = served.inference.Generate(BY_IDS, timeout=60)
        await served.until(lambda: served.pool.runs)
        call.cancel()
        await served.until(lambda: served.gateway.meters.rpcs)
        ((_, *counted),) = served.gateway.meters.rpcs
        assert counted == ["CANCELLED", "CLIENT"]
