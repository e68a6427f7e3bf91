"""GRPCInferenceService over a real channel: what comes, in one response or as a stream."""

import asyncio
import json
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest
import structlog

from octavo.gateway.config import RequestLimits
from octavo.gateway.dialects.kserve import servicer
from octavo.gateway.dialects.kserve.messages import FINAL_RESPONSE
from octavo.gateway.dialects.kserve.servicer import StreamOfRequests, StreamWriter
from octavo.gateway.rpc.interceptor import RpcScope
from octavo.gateway.text.model_text import ModelText
from octavo.kserve import inference_pb2 as oip
from octavo.wire.messages import SamplingParams, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun
from tests.support.gateway.kserve_calls import request, speaking, stream, stub_of, values
from tests.support.gateway.rpc_errors import refused


@pytest.fixture
def ids(tiny_text: ModelText) -> Callable[[str], list[int]]:
    return lambda text: tiny_text.encode(text, max_bytes=1000).ids_T.tolist()


# ---------------------------------------------------------------- one response


async def test_one_response_holds_the_prompt_and_the_whole_output(serve: Any, ids: Any) -> None:
    async with serve(speaking(*ids("world"))) as served:
        response = await stub_of(served).ModelInfer(request("Hello "))
        (run,) = served.pool.runs
    assert values(response) == {"text_output": "Hello world"}
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "mine")
    assert run.prompt_ids.tolist() == ids("Hello ")


async def test_unset_parameters_are_neutral_and_sixteen_tokens(serve: Any, ids: Any) -> None:
    async with serve(speaking(*ids("x"))) as served:
        await stub_of(served).ModelInfer(request(parameters={"seed": 7, "temperature": None}))
        (run,) = served.pool.runs
    assert run.request.sampling == SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=7, max_tokens=16)


async def test_every_served_parameter_reaches_the_worker(serve: Any, ids: Any) -> None:
    parameters = {
        "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "seed": -5, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "max_tokens": 9, "min_tokens": 2, "stop": "zzz",
        "stop_token_ids": [44], "ignore_eos": True, "skip_special_tokens": False, "logprobs": 2, "n": 1,
        "top_n_sigma": 1.5,
    }  # fmt: skip
    async with serve(speaking(*ids("x"))) as served:
        await stub_of(served).ModelInfer(request(parameters=parameters))
        (run,) = served.pool.runs
    assert run.request.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, min_p=0.125, seed=2**64 - 5, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, max_tokens=9, min_tokens=2, stop_token_ids=(44,), ignore_eos=True, num_logprobs=2,
        top_n_sigma=1.5,
    )  # fmt: skip


async def test_numbers_may_be_texts_and_stand_in_both_places(serve: Any, ids: Any) -> None:
    """As the example client of Triton's vLLM backend sends them."""
    parameters = {"temperature": "0.5", "top_p": "0.25", "top_k": "-1", "max_tokens": "9", "seed": "-5", "n": "1"}
    asked = request(parameters=parameters)
    for name, value in parameters.items():
        asked.parameters[name].string_param = value
    async with serve(speaking(*ids("x"))) as served:
        await stub_of(served).ModelInfer(asked)
        (run,) = served.pool.runs
    assert run.request.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=0, seed=2**64 - 5, max_tokens=9, min_p=0.0
    )


async def test_parameters_of_the_request_count_where_the_tensor_is_silent(serve: Any, ids: Any) -> None:
    asked = request(parameters={"temperature": 0})
    asked.parameters["max_tokens"].int64_param = 5
    asked.parameters["top_p"].double_param = 0.5
    async with serve(speaking(*ids("x"))) as served:
        await stub_of(served).ModelInfer(asked)
        (run,) = served.pool.runs
    sampling = run.request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p) == (0, 5, 0.5)


async def test_raw_inputs_mean_what_typed_ones_mean(serve: Any, ids: Any) -> None:
    tensor = oip.ModelInferRequest.InferInputTensor
    raw = oip.ModelInferRequest(
        model_name="tiny",
        inputs=[
            tensor(name="text_input", datatype="BYTES", shape=[1]),
            tensor(name="exclude_input_in_output", datatype="BOOL", shape=[1]),
        ],
        raw_input_contents=[struct.pack("<I", 5) + b"Hello", b"\x01"],
    )
    async with serve(speaking(*ids("world"))) as served:
        assert values(await stub_of(served).ModelInfer(raw)) == {"text_output": "world"}
        assert served.pool.runs[0].prompt_ids.tolist() == ids("Hello")


