"""VllmEngine's Generate and Abort over a real channel."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto")
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from gateway.text.model_text import ModelText
from tests.support.fake_pool import FakePool, FakeRun, busy, model_card, worker_view
from tests.support.rpc_errors import refused
from wire.messages import Grammar, GrammarKind, Sampling, TokenLogprobs, WireFinishReason

Stub = Callable[[Any], Any]


def request(stream: bool = True, ids: tuple[int, ...] = (5, 6, 7), **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="r1",
        stream=stream,
        tokenized=vllm.TokenizedInput(input_ids=ids),
        sampling_params=vllm.SamplingParams(**params),
    )


def speaking(*ids: int, end: tuple[WireFinishReason, int | None] = (WireFinishReason.LENGTH, None)) -> FakePool:
    """Gives these tokens one by one, each in a message of its own, then ends."""
    tasks: list[asyncio.Task[None]] = []

    async def speak(run: FakeRun) -> None:
        for token_id in ids:
            run.tokens([token_id])
            await asyncio.sleep(0.005)
        run.finish(end[0], stop_token_id=end[1])

    return FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))))


async def test_a_stream_is_chunks_of_new_tokens_and_one_complete(serve: Any, vllm_stub: Stub) -> None:
    async with serve(speaking(11, 12, 13)) as served:
        call = vllm_stub(served.channel).Generate(request())
        answers = [answer async for answer in call]
        assert await call.code() is grpc.StatusCode.OK
    *chunks, end = answers
    assert [token for answer in chunks for token in answer.chunk.token_ids] == [11, 12, 13]
    assert all(answer.chunk.completion_tokens == len(answer.chunk.token_ids) for answer in chunks)
    assert [answer.chunk.prompt_tokens for answer in chunks] == [3] * len(chunks)
    assert end.complete == vllm.GenerateComplete(
        finish_reason="length", prompt_tokens=3, completion_tokens=3, cached_tokens=3
    )


async def test_without_stream_there_is_one_complete_with_all_ids(serve: Any, vllm_stub: Stub) -> None:
    async with serve(speaking(11, 12, 0, end=(WireFinishReason.STOP, 0))) as served:
        answers = [answer async for answer in vllm_stub(served.channel).Generate(request(stream=False))]
        meters = served.gateway.meters.of_model("tiny")
        assert (meters.finished, meters.generation_tokens, meters.started) == ({"stop": 1}, 3, 1)
    expected = vllm.GenerateComplete(
        output_ids=[11, 12, 0], finish_reason="stop", prompt_tokens=3, completion_tokens=3, cached_tokens=3
    )
    assert answers == [vllm.GenerateResponse(complete=expected)]


async def test_zero_means_neutral_and_never_a_default_of_the_model(serve: Any, vllm_stub: Stub) -> None:
    async with serve(speaking(1)) as served:
        async for _ in vllm_stub(served.channel).Generate(request(seed=7)):
            pass
        async for _ in vllm_stub(served.channel).Generate(request(seed=-5, temperature=0, max_tokens=9, top_k=4)):
            pass
    unset, some = (run.request.sampling for run in served.pool.runs)
    assert unset == Sampling(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, seed=7, max_tokens=253)
    assert some == Sampling(temperature=0.0, top_k=4, seed=2**64 - 5, max_tokens=9)


async def test_everything_that_is_served_reaches_the_worker(serve: Any, vllm_stub: Stub) -> None:
    params: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "frequency_penalty": 1.5,
        "presence_penalty": -1.5,
        "repetition_penalty": 2.0,
        "max_tokens": 20,
        "min_tokens": 2,
        "stop_token_ids": [9, 8],
        "ignore_eos": True,
        "logprobs": 2,
        "seed": 3,
    }
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        async for _ in vllm_stub(served.channel).Generate(request(ids=(1, 2), n=1, **params)):
            pass
    run = served.pool.runs[0].request
    fields: dict[str, Any] = {name: value for name, value in params.items() if name != "logprobs"} | {
        "stop_token_ids": (9, 8)
    }
    assert run.sampling == Sampling(**fields, num_logprobs=2)
    assert run.prompt_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("constraint", "grammar"),
    [
        ({"json_schema": '{"type": "object"}'}, Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "object"}')),
        ({"json_object": True}, Grammar(kind=GrammarKind.JSON_OBJECT)),
        ({"regex": "[ab]+"}, Grammar(kind=GrammarKind.REGEX, source="[ab]+")),
        ({"grammar": 'root ::= "a"'}, Grammar(kind=GrammarKind.EBNF, source='root ::= "a"')),
        (
            {"choice": vllm.ChoiceConstraint(choices=["yes", "no"])},
            Grammar(kind=GrammarKind.CHOICE, source='["yes", "no"]'),
        ),
    ],
)
async def test_constraints_reach_the_worker(
    serve: Any, vllm_stub: Stub, constraint: dict[str, Any], grammar: Grammar
) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        async for _ in vllm_stub(served.channel).Generate(request(**constraint)):
            pass
        (run,) = served.pool.runs
    got = run.request.sampling.grammar
    if grammar.kind is GrammarKind.CHOICE:
        assert (got.kind, json.loads(got.source)) == (grammar.kind, json.loads(grammar.source))
    else:
        assert got == grammar


async def test_text_is_tokenized(serve: Any, vllm_stub: Stub, tiny_text: ModelText) -> None:
    async with serve(speaking(1)) as served:
        async for _ in vllm_stub(served.channel).Generate(vllm.GenerateRequest(text="Hello world")):
            pass
    run = served.pool.runs[0].request
    assert run.prompt_ids.tolist() == tiny_text.encode("Hello world", max_bytes=99).ids_T.tolist()
    assert run.request_id.startswith("req-")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_output_at_the_token_that_completes_it(
    serve: Any, vllm_stub: Stub, tiny_text: ModelText, stream: bool
) -> None:
    ids = tiny_text.encode("Once upon a time there was", max_bytes=99).ids_T.tolist()
    texts = [tiny_text.decode_all(ids[: count + 1]) for count in range(len(ids))]
    expected = ids[: next(count for count, text in enumerate(texts) if "time" in text) + 1]
    async with serve(speaking(*ids)) as served:
        answers = [a async for a in vllm_stub(served.channel).Generate(request(stream=stream, stop=["zz", "time"]))]
        assert served.pool.cancelled == [1]
    got = [token for answer in answers for token in (*answer.chunk.token_ids, *answer.complete.output_ids)]
    end = answers[-1].complete
    assert got == expected
    assert (end.finish_reason, end.matched_stop_str, end.completion_tokens) == ("stop", "time", len(expected))


async def test_only_the_callers_own_stop_tokens_are_told_as_matched(serve: Any, vllm_stub: Stub) -> None:
    async def match(end_token: int) -> str | None:
        async with serve(speaking(5, end_token, end=(WireFinishReason.STOP, end_token))) as served:
            answers = [a async for a in vllm_stub(served.channel).Generate(request(stop_token_ids=[0, 31]))]
            return str(answers[-1].complete.WhichOneof("matched_stop"))

    assert [await match(31), await match(2)] == ["matched_token_id", "None"]


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_are_one_entry_a_token(serve: Any, vllm_stub: Stub, stream: bool) -> None:
    def speak(run: FakeRun) -> None:
        run.tokens([4], [TokenLogprobs(-0.5, (4, 9), (-0.5, -1.5))])
        run.tokens([5], [TokenLogprobs(-2.0, (1, 5), (-0.25, -2.0))])
        run.finish()

    async with serve(FakePool(on_run=speak)) as served:
        answers = [a async for a in vllm_stub(served.channel).Generate(request(stream=stream, logprobs=2))]
    found = answers[0].chunk.output_logprobs if stream else answers[0].complete.output_logprobs
    assert found == vllm.OutputLogProbs(
        token_logprobs=[-0.5, -2.0],
        token_ids=[4, 5],
        top_logprobs=[
            vllm.TopLogProbs(values=[-0.5, -1.5], token_ids=[4, 9]),
            vllm.TopLogProbs(values=[-0.25, -2.0], token_ids=[1, 5]),
        ],
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_several_outputs_each_have_their_index_and_one_end(serve: Any, vllm_stub: Stub, stream: bool) -> None:
    def speak(run: FakeRun) -> None:
        run.tokens([10 * run.handle, 10 * run.handle + 1])
        run.finish(WireFinishReason.STOP if run.handle == 2 else WireFinishReason.LENGTH)

    async with serve(FakePool(on_run=speak)) as served:
        answers = [a async for a in vllm_stub(served.channel).Generate(request(stream=stream, n=3, seed=7))]
        meters = served.gateway.meters.of_model("tiny")
        assert (meters.finished, meters.generation_tokens) == ({"stop": 1, "length": 2}, 6)
        assert {run.request.sampling.seed for run in served.pool.runs} == {7}
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for answer in answers:
        kind = answer.chunk if answer.HasField("chunk") else answer.complete
        ids[kind.index] += [*answer.chunk.token_ids, *answer.complete.output_ids]
    ends = [answer.complete for answer in answers if answer.HasField("complete")]
    assert ids == {0: [10, 11], 1: [20, 21], 2: [30, 31]}
    assert sorted((end.index, end.finish_reason, end.completion_tokens) for end in ends) == [
        (0, "length", 2),
        (1, "stop", 2),
        (2, "length", 2),
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_ends_every_output_that_is_under_way(serve: Any, vllm_stub: Stub, stream: bool) -> None:
    def speak(run: FakeRun) -> None:
        run.tokens([10 * run.handle])
        if run.handle == 1:
            run.finish()

    async with serve(FakePool(on_run=speak, answers_cancels=False)) as served:
        stub = vllm_stub(served.channel)
        call = stub.Generate(request(stream=stream, n=3))
        await served.until(lambda: len(served.pool.runs) == 3)
        await asyncio.sleep(0.05)
        await stub.Abort(vllm.AbortRequest(request_ids=["r1"]))
        ends = [answer.complete async for answer in call if answer.HasField("complete")]
        assert set(served.pool.cancelled) >= {2, 3}
        assert served.gateway.desk.admission.counts().num_entered == 0
    assert sorted((end.index, end.finish_reason) for end in ends) == [(0, "length"), (1, "abort"), (2, "abort")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_top", [0, 2])
async def test_the_prompts_logprobs_come_whole_and_once(
    serve: Any, vllm_stub: Stub, stream: bool, num_top: int
) -> None:
    prompt = tuple(range(1, 401))  # more than one piece carries
    top = [((each, 9), (-0.5, -1.5)) if num_top else ((), ()) for each in prompt[1:]]
    scores = [TokenLogprobs(-0.5, *each) for each in top]

    def speak(run: FakeRun) -> None:
        run.sink.on_prompt_logprobs(scores)  # type: ignore[attr-defined]
        run.tokens([44])
        run.finish()

    card = model_card(max_model_len=4096)
    async with serve(FakePool(views=[worker_view(card=card)], on_run=speak)) as served:
        asked = request(stream=stream, ids=prompt, prompt_logprobs=num_top)
        answers = [answer async for answer in vllm_stub(served.channel).Generate(asked)]
    messages = [answer.chunk if answer.HasField("chunk") else answer.complete for answer in answers]
    (told,) = [message.input_logprobs for message in messages if message.HasField("input_logprobs")]
    expected_top = [[], *([each, 9] for each in prompt[1:])] if num_top else []
    assert list(told.token_ids) == list(prompt)
    assert [each.HasField("value") for each in told.token_logprobs] == [False] + [True] * 399
    assert [list(each.token_ids) for each in told.top_logprobs] == expected_top
    assert [token for answer in answers for token in (*answer.chunk.token_ids, *answer.complete.output_ids)] == [44]


async def test_bias_and_truncation_reach_the_worker(serve: Any, vllm_stub: Stub) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        asked = request(ids=(1, 2, 3, 4), logit_bias={5: 2.5, 6: -100}, truncate_prompt_tokens=2)
        async for _ in vllm_stub(served.channel).Generate(asked):
            pass
        (run,) = served.pool.runs
    assert run.request.prompt_ids.tolist() == [3, 4]
    assert run.request.sampling.logit_bias == {5: 2.5, 6: -100.0}


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_ends_the_stream_with_what_came_before_and_tells_the_worker(
    serve: Any, vllm_stub: Stub, stream: bool
) -> None:
    pool = FakePool(on_run=lambda run: run.tokens([11, 12]), answers_cancels=False)
    async with serve(pool) as served:
        stub = vllm_stub(served.channel)
        call = stub.Generate(request(stream=stream))
        await served.until(lambda: pool.runs)
        await stub.Abort(vllm.AbortRequest(request_ids=["unknown", "r1"]))
        assert set(pool.cancelled) == {1}
        answers = [answer async for answer in call]
        assert await call.code() is grpc.StatusCode.OK
        assert served.gateway.desk.admission.counts().num_entered == 0
        await stub.Abort(vllm.AbortRequest(request_ids=["r1"]))
    ids = [token for answer in answers for token in (*answer.chunk.token_ids, *answer.complete.output_ids)]
    assert ids == [11, 12]
    assert answers[-1].complete.finish_reason == "abort"
    assert [answer.HasField("complete") for answer in answers].count(True) == 1


async def test_abort_tells_the_worker_at_once_even_where_nobody_reads(serve: Any, vllm_stub: Stub) -> None:
    async with serve(FakePool(on_run=lambda run: run.tokens([11]))) as served:
        call = vllm_stub(served.channel).Generate(request())
        await served.until(lambda: served.pool.runs)
        assert served.gateway.desk.abort("r1")
        assert served.pool.cancelled == [1]  # before any task had a turn
        call.cancel()


async def test_a_request_that_is_aborted_while_it_is_tokenized_ends_too(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        stub, gate = vllm_stub(served.channel), asyncio.Event()

        async def hang(*_: Any) -> None:
            await gate.wait()

        served.gateway.desk.text.run = hang
        call = stub.Generate(vllm.GenerateRequest(request_id="r1", text="Hello"))
        await served.until(lambda: served.gateway.desk.admission.holds("r1"))
        await stub.Abort(vllm.AbortRequest(request_ids=["r1"]))
        assert [answer.complete.finish_reason async for answer in call] == ["abort"]
        assert served.pool.runs == []


async def test_a_caller_that_leaves_frees_the_worker(serve: Any, vllm_stub: Stub) -> None:
    async with serve(FakePool(on_run=lambda run: run.tokens([1]))) as served:
        call = vllm_stub(served.channel).Generate(request())
        await call.read()
        call.cancel()
        await served.until(lambda: served.pool.cancelled == [1])
        await served.until(lambda: served.gateway.desk.admission.counts().num_entered == 0)


async def test_errors_are_statuses_with_the_reasons_of_the_gateway(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        stub = vllm_stub(served.channel)
        first = stub.Generate(request())
        await served.until(lambda: served.pool.runs)
        duplicate = await refused(stub.Generate(request()))
        served.pool.runs[0].tokens([3])
        served.pool.runs[0].lose()
        lost = await refused(first)
        served.pool.refuse = [busy()]
        full = await refused(stub.Generate(request()))
        late = await refused(stub.Generate(request(), timeout=0.3))
    codes = grpc.StatusCode
    assert (duplicate.code, duplicate.reason) == (codes.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    assert (lost.code, lost.reason, lost.tokens_delivered) == (codes.UNAVAILABLE, "WORKER_LOST", 1)
    assert (full.code, full.reason, full.pushback_ms) == (codes.RESOURCE_EXHAUSTED, "QUEUE_FULL", 500)
    assert late.code is codes.DEADLINE_EXCEEDED
    assert 0 < served.pool.runs[-1].request.timeout_s < 0.31  # gRPC rounds deadlines up on the wire


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"n": 129}, ("sampling_params.n",)),
        ({"logprobs": -1}, ("sampling_params.logprobs",)),
        ({"logprobs": 21}, ("sampling_params.logprobs",)),
        ({"prompt_logprobs": -1}, ("sampling_params.prompt_logprobs",)),
        ({"prompt_logprobs": 21}, ("sampling_params.prompt_logprobs",)),
        ({"truncate_prompt_tokens": 0}, ("sampling_params.truncate_prompt_tokens",)),
        ({"logit_bias": {1: 100.5}}, ("sampling_params.logit_bias[1]",)),
        ({"logit_bias": {600: 2.0}}, ("sampling_params.logit_bias[600]",)),
        ({"json_schema": '{"type": "nothing"}'}, ("sampling_params.json_schema",)),
        ({"regex": "("}, ("sampling_params.regex",)),
        ({"grammar": "no rule"}, ("sampling_params.grammar",)),
        ({"structural_tag": "a"}, ("sampling_params.structural_tag",)),
        ({"json_object": False}, ("sampling_params.json_object",)),
        ({"choice": vllm.ChoiceConstraint()}, ("sampling_params.choice.choices",)),
        ({"logit_bias": {-1: 2.0}}, ("sampling_params.logit_bias",)),
        ({"truncate_prompt_tokens": -1}, ("sampling_params.truncate_prompt_tokens",)),
        ({"temperature": -1, "top_p": 2}, ("sampling_params.temperature", "sampling_params.top_p")),
        ({"repetition_penalty": -1}, ("sampling_params.repetition_penalty",)),
        ({"max_tokens": 0}, ("sampling_params.max_tokens",)),
        ({"max_tokens": 2, "min_tokens": 3}, ("sampling_params.min_tokens",)),
        ({"stop": ["a", ""]}, ("sampling_params.stop[1]",)),
        ({"stop_token_ids": [1, 600]}, ("sampling_params.stop_token_ids[1]",)),
        ({"ids": ()}, ("tokenized.input_ids",)),
        ({"ids": (1, 600)}, ("tokenized.input_ids[1]",)),
    ],
)
async def test_a_parameter_that_is_wrong_or_not_served_is_refused_by_its_path(
    serve: Any, vllm_stub: Stub, changes: dict[str, Any], fields: tuple[str, ...]
) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        refusal = await refused(vllm_stub(served.channel).Generate(request(**changes)))
        assert served.pool.runs == []
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refusal.fields == fields


async def test_a_request_field_that_is_not_served_is_refused_by_its_name(serve: Any, vllm_stub: Stub) -> None:
    unserved = {
        "kv_transfer_params": vllm.KvTransferParams(remote_host="h"),
        "kv_transfer_params_json": "{}",
        "mm_inputs": vllm.MultimodalInputs(mm_hashes=["x"]),
        "extra_mm_inputs": [vllm.MultimodalInputs()],
        "media_refs": vllm.MediaRefs(),
        "data_parallel_rank": 1,
    }
    found = {}
    async with serve() as served:
        stub = vllm_stub(served.channel)
        for name, value in unserved.items():
            found[name] = (await refused(stub.Generate(vllm.GenerateRequest(text="x", **{name: value})))).fields
        nothing = await refused(stub.Generate(vllm.GenerateRequest()))
        unknown = vllm.GenerateRequest(text="x")
        unknown.MergeFromString(b"\xf8\x3f\x01")  # field 1023
        newer = await refused(stub.Generate(unknown))
    assert found == {name: (name,) for name in unserved}
    assert nothing.fields == ("input",)
    assert newer.fields == ("#1023",)


async def test_ten_tokens_that_came_during_one_write_are_one_chunk(serve: Any, vllm_stub: Stub) -> None:
    def speak(run: FakeRun) -> None:
        for token_id in range(10):
            run.tokens([token_id])
        run.finish()

    async with serve(FakePool(on_run=speak)) as served:
        answers = [answer async for answer in vllm_stub(served.channel).Generate(request())]
    assert [list(answer.chunk.token_ids) for answer in answers] == [list(range(10)), []]
