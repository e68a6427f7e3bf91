"""Generate over a real channel: what callers see, and what the pool is asked for."""

import asyncio
from typing import Any

import grpc
import numpy as np
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb

from gateway.config import RequestLimits
from gateway.text.model_text import ModelText
from tests.support.fake_pool import FakePool, FakeRun, busy, gone, model_card, worker_view
from tests.support.rpc_errors import refusal_of, refused
from wire.messages import Capacity, Sampling, TokenLogprobs, WireFinishReason

REQUEST = pb.GenerateRequest(request_id="r1", text="Hello world", sampling=pb.SamplingParams(seed=7))


def ids_of(text: str, model_text: ModelText) -> list[int]:
    return model_text.encode(text, max_bytes=1 << 20).ids_T.tolist()


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
        call = served.inference.Generate(REQUEST)
        events = [event async for event in call]
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
    assert 0 < receipt.gateway_s <= receipt.time_to_first_token_s <= receipt.total_s < 5
    run = pool.runs[0]
    assert run.request.prompt_ids.dtype == np.int32
    assert run.request.prompt_ids.tolist() == prompt
    assert run.request.sampling == Sampling(
        temperature=0.5, top_k=20, top_p=0.75, repetition_penalty=1.125, seed=7, max_tokens=256 - len(prompt)
    )
    assert (run.request.priority, run.request.cache_salt, run.request.timeout_s) == (0, "", None)
    assert pool.cancelled == []
    assert len(served.gateway.desk.live) == 0
    assert served.gateway.desk.admission.counts().num_entered == 0


def speaking(*steps: list[int], reason: WireFinishReason = WireFinishReason.LENGTH, **figures: object) -> FakePool:
    """A pool whose worker sends these steps, one after the other in the loop's turns, then ends."""

    async def speak(run: FakeRun) -> None:
        for step in steps:
            run.tokens(step)
            await asyncio.sleep(0)
        run.finish(reason, **figures)

    tasks: set[asyncio.Task[None]] = set()
    return FakePool(on_run=lambda run: tasks.add(asyncio.create_task(speak(run))))


async def text_of(call: Any) -> tuple[str, list[pb.GenerateResponse]]:
    events = [event async for event in call]
    return "".join(event.delta.text for event in events), events


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
        assert served.pool.runs[0].request.prompt_ids.tolist() == [4, 5, 599]
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
        await text_of(served.inference.Generate(request, timeout=30))
        run = served.pool.runs[0].request
    assert run.sampling == Sampling(
        temperature=0.0, top_p=0.5, top_k=0, min_p=0.25, seed=2**64 - 1, repetition_penalty=2.0, presence_penalty=-1.5,
        frequency_penalty=0.5, max_tokens=9, min_tokens=2, stop_token_ids=(8, 9), ignore_eos=True, num_logprobs=3,
    )  # fmt: skip
    assert (run.priority, run.cache_salt) == (-7, "tenant")
    assert run.timeout_s is not None
    assert 29 < run.timeout_s < 31  # gRPC rounds timeouts up on the wire


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
        text, events = await text_of(served.inference.Generate(request, timeout=5))
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
    assert 15 <= len(events) - 2 <= 25


async def test_a_chat_is_rendered_by_the_checkpoints_template(serve: Any, tiny_text: ModelText) -> None:
    async with serve(speaking([5])) as served:
        chat = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hello <|im_end|>")])
        await text_of(served.inference.Generate(pb.GenerateRequest(chat=chat)))
        ids = served.pool.runs[0].request.prompt_ids.tolist()
        asked = await served.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    assert asked.text == "<|im_start|>user\nHello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert list(asked.token_ids) == ids
    assert [ids.count(1), ids.count(2)] == [2, 1]
    assert tiny_text.decode_all(ids) == asked.text


# ---------------------------------------------------------------- refusals and ends


