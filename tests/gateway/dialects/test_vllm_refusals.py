"""What VllmEngine does not serve is refused by its name; errors are statuses."""

from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto")
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from tests.support.gateway.fake_pool import FakePool, busy
from tests.support.gateway.rpc_errors import refused
from tests.support.gateway.vllm_calls import Stub, request


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
        while len(served.pool.runs) < 2:  # a pause of the machine may take all the time before a worker has the request
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


async def test_what_can_be_the_prompt_is_told_in_this_contracts_words(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        refusal = await refused(vllm_stub(served.channel).Generate(vllm.GenerateRequest()))
    assert (refusal.code, refusal.message) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "input: one of tokenized, text must be set",
    )


async def test_what_can_never_fit_is_refused_by_the_callers_name(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        stub = vllm_stub(served.channel)
        outputs = await refused(stub.Generate(vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams(n=9))))
        prompt = await refused(stub.Embed(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=[5] * 600))))
    assert {outputs.reason, prompt.reason} == {"EXCEEDS_CAPACITY"}
    assert outputs.message == "sampling_params.n: 9 are more than the 8 that a worker runs and queues"
    assert prompt.message.startswith("tokenized: ")
