"""vllm.Inference and vllm.Control over a real channel: what comes, what the worker is asked for, what is refused."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from octavo.vllm import vllm_pb2 as vllm
from octavo.vllm import vllm_pb2_grpc as vllm_grpc
from octavo.wire.messages import Capacity, Grammar, GrammarKind, SamplingParams, TokenLogprobs, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun, speaking, worker_view
from tests.support.gateway.rpc_errors import refused

IDS = vllm.TokenIds(ids=[5, 6, 7])
INFO = vllm.FinishInfo


def request(**fields: Any) -> vllm.GenerateRequest:
    fields = {"request_id": "r1", "token_ids": IDS} | fields
    return vllm.GenerateRequest(**{name: value for name, value in fields.items() if value is not None})


def scoring() -> FakePool:
    def speak(run: FakeRun) -> None:
        sink: Any = run.sink
        if hasattr(sink, "on_prompt_logprobs") and run.request.sampling.num_prompt_logprobs is not None:
            sink.on_prompt_logprobs([TokenLogprobs(-1.0, (9, 6), (-0.5, -1.0)), TokenLogprobs(-2.0, (8,), (-0.1,))])
        run.tokens([70], [TokenLogprobs(-0.25, (70, 71), (-0.25, -1.5))])
        run.tokens([71], [TokenLogprobs(-3.0, (70,), (-0.5,))])
        run.finish()

    return FakePool(on_run=speak)


def inference(served: Any) -> Any:
    return vllm_grpc.InferenceStub(served.channel)


def control(served: Any) -> Any:
    return vllm_grpc.ControlStub(served.channel)


async def read(call: Any) -> list[vllm.GenerateResponse]:
    return [answer async for answer in call]


async def test_a_stream_is_the_prompt_what_is_new_and_an_end(serve: Any) -> None:
    options = vllm.ResponseOptions(output_token_ids=True, prompt_token_ids=True)
    async with serve(speaking(70, 71, 72)) as served:
        first, *pieces, end = await read(inference(served).GenerateStream(request(response=options)))
        whole = await inference(served).Generate(request(response=options))
    assert first == vllm.GenerateResponse(prompt_info=vllm.PromptInfo(num_prompt_tokens=3, token_ids=[5, 6, 7]))
    assert [token for piece in pieces for token in piece.outputs.token_ids] == [70, 71, 72]
    assert sum(piece.outputs.num_tokens for piece in pieces) == 3
    assert not any(piece.outputs.HasField("finish_info") for piece in pieces)
    assert end.outputs.finish_info == INFO(num_output_tokens=3, finish_reason=INFO.LENGTH)
    text = "".join(piece.outputs.text for piece in pieces)
    assert text
    assert whole == vllm.GenerateResponse(
        prompt_info=first.prompt_info,
        outputs=vllm.SequenceOutput(
            text=text, num_tokens=3, token_ids=[70, 71, 72], finish_info=end.outputs.finish_info
        ),
    )


async def test_only_what_is_asked_for_is_told(serve: Any) -> None:
    async with serve(speaking(70, 71)) as served:
        plain = await inference(served).Generate(request())
        silent = await inference(served).Generate(request(response=vllm.ResponseOptions(output_text=False)))
    assert plain.outputs.text
    assert not plain.outputs.token_ids
    assert not plain.prompt_info.token_ids
    assert (silent.outputs.text, silent.outputs.num_tokens) == ("", 2)


async def test_how_text_is_written_says_nothing_where_none_is_wanted(serve: Any) -> None:
    for skips in (True, False):
        options = vllm.ResponseOptions(output_text=False, output_token_ids=True, skip_special_tokens=skips)
        async with serve(speaking(70, 71)) as served:
            whole = await inference(served).Generate(request(response=options))
        assert (list(whole.outputs.token_ids), whole.outputs.text) == ([70, 71], "")


async def test_several_outputs_stream_and_do_not_fit_into_one_response(serve: Any) -> None:
    sampling = vllm.RandomSampling(num_sequences=3)
    async with serve(speaking(70, 71)) as served:
        answers = await read(inference(served).GenerateStream(request(sampling=sampling)))
        refusal = await refused(inference(served).Generate(request(sampling=sampling)))
    ends = [answer.outputs for answer in answers if answer.outputs.HasField("finish_info")]
    assert sorted(end.index for end in ends) == [0, 1, 2]
    assert refusal.fields == ("sampling.num_sequences",)


async def test_zero_is_unset_and_an_unset_temperature_greedy(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        await inference(served).Generate(request())
        await inference(served).Generate(request(sampling=vllm.RandomSampling(seed=0), priority=7))
    first, second = (run.request for run in served.pool.runs)
    assert first.sampling.temperature == 0
    assert first.sampling.max_tokens == 253  # to the end of the context
    assert second.sampling.seed == 0
    assert (first.priority, second.priority) == (0, -7)  # lower runs first in vLLM


async def test_a_seed_of_minus_one_draws_one_and_others_below_zero_are_seeds(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        for seed in (-1, -1, -2):
            await inference(served).Generate(request(sampling=vllm.RandomSampling(seed=seed)))
    first, second, third = (run.request.sampling.seed for run in served.pool.runs)
    assert first != second
    assert third == 2**64 - 2


RANKS = [("0", True), (" 0 ", True), ("1", False), ("-1", False), ("a", False), ("", False), ("4294967296", False)]


@pytest.mark.parametrize(("rank", "is_there"), RANKS)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_router_may_choose_rank_0(serve: Any, method: str, rank: str, is_there: bool) -> None:
    metadata = (("x-data-parallel-rank", rank),)
    async with serve(speaking(70)) as served:
        call = getattr(inference(served), method)(request(), metadata=metadata)
        if is_there:
            assert await (call if method == "Generate" else read(call))
        else:
            assert (await refused(call)).fields == ("x-data-parallel-rank",)
    assert len(served.pool.runs) == is_there


async def test_everything_that_is_served_reaches_the_worker(serve: Any) -> None:
    whole = request(
        temperature=0.5,
        sampling=vllm.RandomSampling(top_k=3, top_p=0.25, min_p=0.125, seed=2**62),
        decoding=vllm.DecodingParameters(
            presence_penalty=-1.5, frequency_penalty=1.5, repetition_penalty=2.0, logit_bias={5: 1.0},
            allowed_token_ids=[5, 6], regex="a+",
        ),
        stopping=vllm.StoppingCriteria(max_new_tokens=20, min_new_tokens=2, stop_token_ids=[9], ignore_eos=True),
        response=vllm.ResponseOptions(output_logprobs=True, output_candidates=vllm.CandidateTokens(top_n=2)),
        kv=vllm.KVCacheParameters(cache_salt="s"),
        truncate_prompt_tokens=2,
        session_id="any",
    )  # fmt: skip
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        await inference(served).Generate(whole)
    run = served.pool.runs[0].request
    assert run.sampling == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**62, presence_penalty=-1.5, frequency_penalty=1.5,
        repetition_penalty=2.0, logit_bias={5: 1.0}, allowed_token_ids=(5, 6), max_tokens=20, min_tokens=2,
        stop_token_ids=(9,), ignore_eos=True, num_logprobs=2, grammar=Grammar(kind=GrammarKind.REGEX, source="a+"),
    )  # fmt: skip
    assert np.frombuffer(run.prompt_ids, "<i4").tolist() == [6, 7]
    assert run.cache_salt == "s"


@pytest.mark.parametrize("streams", [True, False])
async def test_log_probabilities_are_parallel_lists(serve: Any, streams: bool) -> None:
    top = vllm.CandidateTokens(top_n=2)
    options = vllm.ResponseOptions(
        prompt_logprobs=True, prompt_candidates=top, output_logprobs=True, output_candidates=top
    )
    async with serve(scoring()) as served:
        if streams:
            first, *pieces, _ = await read(inference(served).GenerateStream(request(response=options)))
            output = vllm.SequenceOutput()
            for piece in pieces:
                output.MergeFrom(piece.outputs)
            prompt = first.prompt_info
        else:
            whole = await inference(served).Generate(request(response=options))
            prompt, output = whole.prompt_info, whole.outputs
    assert list(prompt.logprobs) == [0.0, -1.0, -2.0]
    assert list(prompt.ranks) == [0, 2, 0]
    assert [[(each.id, each.rank) for each in at.tokens] for at in prompt.candidate_tokens] == [[], [(9, 1)], [(8, 1)]]
    assert list(output.logprobs) == [-0.25, -3.0]
    assert list(output.ranks) == [1, 0]
    assert [[each.id for each in at.tokens] for at in output.candidate_tokens] == [[71], [70]]


@pytest.mark.parametrize(
    ("pool", "info"),
    [
        (speaking(70, 9, end=(WireFinishReason.STOP, 9)), INFO(stop_token_id=9, finish_reason=INFO.STOP)),
        (speaking(70, 0, end=(WireFinishReason.STOP, 0)), INFO(eos_token_id=0, finish_reason=INFO.STOP)),
        (FakePool(), INFO(stop_string="HI", finish_reason=INFO.STOP)),
    ],
    ids=["token", "end", "text"],
)
async def test_what_ended_an_output_is_told(serve: Any, pool: FakePool, info: INFO) -> None:
    stopping = vllm.StoppingCriteria(stop_token_ids=[9], stop_strings=["HI"])
    async with serve(pool) as served:
        if pool.on_run is None:
            texts = served.gateway.models.text_of(pool.cards()["tiny"]).table.all_bytes
            pool.on_run = lambda run: run.tokens([texts.index(b"H"), texts.index(b"I")])
        whole = await inference(served).Generate(request(stopping=stopping))
    info.num_output_tokens = 2
    assert whole.outputs.finish_info == info


@pytest.mark.parametrize("has_text", [True, False])
async def test_text_that_the_end_makes_certain_comes_with_it(serve: Any, has_text: bool) -> None:
    """Readers as Dynamo's sidecar pass over what has neither tokens nor an end."""
    stopping, options = vllm.StoppingCriteria(stop_strings=["HIM"]), vllm.ResponseOptions(output_text=has_text)
    tasks: set[asyncio.Task[None]] = set()

    async def speak(run: FakeRun) -> None:
        for token_id in (letters.index(b"H"), letters.index(b"I")):
            run.tokens([token_id])
            await asyncio.sleep(0.02)
        run.finish()

    pool = FakePool(on_run=lambda run: tasks.add(asyncio.create_task(speak(run))))
    async with serve(pool) as served:
        letters = served.gateway.models.text_of(pool.cards()["tiny"]).table.all_bytes
        asked = request(stopping=stopping, response=options)
        _, *pieces, end = await read(inference(served).GenerateStream(asked))
        whole = await inference(served).Generate(asked)
    wanted = "HI" * has_text
    assert [(piece.outputs.text, piece.outputs.num_tokens) for piece in pieces] == [("", 1), ("", 1)]
    assert (end.outputs.text, end.outputs.num_tokens) == (wanted, 0)
    assert end.outputs.finish_info == INFO(num_output_tokens=2, finish_reason=INFO.LENGTH)
    assert whole.outputs.text == wanted