async def test_a_duplicate_id_is_refused_and_the_first_request_is_not_disturbed(serve: Any) -> None:
    async with serve() as served:
        call = served.inference.Generate(REQUEST)
        await served.until(lambda: served.pool.runs)
        refusal = await refused(served.inference.Generate(REQUEST))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        assert (refusal.request_id, refusal.tokens_delivered, refusal.pushback_ms) == ("r1", 0, None)
        assert refusal.info == ("DUPLICATE_REQUEST", "octavo")
        served.pool.runs[0].finish()
        assert (await text_of(call))[1][-1].HasField("finished")
        served.pool.on_run = lambda run: run.finish()
        assert (await text_of(served.inference.Generate(REQUEST)))[1][-1].HasField("finished")


async def test_a_full_worker_pushes_back(serve: Any) -> None:
    small = Capacity(num_blocks=64, block_size=16, max_num_seqs=1, max_waiting=1, max_batch_tokens=64)
    async with serve(FakePool(views=[worker_view(capacity=small)])) as served:
        request = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[4]))
        calls = [served.inference.Generate(request) for _ in range(2)]
        await served.until(lambda: len(served.pool.runs) == 2)
        refusal = await refused(served.inference.Generate(request))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refusal.pushback_ms == 500
        for run in served.pool.runs:
            run.finish()
        for call in calls:
            await text_of(call)
        assert served.gateway.desk.admission.counts().num_entered == 0


async def test_a_busy_socket_pushes_back_and_a_worker_that_just_left_is_replaced(serve: Any) -> None:
    pool = speaking([5])
    async with serve(pool) as served:
        pool.refuse = [busy()]
        refusal = await refused(served.inference.Generate(REQUEST))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        pool.refuse = [gone(), gone()]
        assert (await text_of(served.inference.Generate(REQUEST)))[1][-1].HasField("finished")
        pool.refuse = [gone(), gone(), gone()]
        refusal = await refused(served.inference.Generate(REQUEST))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        assert served.gateway.desk.admission.counts().num_entered == 0


async def test_the_gateways_own_limit_is_checked_before_tokenizing(serve: Any) -> None:
    async with serve(limits=RequestLimits(max_requests=1)) as served:
        first = served.inference.Generate(REQUEST)
        await served.until(lambda: served.pool.runs)
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="Hello")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        first.cancel()


async def test_without_a_worker_the_caller_may_come_back(serve: Any) -> None:
    async with serve(FakePool(views=[])) as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x")))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
    assert (refusal.pushback_ms, refusal.tokens_delivered) == (500, 0)


async def test_models_are_named_where_there_are_several(serve: Any) -> None:
    views = [worker_view("w0"), worker_view("w1", card=model_card("big", max_model_len=512))]
    pool = speaking([5])
    pool.views = views
    async with serve(pool) as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x")))
        assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("model",))
        nested = pb.CompleteRequest(generate=pb.GenerateRequest(text="x"))
        assert (await refused(served.inference.Complete(nested))).fields == ("generate.model",)
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x", model="/etc/passwd")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert "/etc" not in refusal.message
        await text_of(served.inference.Generate(pb.GenerateRequest(text="x", model="big")))
        assert pool.runs[-1].worker.worker_id == "w1"
        pool.set_views(views[0])
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x", model="big")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")


async def test_what_can_never_fit_is_refused_at_once(serve: Any) -> None:
    small = Capacity(num_blocks=2, block_size=16, max_num_seqs=4, max_waiting=4, max_batch_tokens=64)
    cases = [
        (worker_view(), 255, 0, True),
        (worker_view(), 256, 0, False),  # no room for one token in the context of 256
        (worker_view(), 200, 56, True),
        (worker_view(), 200, 57, False),
        (worker_view(capacity=small), 31, 0, True),
        (worker_view(capacity=small), 32, 0, False),  # nor in a pool of 2 blocks of 16
        (worker_view(capacity=small), 20, 13, True),  # the last token needs no place in the pool
        (worker_view(capacity=small), 20, 14, False),
    ]
    for view, num_tokens, min_tokens, fits in cases:
        pool = speaking([5])
        pool.views = [view]
        async with serve(pool) as served:
            request = pb.GenerateRequest(
                token_ids=common_pb2.TokenIds(ids=[4] * num_tokens), stop=pb.StopConditions(min_tokens=min_tokens)
            )
            if fits:
                await text_of(served.inference.Generate(request))
                continue
            refusal = await refused(served.inference.Generate(request))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
            assert pool.runs == []


