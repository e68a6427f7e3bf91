"""What callers of Generate get, and what the worker is asked for."""

import asyncio
import time
from typing import Any

import grpc
import numpy as np
from structlog.testing import capture_logs

from octavo.gateway.text.model_text import ModelText
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import SamplingParams, TokenLogprobs, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun
from tests.support.gateway.generating import REQUEST, ids_of, speaking, text_of


async def test_a_stream_is_started_then_deltas_then_finished_once(serve: Any, tiny_text: ModelText) -> None:
    answer = ids_of("Once upon a time 你好 🦙.", tiny_text)

    async def speak(run: FakeRun) -> None:
        run.sink.on_started()
        for token_id in answer:
            run.tokens([token_id])
            await asyncio.sleep(0.002)
        run.tokens([0])
        run.finish(WireFinishReason.STOP, stop_token_id=0)

    tasks: list[asyncio.Task[None]] = []
    pool = FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))))
    async with serve(pool) as served:
        asked_s = time.monotonic()
        call = served.inference.Generate(REQUEST)
        events = [event async for event in call]
        took_s = time.monotonic() - asked_s
        assert [key for key, _ in await call.initial_metadata()].count("x-request-id") == 1
        assert await call.code() is grpc.StatusCode.OK
    prompt = ids_of("Hello world", tiny_text)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    assert events[0].started == pb.Started(request_id="r1", model="tiny", prompt_tokens=len(prompt))
    assert "".join(event.delta.text for event in events) == "Once upon a time 你好 🦙."
    assert all("\ufffd" not in event.delta.text for event in events)
    assert all(not event.delta.token_ids for event in events)
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_STOP
    assert finished.stop == pb.StopMatch(token_id=0)
    assert finished.usage == common_pb2.Usage(
        prompt_tokens=len(prompt), completion_tokens=len(answer) + 1, cached_tokens=3
    )
    receipt = finished.receipt
    assert (receipt.worker_id, receipt.model_fingerprint, receipt.seed) == ("w0", "fingerprint-of-tiny", 7)
    assert (receipt.queue_s, receipt.prefill_s, receipt.decode_s) == (0.25, 0.5, 0.75)
    assert (receipt.computed_tokens, receipt.preemptions) == (5, 1)
    assert 0 < receipt.gateway_s <= receipt.time_to_first_token_s <= receipt.total_s < took_s
    run = pool.runs[0]
    assert run.prompt_ids.dtype == np.int32
    assert run.prompt_ids.tolist() == prompt
    assert run.request.sampling == SamplingParams(
        temperature=0.5, top_k=20, top_p=0.75, repetition_penalty=1.125, seed=7, max_tokens=256 - len(prompt)
    )
    assert (run.request.priority, run.request.cache_salt, run.request.timeout_s) == (0, "", None)
    assert pool.cancelled == []
    assert len(served.gateway.tracker) == 0
    assert served.gateway.tracker.admission.counts().num_entered == 0


async def test_complete_answers_the_same_in_one_message(serve: Any, tiny_text: ModelText) -> None:
    answer = ids_of("a little cat 🦙", tiny_text)
    async with serve(speaking(answer[:2], answer[2:])) as served:
        output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS)
        request = pb.GenerateRequest(text="Hello", request_id="c1", output=output)
        response = await served.inference.Complete(pb.CompleteRequest(generate=request))
    assert (response.request_id, response.model, response.text) == ("c1", "tiny", "a little cat 🦙")
    assert list(response.token_ids) == answer
    assert response.finished.reason == pb.FINISH_REASON_LENGTH
    assert not response.finished.HasField("stop")
    assert response.finished.usage.completion_tokens == len(answer)


async def test_ids_only_needs_no_text_at_all(serve: Any) -> None:
    async with serve(speaking([5, 6], [7])) as served:
        request = pb.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=[4, 5, 599]), output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS)
        )
        text, events = await text_of(served.inference.Generate(request))
        assert served.pool.runs[0].prompt_ids.tolist() == [4, 5, 599]
    assert text == ""
    assert [token_id for event in events for token_id in event.delta.token_ids] == [5, 6, 7]
    assert events[0].started.request_id.startswith("req-")