@pytest.mark.parametrize("streams", [True, False])
async def test_an_abort_gives_what_came_before_it_and_an_end(serve: Any, streams: bool) -> None:
    pool = FakePool(on_run=lambda run: run.tokens([70]), answers_cancels=False)
    options = vllm.ResponseOptions(output_token_ids=True)
    async with serve(pool) as served:
        stub = inference(served)
        call = (stub.GenerateStream if streams else stub.Generate)(request(response=options))
        await served.until(lambda: pool.runs)
        await control(served).Abort(vllm.AbortRequest(request_ids=["unknown", "r1"]))
        answers = await read(call) if streams else [await call]
        assert set(pool.cancelled) == {1}
        assert served.gateway.tracker.admission.counts().num_entered == 0
    assert [token for answer in answers for token in answer.outputs.token_ids] == [70]
    assert answers[-1].outputs.finish_info.finish_reason == INFO.ABORTED


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
async def test_a_request_that_is_aborted_while_it_is_tokenized_ends_too(serve: Any, num_outputs: int) -> None:
    """Every output of it."""
    async with serve() as served:
        stub, gate = inference(served), asyncio.Event()

        async def hang(*_: Any, **__: Any) -> None:
            await gate.wait()

        served.gateway.text.run_steps = hang
        asked = vllm.GenerateRequest(request_id="r1", text="Hello", sampling={"num_sequences": num_outputs})
        for call in [stub.GenerateStream] + [stub.Generate] * (num_outputs < 2):
            begun = call(asked)
            await served.until(lambda: served.gateway.tracker.admission.holds("r1"))
            await control(served).Abort(vllm.AbortRequest(request_ids=["r1"]))
            answers = await read(begun) if call is stub.GenerateStream else [await begun]
            ends = [(each.outputs.index, each.outputs.finish_info.finish_reason) for each in answers]
            assert ends == [(index, INFO.ABORTED) for index in range(num_outputs or 1)]
        assert served.pool.runs == []


