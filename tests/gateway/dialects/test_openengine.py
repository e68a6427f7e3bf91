"""openengine.v1's Generate over a real channel: what comes, what the worker is asked for, how it ends."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from octavo.gateway.dialects.openengine import servicer
from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc as oe_grpc
from octavo.wire.messages import Grammar, GrammarKind, SamplingParams, TokenLogprobs, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun, busy, speaking
from tests.support.gateway.rpc_errors import refused

# The tiny tokenizer's ids of these bytes stand for themselves.
IDS = oe.TokenIds(ids=[5, 6, 7])


def request(**fields: Any) -> oe.GenerateRequest:
    fields = {"request_id": "r1", "token_ids": IDS} | fields
    return oe.GenerateRequest(**{name: value for name, value in fields.items() if value is not None})


def inference(served: Any) -> Any:
    return oe_grpc.InferenceStub(served.channel)


async def answers_of(call: Any) -> list[oe.GenerateResponse]:
    answers = [answer async for answer in call]
    assert await call.code() is grpc.StatusCode.OK
    return answers


async def test_a_stream_is_tokens_and_one_end_with_the_usage(serve: Any) -> None:
    async with serve(speaking(70, 71, 72)) as served:
        *tokens, end = await answers_of(inference(served).Generate(request()))
    assert {answer.request_id for answer in (*tokens, end)} == {"r1"}
    assert all(answer.token.HasField("output_index") and not answer.HasField("usage") for answer in tokens)
    ids = [each.token_id for answer in tokens for each in answer.token.tokens]
    assert ids == [70, 71, 72]
    joined = "".join(answer.token.text for answer in tokens)
    assert joined == "".join(each.token for answer in tokens for each in answer.token.tokens)
    assert joined
    assert end.finished == oe.GenerationFinished(output_index=0, reason=oe.FINISH_REASON_LENGTH)
    assert end.finished.HasField("output_index")
    assert end.usage == oe.Usage(prompt_tokens=3, completion_tokens=3, total_tokens=6, cached_prompt_tokens=3)


async def test_several_outputs_end_once_each_and_the_last_end_has_the_usage(serve: Any) -> None:
    async with serve(speaking(70, 71)) as served:
        sampling = oe.SamplingParams(num_sequences=3)
        answers = await answers_of(inference(served).Generate(request(sampling=sampling)))
    ends = [answer for answer in answers if answer.HasField("finished")]
    assert sorted(answer.finished.output_index for answer in ends) == [0, 1, 2]
    assert [answer.HasField("usage") for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[-1].usage.completion_tokens == 6
    for index in range(3):
        of_it = [answer.token for answer in answers if answer.HasField("token") and answer.token.output_index == index]
        assert [each.token_id for token in of_it for each in token.tokens] == [70, 71]


async def test_everything_that_is_served_reaches_the_worker(serve: Any) -> None:
    sampling = oe.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, frequency_penalty=1.5, presence_penalty=-1.5,
        repetition_penalty=2.0, seed=2**64 - 1,
    )  # fmt: skip
    stopping = oe.StoppingOptions(
        max_tokens=20, min_tokens=2, ignore_eos=True, conditions=[oe.StopCondition(stop_token_id=9)]
    )
    response = oe.ResponseOptions(return_output_logprobs=True, output_candidates=oe.CandidateTokenSelection(top_n=2))
    guided = oe.GuidedDecoding(regex="a+", backend="llguidance")
    whole = request(
        sampling=sampling, stopping=stopping, response=response, guided=guided, kv=oe.KvOptions(cache_salt="s")
    )
    whole.extra.update({"anything": 1})  # the contract lets a server ignore it
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        metadata = (("openengine-priority", "-2147483648"), ("openengine-routing-key", "k"))
        await answers_of(inference(served).Generate(whole, metadata=(*metadata, ("openengine-target-dp-rank", "0"))))
    run = served.pool.runs[0].request
    assert run.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, frequency_penalty=1.5, presence_penalty=-1.5,
        repetition_penalty=2.0, seed=2**64 - 1, max_tokens=20, min_tokens=2, ignore_eos=True, stop_token_ids=(9,),
        num_logprobs=2, grammar=Grammar(kind=GrammarKind.REGEX, source="a+"),
    )  # fmt: skip
    assert np.frombuffer(run.prompt_ids, "<i4").tolist() == [5, 6, 7]
    assert (run.cache_salt, run.priority) == ("s", -100)


async def test_unset_fields_take_the_models_defaults_and_zeros_are_zeros(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        await answers_of(inference(served).Generate(request()))
        await answers_of(inference(served).Generate(request(sampling=oe.SamplingParams(temperature=0, top_k=-1))))
    default, zero = (run.request.sampling for run in served.pool.runs)
    assert default.temperature != 0
    assert (zero.temperature, zero.top_k) == (0, 0)


async def test_a_request_that_bypasses_the_prefix_cache_finds_nothing_in_it(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        for _ in range(2):
            await answers_of(inference(served).Generate(request(kv=oe.KvOptions(bypass_prefix_cache=True))))
    salts = {run.request.cache_salt for run in served.pool.runs}
    assert len(salts) == 2
    assert "" not in salts


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        (speaking(70, 9, end=(WireFinishReason.STOP, 9)), oe.StopMatch(stop_token_id=9)),
        (speaking(70, 0, end=(WireFinishReason.STOP, 0)), oe.StopMatch(eos_token_id=0)),
        (speaking(70, end=(WireFinishReason.STOP, None)), oe.StopMatch(eos_token_id=0)),
        (FakePool(), oe.StopMatch(stop_text="HI")),
    ],
    ids=["token", "end", "complete form", "text"],
)
async def test_what_ended_an_output_is_told(serve: Any, pool: FakePool, match: oe.StopMatch) -> None:
    stop = oe.StoppingOptions(conditions=[oe.StopCondition(stop_token_id=9), oe.StopCondition(stop_text="HI")])
    async with serve(pool) as served:
        if pool.on_run is None:
            texts = served.gateway.models.text_of(pool.cards()["tiny"]).table.all_bytes
            pool.on_run = lambda run: run.tokens([texts.index(b"H"), texts.index(b"I")])
        answers = await answers_of(inference(served).Generate(request(stopping=stop)))
    assert answers[-1].finished.reason == oe.FINISH_REASON_STOP
    assert answers[-1].finished.stop_match == match


@pytest.mark.parametrize("wants_scores", [True, False])
@pytest.mark.parametrize(("included", "ids"), [(None, [70]), (False, [70]), (True, [70, 9])])
async def test_a_stop_token_of_the_callers_own_remains_where_it_asks_for_it(
    serve: Any, included: bool | None, ids: list[int], wants_scores: bool
) -> None:
    """An end token of the model's always does."""

    def speak(run: FakeRun) -> None:
        stop = 9 if run.request.sampling.stop_token_ids else 0
        scores = [TokenLogprobs(-0.5, (), ())] * 2 if wants_scores else None
        run.tokens([70, stop], scores)
        run.finish(WireFinishReason.STOP, stop_token_id=stop)

    stopping = oe.StoppingOptions(include_stop_in_output=included)
    response = oe.ResponseOptions(return_output_logprobs=wants_scores)
    async with serve(FakePool(on_run=speak)) as served:
        of_model = await answers_of(inference(served).Generate(request(stopping=stopping, response=response)))
        stopping.conditions.add(stop_token_id=9)
        of_caller = await answers_of(inference(served).Generate(request(stopping=stopping, response=response)))
    told = [[each.token_id for answer in answers for each in answer.token.tokens] for answers in (of_model, of_caller)]
    assert told == [[70, 0], ids]
    assert of_caller[-1].finished.stop_match == oe.StopMatch(stop_token_id=9)
    assert of_caller[-1].usage.completion_tokens == 2