async def test_every_sampling_and_stop_field_reaches_the_worker(serve: Any) -> None:
    request = pb.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[4]),
        sampling=pb.SamplingParams(
            temperature=0, top_p=0.5, top_k=0, min_p=0.25, seed=2**64 - 1,
            repetition_penalty=2, presence_penalty=-1.5, frequency_penalty=0.5,
        ),
        stop=pb.StopConditions(max_tokens=9, min_tokens=2, token_ids=[8, 9], ignore_eos=True),
        output=pb.OutputOptions(logprobs=3),
        priority=-7,
        cache_salt="tenant",
    )  # fmt: skip
    async with serve(speaking([5])) as served:
        await text_of(served.inference.Generate(request, timeout=300))
        run = served.pool.runs[0].request
    assert run.sampling == SamplingParams(
        temperature=0.0, top_p=0.5, top_k=0, min_p=0.25, seed=2**64 - 1, repetition_penalty=2.0, presence_penalty=-1.5,
        frequency_penalty=0.5, max_tokens=9, min_tokens=2, stop_token_ids=(8, 9), ignore_eos=True, num_logprobs=3,
    )  # fmt: skip
    assert (run.priority, run.cache_salt) == (-7, "tenant")
    assert run.timeout_s is not None
    assert 200 < run.timeout_s < 302  # gRPC rounds timeouts up on the wire


async def test_max_tokens_is_cut_at_the_end_of_the_context(serve: Any) -> None:
    async with serve(speaking([5])) as served:
        for max_tokens, expected in ((252, 252), (253, 252), (4_000_000_000, 252)):
            stop = pb.StopConditions(max_tokens=max_tokens)
            request = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[4] * 4), stop=stop)
            await text_of(served.inference.Generate(request))
            assert served.pool.runs[-1].request.sampling.max_tokens == expected


async def test_unset_seeds_are_drawn_and_told(serve: Any) -> None:
    async with serve(speaking([5])) as served:
        request = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[4]))
        seeds = [(await text_of(served.inference.Generate(request)))[1][-1].finished.receipt.seed for _ in range(4)]
        assert [run.request.sampling.seed for run in served.pool.runs] == seeds
    assert len(set(seeds)) == 4


async def test_the_text_of_a_stop_token_is_left_out_and_its_id_is_not(serve: Any, tiny_text: ModelText) -> None:
    hello, end = ids_of("Hello", tiny_text), ids_of("\n", tiny_text)[0]
    pool = speaking(hello, [end], reason=WireFinishReason.STOP, stop_token_id=end)
    async with serve(pool) as served:
        request = pb.GenerateRequest(
            text="x",
            stop=pb.StopConditions(token_ids=[end]),
            output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS, skip_special_tokens=False),
        )
        text, events = await text_of(served.inference.Generate(request))
    assert text == "Hello"
    assert [token_id for event in events for token_id in event.delta.token_ids] == [*hello, end]
    assert events[-1].finished.stop == pb.StopMatch(token_id=end)


async def test_special_tokens_are_left_out_unless_asked_for(serve: Any) -> None:
    for skip, expected in ((True, ""), (False, "<|im_start|>")):
        async with serve(speaking([1])) as served:
            request = pb.GenerateRequest(text="x", output=pb.OutputOptions(skip_special_tokens=skip))
            assert (await text_of(served.inference.Generate(request)))[0] == expected


async def test_a_stop_string_ends_the_output_cancels_the_worker_and_waits_for_its_figures(
    serve: Any, tiny_text: ModelText
) -> None:
    answer = ids_of("one two STOP three four five", tiny_text)
    async with serve(speaking(*[[token_id] for token_id in answer])) as served:
        request = pb.GenerateRequest(text="x", stop=pb.StopConditions(strings=["STOP", "never"]))
        text, events = await text_of(served.inference.Generate(request))
        run = served.pool.runs[0]
        assert served.pool.cancelled == [run.handle]
    finished = events[-1].finished
    assert text == "one two "
    assert (finished.reason, finished.stop) == (pb.FINISH_REASON_STOP, pb.StopMatch(text="STOP"))
    assert finished.usage.completion_tokens == len(ids_of("one two STOP", tiny_text))
    assert finished.receipt.prefill_s == 0.5


async def test_a_stop_string_does_not_wait_for_ever_for_figures(serve: Any, tiny_text: ModelText) -> None:
    pool = speaking(ids_of("one STOP two", tiny_text))
    pool.answers_cancels = False
    inner = pool.on_run

    def speak_without_end(run: FakeRun) -> None:
        run.finish = lambda *_, **__: None  # type: ignore[method-assign, assignment]
        assert inner is not None
        inner(run)

    pool.on_run = speak_without_end
    async with serve(pool, stop_receipt_timeout_s=0.1) as served:
        request = pb.GenerateRequest(text="x", stop=pb.StopConditions(strings=["STOP"]))
        text, events = await text_of(served.inference.Generate(request, timeout=30))
    assert text == "one "
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    assert events[-1].finished.receipt.prefill_s == 0