async def test_a_lost_worker_is_a_status(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.lose())) as served:
        refusal = await refused(inference(served).GenerateStream(request()))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")


SCORES = vllm.CandidateTokens(all=True)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": None}, "prompt"),
    ({"media": [vllm.MediaItem(url="http://a")]}, "media"),
    ({"lora_name": "a"}, "lora_name"),
    ({"temperature": -1.0}, "temperature"),
    ({"sampling": vllm.RandomSampling(top_p=2)}, "sampling.top_p"),
    ({"sampling": vllm.RandomSampling(num_sequences=129)}, "sampling.num_sequences"),
    ({"decoding": vllm.DecodingParameters(repetition_penalty=-1)}, "decoding.repetition_penalty"),
    ({"decoding": vllm.DecodingParameters(logit_bias={600: 1})}, "decoding.logit_bias[600]"),
    ({"decoding": vllm.DecodingParameters(structural_tag="a")}, "decoding.structural_tag"),
    ({"decoding": vllm.DecodingParameters(json="[")}, "decoding.json"),
    ({"decoding": vllm.DecodingParameters(regex="(")}, "decoding.regex"),
    ({"decoding": vllm.DecodingParameters(grammar="no rule")}, "decoding.grammar"),
    ({"decoding": vllm.DecodingParameters(choice=vllm.DecodingParameters.StringChoices())}, "decoding.choice.choices"),
    ({"stopping": vllm.StoppingCriteria(max_new_tokens=1, min_new_tokens=2)}, "stopping.min_new_tokens"),
    ({"stopping": vllm.StoppingCriteria(stop_strings=[""])}, "stopping.stop_strings[0]"),
    ({"response": vllm.ResponseOptions(output_candidates=SCORES)}, "response.output_candidates.all"),
    (
        {"response": vllm.ResponseOptions(output_candidates=vllm.CandidateTokens(top_n=1))},
        "response.output_candidates",
    ),
    (
        {"response": vllm.ResponseOptions(prompt_logprobs=True, prompt_candidates=vllm.CandidateTokens(top_n=21))},
        "response.prompt_candidates.top_n",
    ),
]