async def test_a_text_above_the_limit_is_refused_before_it_is_tokenized(serve: Any) -> None:
    async with serve(speaking([5]), limits=RequestLimits(max_prompt_bytes=100)) as served:
        await text_of(served.inference.Generate(pb.GenerateRequest(text="é" * 50)))
        for request in (pb.GenerateRequest(text="é" * 51), pb.GenerateRequest(text="a" * 2_000_000)):
            refusal = await refused(served.inference.Generate(request))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")


async def test_a_template_that_refuses_is_the_callers_fault(serve: Any) -> None:
    async with serve() as served:
        chat = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, content="x")])
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(chat=chat)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TEMPLATE")
    assert refusal.message == "a tool cannot begin"


async def test_ids_that_the_model_does_not_have_are_named_by_their_place(serve: Any) -> None:
    async with serve() as served:
        request = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[1, 600, 2, 2**32 - 1]))
        assert (await refused(served.inference.Generate(request))).fields == ("token_ids.ids[1]", "token_ids.ids[3]")
        request = pb.GenerateRequest(text="x", stop=pb.StopConditions(token_ids=[1, 600]))
        refusal = await refused(served.inference.Complete(pb.CompleteRequest(generate=request)))
        assert refusal.fields == ("generate.stop.token_ids[1]",)
        refusal = await refused(served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[700])))
        assert refusal.fields == ("token_ids[0]",)


async def test_cancel_reaches_the_worker_at_once(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        call = served.inference.Generate(REQUEST)
        await served.until(lambda: pool.runs)
        pool.runs[0].tokens([5])
        async for event in call:
            if event.HasField("delta"):
                break
        call.cancel()
        await served.until(lambda: pool.cancelled == [pool.runs[0].handle], limit_s=1.0)
        await served.until(lambda: not served.gateway.desk.admission.holds("r1"), limit_s=1.0)
        assert len(served.gateway.desk.live) == 0
        key = ("/octavo.v1.InferenceService/Generate", "CANCELLED", "CLIENT")
        await served.until(lambda: served.gateway.meters.rpcs[key] == 1)


async def test_a_cancel_while_the_prompt_is_tokenized_leaves_nothing_behind(serve: Any) -> None:
    async with serve() as served:
        began, release = asyncio.Event(), asyncio.Event()

        async def slow(work: Any) -> Any:
            began.set()
            await release.wait()

        served.gateway.text.run = slow
        call = served.inference.Generate(REQUEST)
        await began.wait()
        assert served.gateway.desk.admission.holds("r1")
        call.cancel()
        await served.until(lambda: not served.gateway.desk.admission.holds("r1"), limit_s=1.0)
        assert served.pool.runs == []


async def test_a_deadline_that_passes_while_the_prompt_is_tokenized_costs_the_worker_nothing(serve: Any) -> None:
    async with serve() as served:

        async def slow(work: Any) -> Any:
            await asyncio.sleep(0.3)
            return work()

        served.gateway.text.run = slow
        refusal = await refused(served.inference.Generate(REQUEST, timeout=0.1))
        assert refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until(lambda: not served.gateway.desk.admission.holds("r1"))
        assert served.pool.runs == []


async def test_a_refusal_sends_no_initial_metadata_so_that_it_can_be_retried(serve: Any) -> None:
    async with serve(FakePool(views=[])) as served:
        call = served.inference.Generate(REQUEST)
        assert (await refused(call)).reason == "NO_WORKER"
        assert "x-request-id" not in dict(await call.initial_metadata())


async def test_a_closed_connection_cancels_every_stream_on_it(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        calls = [
            served.inference.Generate(pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[4]))) for _ in range(3)
        ]
        await served.until(lambda: len(pool.runs) == 3)
        await served.channel.close(grace=None)
        await served.until(lambda: sorted(pool.cancelled) == [1, 2, 3], limit_s=2.0)
        del calls