async def test_log_probabilities_stand_with_their_tokens(serve: Any) -> None:
    def speak(run: FakeRun) -> None:
        sink: Any = run.sink
        sink.on_prompt_logprobs([TokenLogprobs(-1.0, (9, 6), (-0.5, -1.0)), TokenLogprobs(-2.0, (8,), (-0.1,))])
        run.tokens([70], [TokenLogprobs(-0.25, (70, 71), (-0.25, -1.5))])
        run.finish()

    top = oe.CandidateTokenSelection(top_n=2)
    response = oe.ResponseOptions(
        return_prompt_logprobs=True, prompt_candidates=top, return_output_logprobs=True, output_candidates=top
    )
    async with serve(FakePool(on_run=speak)) as served:
        prompt, token, _ = await answers_of(inference(served).Generate(request(response=response)))
    first, second, third = prompt.prompt.tokens
    assert first.token_id == 5
    assert not first.HasField("logprob")
    assert not first.candidates
    assert (second.token_id, second.logprob, second.rank) == (6, -1.0, 2)
    assert [(each.token_id, each.logprob, each.rank) for each in second.candidates] == [(9, -0.5, 1), (6, -1.0, 2)]
    assert (third.token_id, third.logprob, third.HasField("rank")) == (7, -2.0, False)
    (chosen,) = token.token.tokens
    assert (chosen.token_id, chosen.logprob, chosen.rank, len(chosen.candidates)) == (70, -0.25, 1, 2)