@pytest.mark.parametrize(("fields", "path"), REFUSED, ids=[f"{path}-{n}" for n, (_, path) in enumerate(REFUSED)])
async def test_what_is_not_served_is_refused_by_its_name(serve: Any, fields: dict[str, Any], path: str) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        refusal = await refused(inference(served).GenerateStream(request(**fields)))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert path in refusal.fields


async def test_what_can_be_the_prompt_is_told_in_this_contracts_words(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        refusal = await refused(inference(served).Generate(request(token_ids=None)))
    assert refusal.message == "prompt: one of text, token_ids must be set"


async def test_connector_parameters_and_later_fields_are_refused(serve: Any) -> None:
    transfer = request()
    transfer.kv.kv_transfer_params.update({"do_remote_decode": True})
    later = vllm.GenerateRequest.FromString(request().SerializeToString() + b"\xfa\x01\x01a")  # field 31
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        assert (await refused(inference(served).Generate(transfer))).fields == ("kv.kv_transfer_params",)
        assert (await refused(inference(served).Generate(later))).fields == ("#31",)


async def test_the_server_and_its_model_are_told(serve: Any) -> None:
    async with serve(FakePool(views=[worker_view("w1"), worker_view("w2")])) as served:
        info = await control(served).GetServerInfo(vllm.GetServerInfoRequest())
        model = await control(served).GetModelInfo(vllm.GetModelInfoRequest())
        paused = await control(served).IsPaused(vllm.IsPausedRequest())
        sleeping = await control(served).IsSleeping(vllm.IsSleepingRequest())
        sources = await control(served).GetKvEventSources(vllm.GetKvEventSourcesRequest())
    one = worker_view()
    assert info.instance_id
    assert (info.kv_block_size, info.total_kv_blocks) == (one.capacity.block_size, 2 * one.capacity.num_blocks)
    assert info.effective_attention_block_size == one.capacity.block_size  # what Dynamo's sidecar cuts prompts by
    assert info.max_model_len == one.card.max_model_len
    assert info.rl_capabilities == vllm.RlCapabilities()
    assert (model.model_id, model.supports_text_input, model.supports_lora) == ("tiny", True, False)
    assert (paused.paused, sleeping.sleeping, len(sources.sources)) == (False, False, 0)


OFFERED = {"GetServerInfo", "GetModelInfo", "Shutdown", "Abort", "GetKvEventSources", "IsPaused", "IsSleeping"}
METHODS = vllm.DESCRIPTOR.services_by_name["Control"].methods_by_name


@pytest.mark.parametrize("method", sorted(OFFERED))
async def test_a_later_field_is_refused_and_nothing_is_done(serve: Any, method: str) -> None:
    """GetModelInfo of a named model is not that of ours, a Shutdown with conditions no drain."""
    ask = getattr(vllm, METHODS[method].input_type.name).FromString(b"\xfa\x01\x01a")  # field 31
    async with serve(FakePool(views=[worker_view("w1")])) as served:
        assert (await refused(getattr(control(served), method)(ask))).fields == ("#31",)
        assert not served.gateway.tracker.is_draining


async def test_blocks_of_two_sizes_have_no_size(serve: Any) -> None:
    larger = Capacity(num_blocks=64, block_size=32, max_num_seqs=4, max_waiting=4, max_batch_tokens=64)
    views = [worker_view("w1"), worker_view("w2", capacity=larger)]
    async with serve(FakePool(views=views)) as served:
        info = await control(served).GetServerInfo(vllm.GetServerInfoRequest())
    assert (info.kv_block_size, info.HasField("effective_attention_block_size")) == (0, False)


# Every server of vLLM has these; the others need a flag at its start.
ALWAYS = {"PauseGeneration", "ResumeGeneration", "UpdateWeightVersion", "GetWeightVersion"}


@pytest.mark.parametrize("method", sorted(set(METHODS) - OFFERED))
async def test_what_is_not_offered_is_refused_as_by_a_server_without_it(serve: Any, method: str) -> None:
    ask = getattr(vllm, METHODS[method].input_type.name)()
    async with serve() as served:
        refusal = await refused(getattr(control(served), method)(ask))
    codes = grpc.StatusCode
    assert refusal.code is (codes.UNIMPLEMENTED if method in ALWAYS else codes.FAILED_PRECONDITION)
    assert refusal.reason == "NOT_OFFERED"
    assert method in refusal.message


async def test_a_shutdown_drains_the_gateway(serve: Any) -> None:
    async with serve() as served:
        await control(served).Shutdown(vllm.ShutdownRequest())
        await served.until(lambda: served.gateway.tracker.is_draining)
        refusal = await refused(inference(served).Generate(request()))
    assert refusal.reason == "DRAINING"


async def test_more_outputs_than_a_worker_can_hold_are_refused_by_the_callers_name(serve: Any) -> None:
    async with serve() as served:
        asked = request(sampling=vllm.RandomSampling(num_sequences=9))
        refusal = await refused(inference(served).GenerateStream(asked))
    assert refusal.reason == "EXCEEDS_CAPACITY"
    assert refusal.message == "sampling.num_sequences: 9 are more than the 8 that a worker runs and queues"