async def test_a_unary_call_that_is_cancelled_frees_the_worker(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        call = served.inference.Complete(pb.CompleteRequest(generate=REQUEST))
        await served.until(lambda: pool.runs)
        call.cancel()
        await served.until(lambda: pool.cancelled == [1], limit_s=1.0)


async def test_a_deadline_ends_the_stream_and_frees_the_worker(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        refusal = await refused(served.inference.Generate(REQUEST, timeout=0.2))
        assert refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until(lambda: pool.cancelled == [1], limit_s=1.0)
        assert pool.runs[0].request.timeout_s is not None
        assert pool.runs[0].request.timeout_s < 0.21  # gRPC rounds deadlines up on the wire


async def test_a_worker_that_sees_the_deadline_first_says_so(serve: Any) -> None:
    pool = FakePool(on_run=lambda run: run.finish(WireFinishReason.DEADLINE))
    async with serve(pool) as served:
        refusal = await refused(served.inference.Generate(REQUEST, timeout=10))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")


async def test_every_end_that_a_worker_can_report_has_its_status(serve: Any, tiny_text: ModelText) -> None:
    cat = ids_of("cat", tiny_text)
    unavailable, internal = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL
    for error, code, pushback in (
        ("NUMERICAL", internal, None),
        ("ENGINE_ERROR", internal, None),
        ("OUT_OF_MEMORY", grpc.StatusCode.RESOURCE_EXHAUSTED, 500),
        ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED, 500),
        ("EXCEEDS_CAPACITY", grpc.StatusCode.INVALID_ARGUMENT, None),
        ("DRAINING", unavailable, 500),
    ):
        pool = speaking(cat, reason=WireFinishReason.ERROR, error=error, detail="at /srv/models/x.bin line 3")
        async with serve(pool) as served:
            call = served.inference.Generate(REQUEST)
            texts = []
            try:
                async for event in call:
                    texts.append(event.delta.text)  # noqa: PERF401  (what came before the error counts)
            except grpc.aio.AioRpcError as caught:
                refusal = refusal_of(caught)
        assert "".join(texts) == "cat"
        assert (refusal.code, refusal.reason, refusal.pushback_ms) == (code, error, pushback)
        assert (refusal.tokens_delivered, refusal.message) == (len(cat), "at <path> line 3")


async def test_a_lost_worker_is_told_with_what_was_delivered(serve: Any, tiny_text: ModelText) -> None:
    cat = ids_of("cat", tiny_text)
    for reason in ("WORKER_LOST", "WORKER_STALLED", "DRAINING"):
        pool = FakePool()
        async with serve(pool) as served:
            call = asyncio.ensure_future(refused(served.inference.Generate(REQUEST)))
            await served.until(lambda pool=pool: pool.runs)
            pool.runs[0].tokens(cat)
            pool.runs[0].lose(reason)
            refusal = await call
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, reason)
        assert refusal.tokens_delivered == len(cat)


async def test_a_worker_that_breaks_the_protocol_is_our_defect(serve: Any) -> None:
    pool = FakePool(on_run=lambda run: run.lose("INTERNAL", "token 99999 at /run/octavo/gateway-0.sock"))
    async with serve(pool) as served:
        refusal = await refused(served.inference.Generate(REQUEST))
    assert (refusal.code, refusal.reason, refusal.request_id) == (grpc.StatusCode.INTERNAL, "INTERNAL", "r1")
    assert refusal.message == "internal error; the server's log has it under this request id"


async def test_a_defect_of_ours_is_internal_and_never_unknown(serve: Any) -> None:
    pool = FakePool(refuse=[ZeroDivisionError("secret /path"), asyncio.CancelledError()])
    async with serve(pool) as served:
        for _ in range(2):
            refusal = await refused(served.inference.Generate(REQUEST, timeout=5))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
            assert "secret" not in refusal.message
        assert served.gateway.desk.admission.counts().num_entered == 0
        assert served.gateway.desk.live.get("r1") is None