async def test_further_outputs_come_where_asked_for(serve: Any, ids: Any) -> None:
    world = ids("world")
    asked = request(
        "Hello", {"max_tokens": 4}, return_finish_reason=True, return_logprobs=True, return_num_input_tokens=False
    )
    asked.outputs.add(name="num_output_tokens")
    asked.outputs.add(name="num_input_tokens")
    asked.outputs.add(name="cumulative_logprob")
    async with serve(speaking(*world)) as served:
        got = values(await stub_of(served).ModelInfer(asked))
    logprobs = json.loads(got.pop("logprobs"))
    assert got == {
        "num_output_tokens": len(world),
        "num_input_tokens": len(ids("Hello")),
        "cumulative_logprob": -0.25 * len(world),
        "finish_reason": "length",
    }
    assert [list(position) for position in logprobs] == [[str(each), "9"] for each in world]
    assert logprobs[0]["9"]["rank"] == 2


async def test_a_stop_string_ends_the_output(serve: Any, ids: Any) -> None:
    async with serve(speaking(*ids("one two three"))) as served:
        asked = request("a", {"stop": ["two"]}, return_finish_reason=True, exclude_input_in_output=True)
        assert values(await stub_of(served).ModelInfer(asked)) == {"text_output": "one ", "finish_reason": "stop"}


async def test_several_outputs_are_elements_of_each_tensor(serve: Any, ids: Any) -> None:
    def speak(run: FakeRun) -> None:
        run.tokens(ids("world" if run.handle == 1 else "Hello"))
        run.finish(WireFinishReason.STOP if run.handle == 2 else WireFinishReason.LENGTH)

    asked = request("> ", {"n": 2}, return_finish_reason=True, return_num_input_tokens=True)
    async with serve(FakePool(on_run=speak)) as served:
        response = await stub_of(served).ModelInfer(asked)
        refusal = await stream(served, request(parameters={"n": 2}, stream=True))
        assert served.gateway.meters.of_model("tiny").finished == {"length": 1, "stop": 1}
    raw = dict(zip([tensor.name for tensor in response.outputs], response.raw_output_contents, strict=True))
    assert [list(tensor.shape) for tensor in response.outputs] == [[2], [2], [1]]
    assert raw["text_output"] == struct.pack("<I", 7) + b"> world" + struct.pack("<I", 7) + b"> Hello"
    assert raw["finish_reason"] == struct.pack("<I", 6) + b"length" + struct.pack("<I", 4) + b"stop"
    assert "sampling_parameters.n: must be 1 for a stream" in refusal[0].error_message


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("ends_with_last", [False, True])
async def test_a_stream_gives_pieces_and_marks_the_last(serve: Any, ids: Any, ends_with_last: bool) -> None:
    async with serve(speaking(*ids("Hello world"), ends_with_last=ends_with_last)) as served:
        answers = await stream(served, request(stream=True, return_finish_reason=True))
    got = [values(answer.infer_response) for answer in answers]
    finals = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers]
    assert "".join(each["text_output"] for each in got) == "Hello world"
    assert finals == [False] * (len(answers) - 1) + [True]
    assert [each["finish_reason"] for each in got] == ["None"] * (len(answers) - 1) + ["length"]
    assert got[-1]["text_output"] == (got[-1]["text_output"] if ends_with_last else "")
    assert {answer.infer_response.id for answer in answers} == {"mine"}


async def test_an_empty_final_response_comes_where_asked_for(serve: Any, ids: Any) -> None:
    asked = request(stream=True)
    asked.model_name = ""  # the only one
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    async with serve(speaking(*ids("Hello"))) as served:
        *others, last = await stream(served, asked)
    assert last.infer_response.parameters["triton_final_response"].bool_param
    assert len(last.infer_response.outputs) == 0
    assert {each.infer_response.model_name for each in (*others, last)} == {"tiny"}