async def test_a_worker_lost_after_a_stop_string_takes_nothing_back(serve: Any, tiny_text: ModelText) -> None:
    pool = FakePool(answers_cancels=False)
    async with serve(pool) as served:
        request = pb.GenerateRequest(text="x", stop=pb.StopConditions(strings=["STOP"]))
        call = served.inference.Generate(request)
        await served.until(lambda: pool.runs)
        pool.runs[0].tokens(ids_of("one STOP", tiny_text))
        pool.runs[0].lose("WORKER_LOST")
        text, events = await text_of(call)
    assert (text, events[-1].finished.reason) == ("one ", pb.FINISH_REASON_STOP)


async def test_logprobs_come_with_every_token_and_their_texts(serve: Any, tiny_text: ModelText) -> None:
    cat, dog = ids_of("cat", tiny_text)[0], ids_of("dog", tiny_text)[0]
    position = TokenLogprobs(-0.5, (cat, dog), (-0.5, -2.0))

    def run_it(run: FakeRun) -> None:
        asyncio.get_running_loop().call_soon(lambda: (run.tokens([cat, cat], [position, position]), run.finish()))

    async with serve(FakePool(on_run=run_it)) as served:
        request = pb.GenerateRequest(text="x", output=pb.OutputOptions(logprobs=2))
        _, events = await text_of(served.inference.Generate(request))
    got = [entry for event in events for entry in event.delta.logprobs]
    table = tiny_text.table.all_bytes
    chosen = pb.TokenLogprob(token_id=cat, logprob=-0.5, text=table[cat].decode())
    other = pb.TokenLogprob(token_id=dog, logprob=-2.0, text=table[dog].decode())
    assert got == [pb.TokenLogprobs(chosen=chosen, top=[chosen, other])] * 2


async def test_a_token_that_is_part_of_a_character_has_its_bytes(serve: Any, tiny_text: ModelText) -> None:
    half = tiny_text.table.all_bytes.index(b"\xc3")

    def run_it(run: FakeRun) -> None:
        asyncio.get_running_loop().call_soon(lambda: (run.tokens([half], [TokenLogprobs(-1.0, (), ())]), run.finish()))

    async with serve(FakePool(on_run=run_it)) as served:
        request = pb.GenerateRequest(text="x", output=pb.OutputOptions(logprobs=0))
        _, events = await text_of(served.inference.Generate(request))
    (got,) = (entry for event in events for entry in event.delta.logprobs)
    assert got.chosen == pb.TokenLogprob(token_id=half, logprob=-1.0, text="\ufffd", raw=b"\xc3")


async def test_tokens_that_come_while_a_message_is_written_travel_together(serve: Any, tiny_text: ModelText) -> None:
    cat = ids_of("cat", tiny_text)[0]

    async def burst(run: FakeRun) -> None:
        for _ in range(20):
            for _ in range(10):
                run.tokens([cat])
            await asyncio.sleep(0.005)
        run.finish()

    tasks: set[asyncio.Task[None]] = set()
    async with serve(FakePool(on_run=lambda run: tasks.add(asyncio.create_task(burst(run))))) as served:
        text, events = await text_of(served.inference.Generate(REQUEST))
    assert text == tiny_text.decode_all([cat] * 200)
    sizes = [len(event.delta.text) for event in events[1:-1]]
    assert all(size > 0 and size % len(tiny_text.decode_all([cat] * 10)) == 0 for size in sizes)


async def test_a_chat_is_rendered_by_the_checkpoints_template(serve: Any, tiny_text: ModelText) -> None:
    async with serve(speaking([5])) as served:
        chat = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hello <|im_end|>")])
        await text_of(served.inference.Generate(pb.GenerateRequest(chat=chat)))
        ids = served.pool.runs[0].prompt_ids.tolist()
        asked = await served.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    assert asked.text == "<|im_start|>user\nHello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert list(asked.token_ids) == ids
    assert [ids.count(1), ids.count(2)] == [2, 1]
    assert tiny_text.decode_all(ids) == asked.text


async def test_an_output_that_moved_is_its_new_workers(serve: Any) -> None:
    def speak(run: FakeRun) -> None:
        run.sink.on_moved("w1", 1.0, 2.0)
        run.tokens([5])
        run.finish()

    async with serve(FakePool(on_run=speak)) as served:
        with capture_logs() as logs:
            _, events = await text_of(served.inference.Generate(REQUEST))
            await served.until(lambda: logs)
    receipt = events[-1].finished.receipt
    assert (receipt.worker_id, receipt.migrations) == ("w1", 1)
    assert [line["worker"] for line in logs if line["event"] == "end"] == ["w1"]


def test_sampling_parameters_have_the_names_of_the_contract_on_their_way_to_workers() -> None:
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) <= set(SamplingParams.__struct_fields__)
