"""Several outputs of one request, the prompt told back, and what else a caller may ask of an output."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from octavo.gateway.config import RequestLimits
from octavo.gateway.text.model_text import ModelText
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import TokenLogprobs, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun, model_card, worker_view
from tests.support.gateway.generating import ids_of
from tests.support.gateway.rpc_errors import refused

BOTH = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS


def saying(*answers: list[int], scores: list[TokenLogprobs] | None = None, **end: object) -> FakePool:
    """A pool whose outputs give these tokens in turn, a token at a time, all at once."""
    tasks: set[asyncio.Task[None]] = set()
    pool = FakePool()

    async def speak(run: FakeRun, answer: list[int]) -> None:
        if scores is not None:
            run.sink.on_prompt_logprobs(scores)  # type: ignore[attr-defined]
        for token in answer:
            run.tokens([token])
            await asyncio.sleep(0)
        run.finish(**({"reason": WireFinishReason.LENGTH} | end))  # type: ignore[arg-type]

    def begin(run: FakeRun) -> None:
        tasks.add(asyncio.create_task(speak(run, answers[pool.runs.index(run) % len(answers)])))

    pool.on_run = begin
    return pool


def numbered(count: int) -> FakePool:
    """Output i says i + 5 exactly i + 1 times."""
    return saying(*[[index + 5] * (index + 1) for index in range(count)])


async def until_idle(served: Any) -> None:
    await served.until(lambda: len(served.gateway.tracker) == 0)


async def test_each_output_has_its_own_deltas_and_its_own_end(serve: Any) -> None:
    async with serve(numbered(3)) as served:
        request = pb.GenerateRequest(
            text="Hello",
            num_outputs=3,
            output=pb.OutputOptions(format=BOTH),
            sampling=pb.SamplingParams(seed=2**64 - 1),
        )
        events = [event async for event in served.inference.Generate(request)]
        assert len(served.pool.runs) == 3
        assert served.pool.cancelled == []
        assert len(served.gateway.tracker) == 0
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ended: list[int] = []
    for event in events[1:]:
        if event.WhichOneof("event") == "delta":
            assert event.delta.output_index not in ended
            ids[event.delta.output_index] += event.delta.token_ids
        else:
            ended.append(event.finished.output_index)
    assert ids == {0: [5], 1: [6, 6], 2: [7, 7, 7]}
    assert sorted(ended) == [0, 1, 2]
    finished = {event.finished.output_index: event.finished for event in events if event.HasField("finished")}
    assert {index: each.usage.completion_tokens for index, each in finished.items()} == {0: 1, 1: 2, 2: 3}
    assert {index: each.receipt.seed for index, each in finished.items()} == {0: 2**64 - 1, 1: 0, 2: 1}


async def test_the_unary_form_has_the_further_outputs(serve: Any) -> None:
    async with serve(numbered(3)) as served:
        generate = pb.GenerateRequest(text="Hello", num_outputs=3, output=pb.OutputOptions(format=BOTH))
        answer = await served.inference.Complete(pb.CompleteRequest(generate=generate))
    assert list(answer.token_ids) == [5]
    assert [list(each.token_ids) for each in answer.further_outputs] == [[6, 6], [7, 7, 7]]
    assert [each.finished.output_index for each in answer.further_outputs] == [1, 2]
    assert answer.finished.output_index == 0


@pytest.mark.parametrize("how", ["cancel", "fail one", "slow reader", "abort"])
async def test_what_ends_the_request_ends_every_output(serve: Any, how: str) -> None:
    pool = FakePool()
    limits = RequestLimits(max_pending_tokens=4)
    async with serve(pool, limits=limits) as served:
        call = served.inference.Generate(pb.GenerateRequest(request_id="r1", text="Hello", num_outputs=3))
        await call.read()
        if how == "cancel":
            call.cancel()
        elif how == "abort":
            served.gateway.tracker.abort("r1")
        elif how == "fail one":
            pool.runs[1].finish(WireFinishReason.ERROR, error="NUMERICAL", detail="NaN")
        else:
            pool.runs[2].tokens([5] * 9)
        await until_idle(served)
        gone = {run.handle for run in pool.runs} - ({pool.runs[1].handle} if how == "fail one" else set())
        assert set(pool.cancelled) >= gone
        code = {"fail one": grpc.StatusCode.INTERNAL, "slow reader": grpc.StatusCode.RESOURCE_EXHAUSTED}.get(how)
        if code is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() is code


async def test_more_outputs_than_a_worker_can_hold_are_refused(serve: Any) -> None:
    async with serve(FakePool()) as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="Hello", num_outputs=9)))
        assert served.pool.runs == []
    assert refusal.reason == "EXCEEDS_CAPACITY"
    assert "num_outputs: 9 are more than the 8" in refusal.message


async def test_the_prompt_can_be_asked_back(serve: Any, tiny_text: ModelText) -> None:
    request = pb.GenerateRequest(text="Hello world", output=pb.OutputOptions(return_prompt=True))
    async with serve(saying([5])) as served:
        started = (await served.inference.Generate(request).read()).started
        whole = await served.inference.Complete(pb.CompleteRequest(generate=request))
        ids = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[4, 5]), output=request.output)
        by_ids = (await served.inference.Generate(ids).read()).started
    prompt = ids_of("Hello world", tiny_text)
    assert (started.prompt_text, list(started.prompt_token_ids)) == ("Hello world", prompt)
    assert (whole.prompt_text, list(whole.prompt_token_ids)) == ("Hello world", prompt)
    assert (by_ids.prompt_text, list(by_ids.prompt_token_ids)) == ("", [4, 5])


async def test_an_echo_stands_before_every_output_and_is_not_counted(serve: Any, tiny_text: ModelText) -> None:
    cat = ids_of(" a cat", tiny_text)
    request = pb.GenerateRequest(
        text="Hello world",
        num_outputs=2,
        stop=pb.StopConditions(strings=["world"]),
        output=pb.OutputOptions(format=BOTH, echo=True),
    )
    async with serve(saying(cat)) as served:
        whole = await served.inference.Complete(pb.CompleteRequest(generate=request))
    for output in (whole, whole.further_outputs[0]):
        assert output.text == "Hello world a cat"
        assert list(output.token_ids) == ids_of("Hello world", tiny_text) + cat
        assert output.finished.usage.completion_tokens == len(cat)


async def test_log_probabilities_of_the_prompt_come_with_the_first_output_from_its_second_token_on(
    serve: Any, tiny_text: ModelText
) -> None:
    prompt = [4 + index % 500 for index in range(600)]
    scores = [TokenLogprobs(-0.5, (7,), (-0.25,)) for _ in prompt[1:]]
    request = pb.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt), output=pb.OutputOptions(prompt_logprobs=1), num_outputs=1
    )
    pool = saying([5, 6], scores=scores)
    pool.views = [worker_view(card=model_card(max_model_len=1024))]
    async with serve(pool) as served:
        events = [event async for event in served.inference.Generate(request)]
        whole = await served.inference.Complete(pb.CompleteRequest(generate=request))
        assert served.pool.runs[0].request.sampling.num_prompt_logprobs == 1
    told = [each for event in events for each in event.delta.prompt_logprobs]
    assert [each.chosen.token_id for each in told] == prompt[1:]
    assert told[0].chosen.logprob == -0.5
    assert [each.token_id for each in told[0].top] == [7]
    assert max(len(event.delta.prompt_logprobs) for event in events) <= 256
    assert list(whole.prompt_logprobs) == told


async def test_only_the_last_tokens_of_a_prompt_are_kept(serve: Any, tiny_text: ModelText) -> None:
    request = pb.GenerateRequest(
        text="Once upon a time", truncate_prompt_tokens=2, output=pb.OutputOptions(return_prompt=True)
    )
    prompt = ids_of("Once upon a time", tiny_text)
    async with serve(saying([5])) as served:
        started = (await served.inference.Generate(request).read()).started
        too_long = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[4] * 9999), truncate_prompt_tokens=3)
        await served.inference.Generate(too_long).read()
        assert served.pool.runs[1].prompt_ids.tolist() == [4, 4, 4]
        too_long.token_ids.ids[9997] = 99_999
        assert (await refused(served.inference.Generate(too_long))).fields == ("token_ids.ids[9997]",)
    assert list(started.prompt_token_ids) == prompt[-2:]
    assert started.prompt_text == tiny_text.decode_all(prompt[-2:])
    assert started.prompt_tokens == 2


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
async def test_a_stop_string_stays_in_the_text_where_that_is_asked_for(
    serve: Any, tiny_text: ModelText, include: bool, text: str
) -> None:
    stop = pb.StopConditions(strings=["two"], include_stop=include)
    async with serve(saying(ids_of("one two three", tiny_text))) as served:
        served.pool.answers_cancels = True
        answer = await served.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(text="x", stop=stop)))
    assert (answer.text, answer.finished.stop.text) == (text, "two")


async def test_the_text_of_a_stop_token_stays_too(serve: Any, tiny_text: ModelText) -> None:
    *ids, last = ids_of("one two", tiny_text)
    stop = pb.StopConditions(token_ids=[last], include_stop=True)
    pool = saying([*ids, last], reason=WireFinishReason.STOP, stop_token_id=last)
    async with serve(pool) as served:
        answer = await served.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(text="x", stop=stop)))
    assert answer.text == "one two"


async def test_every_wish_reaches_the_worker(serve: Any, tiny_text: ModelText) -> None:
    sampling = pb.SamplingParams(
        typical_p=0.5,
        top_n_sigma=1.5,
        logit_bias={7: 1.5, 9: -100},
        allowed_token_ids=[7, 8],
        bad_words=["cat", " cat"],
    )
    async with serve(saying([5])) as served:
        await served.inference.Generate(pb.GenerateRequest(text="x", sampling=sampling)).read()
        wished = served.pool.runs[0].request.sampling
    assert wished.top_n_sigma == 1.5
    assert (wished.typical_p, wished.logit_bias, wished.allowed_token_ids) == (0.5, {7: 1.5, 9: -100.0}, (7, 8))
    assert wished.bad_words == tiny_text.encode_bad_words(["cat"])


REFUSED: list[tuple[pb.SamplingParams, pb.StopConditions, str, str]] = [
    (pb.SamplingParams(allowed_token_ids=[1, 600]), pb.StopConditions(), "allowed_token_ids[1]", "vocab_size"),
    (pb.SamplingParams(logit_bias={600: 1}), pb.StopConditions(), "logit_bias[600]", "vocab_size"),
    (pb.SamplingParams(bad_words=["a", "  "]), pb.StopConditions(), "bad_words[1]", "gives no tokens"),
    (pb.SamplingParams(allowed_token_ids=[0]), pb.StopConditions(min_tokens=1), "allowed_token_ids", "min_tokens"),
    (
        pb.SamplingParams(allowed_token_ids=[9]),
        pb.StopConditions(min_tokens=1, token_ids=[9]),
        "allowed_token_ids",
        "min_tokens",
    ),
]


@pytest.mark.parametrize(("sampling", "stop", "field", "words"), REFUSED)
async def test_wishes_that_the_model_cannot_grant_are_refused_by_name(
    serve: Any, sampling: pb.SamplingParams, stop: pb.StopConditions, field: str, words: str
) -> None:
    async with serve(FakePool()) as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x", sampling=sampling, stop=stop)))
        assert served.pool.runs == []
    assert refusal.fields == (f"sampling.{field}",)
    assert words in refusal.message


async def test_allowed_ids_that_bad_words_forbid_are_refused(serve: Any, tiny_text: ModelText) -> None:
    (only,) = ids_of("c", tiny_text)
    sampling = pb.SamplingParams(allowed_token_ids=[only], bad_words=["c"])
    async with serve(FakePool()) as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x", sampling=sampling)))
    assert refusal.fields == ("sampling.allowed_token_ids",)


async def test_time_between_tokens_is_that_of_one_output_not_of_all(serve: Any) -> None:
    pool, step_s = FakePool(), 0.06
    async with serve(pool) as served:
        request = pb.GenerateRequest(text="Hello", num_outputs=4, output=pb.OutputOptions(format=BOTH))
        call = served.inference.Generate(request)
        await call.read()
        meters = served.gateway.meters.of_model("tiny")
        for step in range(3):
            for run in pool.runs:
                run.tokens([5])
            await served.until(lambda expected=4 * (step + 1): meters.messages == expected)
            await asyncio.sleep(step_s)
        call.cancel()
        await until_idle(served)
    assert (sum(meters.time_to_first_token.counts), sum(meters.inter_token.counts)) == (1, 4 * 2)
    bounds, counts = meters.inter_token.bounds, meters.inter_token.counts
    shorter = [count for bound, count in zip(bounds, counts, strict=False) if bound < step_s]
    assert sum(shorter) == 0