@pytest.mark.parametrize("hidden", ["an end token", "what a stop string ends"])
@pytest.mark.parametrize("is_late", [True, False])
async def test_tokens_without_a_text_count_with_the_end(serve: Any, ids: Any, hidden: str, is_late: bool) -> None:
    """Whatever else is asked for, in one response and in a stream."""
    world, (end,) = ids("world "), ids("!")
    sampling = {"stop_token_ids": [end]} if hidden == "an end token" else {"stop": [" !"]}

    async def speak(run: FakeRun) -> None:
        run.tokens(world)
        await asyncio.sleep(0.01 * is_late)
        run.tokens([end])
        run.finish(WireFinishReason.STOP, stop_token_id=end)

    tasks: list[asyncio.Task[None]] = []
    asked = [
        request("Hello", sampling, return_num_output_tokens=True, return_finish_reason=True, stream=streams)
        for streams in (False, True, True)
    ]
    asked[2].parameters["triton_enable_empty_final_response"].bool_param = True
    async with serve(FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))))) as served:
        told = [[values(each.infer_response) for each in await stream(served, one)] for one in asked]
    assert [sum(each["num_output_tokens"] for each in one) for one in told] == [len(world) + 1] * 3
    assert [[each["finish_reason"] for each in one].index("stop") for one in told] == [len(one) - 1 for one in told]


async def test_requests_of_one_stream_are_answered_side_by_side_and_fail_alone(serve: Any, ids: Any) -> None:
    first, second, third = request(stream=True), request(), request(parameters={"temperature": -1})
    first.id, second.id, third.id = "1", "1", "3"  # ids are the caller's business
    async with serve(speaking(*ids("Hello world"))) as served:
        answers = await stream(served, first, third, second)
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
    errors = [answer for answer in answers if answer.error_message]
    assert [(each.infer_response.id, each.error_message) for each in errors] == [
        ("3", "[INVALID_ARGUMENT] INVALID_FIELD: sampling_parameters.temperature: must be in [0, 100], not -1")
    ]
    finals = [each.infer_response.id for each in answers if each.infer_response.parameters[FINAL_RESPONSE].bool_param]
    assert sorted(finals) == ["1", "1", "3"]  # one of each request, of failed ones too
    texts = [values(answer.infer_response)["text_output"] for answer in answers if not answer.error_message]
    assert "HelloHello world" in texts
    assert "".join(text for text in texts if text != "HelloHello world") == "Hello world"


async def test_a_status_instead_of_a_message_where_asked_for(serve: Any) -> None:
    async with serve() as served:

        async def send() -> AsyncIterator[Any]:
            yield request(parameters={"top_p": 2})

        call = stub_of(served).ModelStreamInfer(send(), metadata=(("triton_grpc_error", "true"),))
        refusal = await refused(call)
    assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("sampling_parameters.top_p",))


async def test_a_status_counts_what_the_stream_was_given(serve: Any, ids: Any) -> None:
    def speak(run: FakeRun) -> None:
        run.tokens(ids("Hello world"))
        run.lose("WORKER_LOST", "worker w0 died")

    async with serve(FakePool(on_run=speak)) as served:
        call = stub_of(served).ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
        await call.write(request(stream=True))
        refusal = await refused(call)
    assert (refusal.reason, refusal.tokens_delivered) == ("WORKER_LOST", len(ids("Hello world")))


async def test_a_stream_is_not_read_beyond_what_is_answered_side_by_side(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "MAX_SIDE_BY_SIDE", 2)
    pool = FakePool()
    async with asyncio.timeout(60), serve(pool) as served:
        call = stub_of(served).ModelStreamInfer()
        for _ in range(3):
            await call.write(request())
        await served.until(lambda: len(pool.runs) == 2)
        await asyncio.sleep(0.05)
        assert len(pool.runs) == 2
        pool.runs[0].finish()
        await served.until(lambda: len(pool.runs) == 3)
        call.cancel()


