"""VllmEngine's Generate over a real channel: what comes, and what the worker is asked for."""

import json
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("smg_grpc_proto")
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from octavo.gateway.text.model_text import ModelText
from octavo.wire.messages import Grammar, GrammarKind, SamplingParams, TokenLogprobs, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun, model_card, worker_view
from tests.support.gateway.vllm_calls import Stub, request, speaking


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
    assert unset == SamplingParams(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, seed=7, max_tokens=253)
    assert some == SamplingParams(temperature=0.0, top_k=4, seed=2**64 - 5, max_tokens=9)


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
    assert run.sampling == SamplingParams(**fields, num_logprobs=2)
    assert np.frombuffer(run.prompt_ids, "<i4").tolist() == [1, 2]


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
    assert np.frombuffer(run.prompt_ids, "<i4").tolist() == tiny_text.encode("Hello world", max_bytes=99).ids_T.tolist()
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
    assert run.prompt_ids.tolist() == [3, 4]
    assert run.request.sampling.logit_bias == {5: 2.5, 6: -100.0}


async def test_ten_tokens_that_came_during_one_write_are_one_chunk(serve: Any, vllm_stub: Stub) -> None:
    def speak(run: FakeRun) -> None:
        for token_id in range(10):
            run.tokens([token_id])
        run.finish()

    async with serve(FakePool(on_run=speak)) as served:
        answers = [answer async for answer in vllm_stub(served.channel).Generate(request())]
    assert [list(answer.chunk.token_ids) for answer in answers] == [list(range(10)), []]