async def test_the_prompt_comes_before_all_outputs(serve: Any) -> None:
    def speak(run: FakeRun) -> None:
        run.tokens([70])
        run.finish()

    def speak_last(run: FakeRun) -> None:
        sink: Any = run.sink
        sink.on_prompt_logprobs([TokenLogprobs(-1.0, (), ())] * 2)
        speak(run)

    pool = FakePool()
    loop = asyncio.get_running_loop()
    pool.on_run = lambda run: loop.call_later(0.1, speak_last, run) if run is pool.runs[0] else speak(run)
    async with serve(pool) as served:
        sampling, response = oe.SamplingParams(num_sequences=3), oe.ResponseOptions(return_prompt_logprobs=True)
        answers = await answers_of(inference(served).Generate(request(sampling=sampling, response=response)))
    kinds = [answer.WhichOneof("event") for answer in answers]
    assert kinds[0] == "prompt"
    assert sorted(kinds[1:]) == ["finished"] * 3 + ["token"] * 3


async def test_errors_are_a_status_before_a_worker_has_the_request_and_one_event_after_it(serve: Any) -> None:
    async with serve() as served:
        stub = inference(served)
        first = stub.Generate(request())
        await served.until(lambda: served.pool.runs)
        duplicate = await refused(stub.Generate(request()))
        served.pool.runs[0].tokens([70])
        served.pool.runs[0].lose()
        *tokens, lost = await answers_of(first)
        served.pool.refuse = [busy()]
        full = await refused(stub.Generate(request()))
        unknown = await refused(stub.Generate(request(model="other")))
        rpcs = served.gateway.meters.rpcs
        assert rpcs["/openengine.v1.Inference/Generate", "OK", "WORKER_LOST"] == 1
    assert [answer.WhichOneof("event") for answer in tokens] == ["token"]
    assert lost.error.code == oe.ERROR_CODE_INTERNAL
    assert lost.error.retryable
    assert lost.usage.completion_tokens == 1
    codes = grpc.StatusCode
    assert (duplicate.code, full.code, unknown.code) == (
        codes.ALREADY_EXISTS,
        codes.RESOURCE_EXHAUSTED,
        codes.NOT_FOUND,
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": None}, "input"),
    ({"request_id": "a b"}, "request_id"),
    ({"media": [oe.MediaItem(url="http://a")]}, "media"),
    ({"lora_name": "a"}, "lora_name"),
    ({"sampling": oe.SamplingParams(temperature=-1)}, "sampling.temperature"),
    ({"sampling": oe.SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
    ({"sampling": oe.SamplingParams(temperature=1e300)}, "sampling.temperature"),
    ({"sampling": oe.SamplingParams(top_p=0)}, "sampling.top_p"),
    ({"sampling": oe.SamplingParams(top_k=-2)}, "sampling.top_k"),
    ({"sampling": oe.SamplingParams(num_sequences=0)}, "sampling.num_sequences"),
    ({"sampling": oe.SamplingParams(num_sequences=129)}, "sampling.num_sequences"),
    ({"stopping": oe.StoppingOptions(max_tokens=0)}, "stopping.max_tokens"),
    ({"stopping": oe.StoppingOptions(max_tokens=1, min_tokens=2)}, "stopping.min_tokens"),
    ({"stopping": oe.StoppingOptions(conditions=[oe.StopCondition()])}, "stopping.conditions[0]"),
    (
        {
            "stopping": oe.StoppingOptions(
                conditions=[oe.StopCondition(stop_token_id=1), oe.StopCondition(stop_text="")]
            )
        },
        "stopping.conditions[1]",
    ),
    ({"response": oe.ResponseOptions(prompt_logprob_start=1)}, "response.prompt_logprob_start"),
    (
        {"response": oe.ResponseOptions(output_candidates=oe.CandidateTokenSelection(top_n=1))},
        "response.output_candidates",
    ),
    (
        {
            "response": oe.ResponseOptions(
                return_output_logprobs=True, output_candidates=oe.CandidateTokenSelection(top_n=21)
            )
        },
        "response.output_candidates.top_n",
    ),
    (
        {
            "response": oe.ResponseOptions(
                return_output_logprobs=True, output_candidates=oe.CandidateTokenSelection(all=oe.AllCandidates())
            )
        },
        "response.output_candidates.all",
    ),
    (
        {
            "response": oe.ResponseOptions(
                return_prompt_logprobs=True, prompt_candidates=oe.CandidateTokenSelection(token_ids=IDS)
            )
        },
        "response.prompt_candidates.token_ids",
    ),
    ({"kv": oe.KvOptions(session=oe.KvSessionRef(session_id="s"))}, "kv.session"),
    ({"kv": oe.KvOptions(cache_salt="s" * 200)}, "kv.cache_salt"),
    ({"guided": oe.GuidedDecoding(structural_tag="{}")}, "guided.structural_tag"),
    ({"guided": oe.GuidedDecoding(regex="(")}, "guided.regex"),
    ({"guided": oe.GuidedDecoding(ebnf_grammar="no rule")}, "guided.ebnf_grammar"),
    ({"guided": oe.GuidedDecoding(json_schema="[")}, "guided.json_schema"),
    ({"guided": oe.GuidedDecoding(choice=oe.ChoiceConstraint())}, "guided.choice.choices"),
    ({"guided": oe.GuidedDecoding(regex="a", backend="outlines")}, "guided.backend"),
]


@pytest.mark.parametrize(("fields", "path"), REFUSED, ids=[f"{path}-{n}" for n, (_, path) in enumerate(REFUSED)])
async def test_what_is_not_served_is_refused_by_its_name(serve: Any, fields: dict[str, Any], path: str) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        refusal = await refused(inference(served).Generate(request(**fields)))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.fields == (path,)


async def test_what_can_be_the_prompt_is_told_in_this_contracts_words(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        refusal = await refused(inference(served).Generate(request(token_ids=None)))
    assert refusal.message == "input: one of prompt, token_ids must be set"


async def test_fields_and_metadata_of_later_revisions_are_refused_by_name(serve: Any) -> None:
    later = oe.GenerateRequest.FromString(request().SerializeToString() + b"\xfa\x01\x01a")  # field 31
    nested = request(sampling=oe.SamplingParams.FromString(b"\x98\x03\x01"))  # field 51
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        stub = inference(served)
        assert (await refused(stub.Generate(later))).fields == ("#31",)
        assert (await refused(stub.Generate(nested))).fields == ("sampling.#51",)
        for name, values in (
            ("openengine-schema-revision", ["3"]),
            ("openengine-routing-key", [""]),
            ("openengine-routing-key", ["a", "b"]),
            ("openengine-priority", ["1.5"]),
            ("openengine-priority", ["2147483648"]),
            ("openengine-target-dp-rank", ["1"]),
            ("openengine-target-dp-rank", ["-1"]),
            ("openengine-target-dp-rank", ["-0"]),
        ):
            call = stub.Generate(request(), metadata=[(name, value) for value in values])
            refusal = await refused(call)
            assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (name,))
    assert served.pool.runs == []


@pytest.mark.parametrize("target", ["one", "all"])
async def test_an_abort_gives_what_came_before_it_and_an_end(serve: Any, target: str) -> None:
    pool = FakePool(on_run=lambda run: run.tokens([70]), answers_cancels=False)
    async with serve(pool) as served:
        control = oe_grpc.ControlStub(served.channel)
        call = inference(served).Generate(request(sampling=oe.SamplingParams(num_sequences=2)))
        await served.until(lambda: len(pool.runs) == 2)
        ask = oe.AbortRequest(request_id="r1") if target == "one" else oe.AbortRequest(all_requests=oe.AllRequests())
        done = await control.Abort(ask)
        assert done.status == oe.ABORT_STATUS_ABORTED
        assert set(pool.cancelled) == {1, 2}
        answers = await answers_of(call)
        again = await control.Abort(oe.AbortRequest(request_id="r1"))
        never = await refused(control.Abort(oe.AbortRequest(request_id="r2")))
        none = await refused(control.Abort(oe.AbortRequest()))
        session = await refused(control.Abort(oe.AbortRequest(kv_session=oe.KvSessionRef(session_id="a"))))
    ends = [answer for answer in answers if answer.HasField("finished")]
    assert [answer.finished.reason for answer in ends] == [oe.FINISH_REASON_CANCELLED] * 2
    assert ends[-1].HasField("usage")
    codes = grpc.StatusCode
    assert again.status == oe.ABORT_STATUS_ALREADY_FINISHED
    assert (never.code, none.code, session.code) == (codes.NOT_FOUND, codes.INVALID_ARGUMENT, codes.NOT_FOUND)


async def test_an_abort_behind_the_end_is_no_error(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sidecars abort what their caller leaves, and cannot know that it has ended meanwhile."""
    monkeypatch.setattr(servicer, "MAX_ENDED", 2)
    ids = ("r1", "r2", "r3")
    async with serve(speaking(70)) as served:
        control = oe_grpc.ControlStub(served.channel)
        for request_id in ids:
            await answers_of(inference(served).Generate(request(request_id=request_id)))
        forgotten = await refused(control.Abort(oe.AbortRequest(request_id="r1")))
        done = [await control.Abort(oe.AbortRequest(request_id=each)) for each in ids[1:]]
    assert forgotten.code is grpc.StatusCode.NOT_FOUND
    assert [each.status for each in done] == [oe.ABORT_STATUS_ALREADY_FINISHED] * 2


async def test_a_caller_that_leaves_frees_its_request(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.tokens([70]))) as served:
        call = inference(served).Generate(request())
        await call.read()
        call.cancel()
        await served.until(lambda: served.pool.cancelled == [1])
        await asyncio.sleep(0)


async def test_more_outputs_than_a_worker_can_hold_are_refused_by_the_callers_name(serve: Any) -> None:
    async with serve() as served:
        asked = request(sampling=oe.SamplingParams(num_sequences=9))
        refusal = await refused(inference(served).Generate(asked))
    assert refusal.reason == "EXCEEDS_CAPACITY"
    assert refusal.message == "sampling.num_sequences: 9 are more than the 8 that a worker runs and queues"