async def test_a_caller_that_leaves_frees_all_requests_of_its_stream(serve: Any) -> None:
    async with serve(FakePool()) as served:

        async def send() -> AsyncIterator[Any]:
            yield request(stream=True)
            yield request(stream=True)
            await asyncio.Event().wait()

        call = stub_of(served).ModelStreamInfer(send())
        reading = asyncio.ensure_future(call.read())
        await served.until(lambda: len(served.pool.runs) == 2)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await served.until(lambda: sorted(served.pool.cancelled) == [1, 2])
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)


async def test_a_lost_worker_is_an_error_of_its_request(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.lose("WORKER_LOST", "worker w0 died"))) as served:
        (answer,) = await stream(served, request(stream=True))
        refusal = await refused(stub_of(served).ModelInfer(request()))
    assert answer.error_message == "[UNAVAILABLE] WORKER_LOST: worker w0 died"
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")


async def test_the_log_has_a_failed_request_of_a_stream_by_the_callers_id(serve: Any) -> None:
    """Ours is told to nobody: callers of this contract have ids of their own."""
    async with serve(FakePool(refuse=[ZeroDivisionError("secret")])) as served:
        with structlog.testing.capture_logs() as lines:
            (answer,) = await stream(served, request())
    assert answer.error_message.endswith("internal error; the server's log has it under this request id")
    told = {line["event"]: line["caller_id"] for line in lines if "caller_id" in line}
    assert told == {"defect": "mine", "request_failed": "mine"}


async def test_a_timeout_in_microseconds_ends_a_request(serve: Any) -> None:
    asked = request()
    asked.parameters["timeout"].int64_param = 200_000_000
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        await stub_of(served).ModelInfer(asked)
        (run,) = served.pool.runs
    assert 150 < run.request.timeout_s < 200


async def test_a_caller_that_reads_nothing_is_told_by_the_status_of_its_stream(serve: Any) -> None:
    """Behind a message that was given up no other can follow: ends of requests would be lost, and their caller wait."""
    pool, limits = FakePool(), RequestLimits(max_pending_tokens=10**9)
    async with asyncio.timeout(60), serve(pool, limits=limits) as served:
        call = stub_of(served).ModelStreamInfer()
        long, other = request(stream=True, parameters={"max_tokens": 200}), request(stream=True)
        await call.write(long)
        await served.until(lambda: pool.runs)
        (tracked,) = served.gateway.tracker
        since_s, num_turns = 0.0, 0
        while num_turns < 40:  # with the same write: in turns, since a pause of the machine is one turn
            pool.runs[0].tokens([70] * 16_000)
            await asyncio.sleep(0.005)
            num_turns = num_turns + 1 if since_s and since_s == tracked.stream.write_since_s else 0
            since_s = tracked.stream.write_since_s
        await call.write(other)
        await served.until(lambda: len(pool.runs) == 2)
        served.gateway.tracker.write_stall_s = 0.2
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
        refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
    assert sorted(pool.cancelled) == [1, 2]


async def test_a_caller_that_leaves_within_a_write_is_no_defect() -> None:
    """The library raises there before it cancels the call; the answers of its other requests go on to their own end."""

    class Gone:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def write(self, message: object) -> None:
            raise grpc.aio.InternalError("the stream is over")

    async def two() -> Any:
        yield request()
        yield request()

    async def write(asked: Any, scope: RpcScope, writer: StreamWriter) -> None:
        await writer.write(oip.ModelStreamInferResponse())

    scope, rpcs = RpcScope(method="/inference.GRPCInferenceService/ModelStreamInfer"), Counter[tuple[str, str, str]]()
    with structlog.testing.capture_logs() as logs:
        await StreamOfRequests(scope, cast("Any", Gone()), rpcs, cast("Any", None)).answer(two(), write)
    assert not logs
    assert not rpcs


async def test_an_error_that_nobody_reads_ends_the_stream(serve: Any) -> None:
    wrong = request(stream=True)
    wrong.model_version = "x" * 60_000  # is sent back

    async def send() -> AsyncIterator[Any]:
        while True:
            yield wrong

    async with asyncio.timeout(60), serve(limits=RequestLimits(write_stall_s=0.2)) as served:
        call = stub_of(served).ModelStreamInfer(send())
        calls = served.gateway.listeners._unread_calls.calls
        await served.until(lambda: any(each.done() for each in calls))
        refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
