"""The whole service, driven by the stubs that other gateways drive vLLM with."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto")
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from octavo.wire.messages import SamplingParams
from octavo.worker.runners.oracle.model import OracleModel, oracle_tokens
from tests.support.gateway.rpc_errors import refused
from tests.support.services.service import Service, serve

ORACLE = ("--runner=oracle", "--num-blocks=512", "--max-num-seqs=64", "--audit-every-steps=1", "--max-model-len=2048")


def request(index: int, num_tokens: int, *, stream: bool = True) -> vllm.GenerateRequest:
    """As the field's load generator sends them, with a seed."""
    params = vllm.SamplingParams(temperature=0.6, top_p=1, max_tokens=num_tokens, ignore_eos=True, n=1, seed=index)
    prompt = vllm.TokenizedInput(input_ids=[index % 200 + 1, 2, 3])
    return vllm.GenerateRequest(request_id=f"r{index}", stream=stream, tokenized=prompt, sampling_params=params)


def expected(sent: vllm.GenerateRequest, model: OracleModel, index: int = 0) -> list[int]:
    """What the oracle's slow reference says. index: of the output."""
    params = sent.sampling_params
    sampling = SamplingParams(seed=params.seed + index, max_tokens=params.max_tokens, ignore_eos=True)
    return oracle_tokens(list(sent.tokenized.input_ids), sampling, model=model, max_total_tokens=2048)


async def answer(stub: Any, sent: vllm.GenerateRequest) -> tuple[list[int], str]:
    """All ids, and why they ended."""
    ids, reasons = list[int](), list[str]()
    async for response in stub.Generate(sent):
        ids += response.chunk.token_ids
        ids += response.complete.output_ids
        if response.HasField("complete"):
            reasons.append(response.complete.finish_reason)
    (reason,) = reasons
    return ids, reason


async def outputs(stub: Any, sent: vllm.GenerateRequest) -> dict[int, list[int]]:
    """All ids of each output."""
    ids: dict[int, list[int]] = {}
    async for response in stub.Generate(sent):
        message = response.chunk if response.HasField("chunk") else response.complete
        ids.setdefault(message.index, []).extend([*response.chunk.token_ids, *response.complete.output_ids])
    return ids


async def aborted_midway(stub: Any, sent: vllm.GenerateRequest) -> tuple[list[int], str]:
    """As smg does when its caller leaves: Abort, and read on."""
    ids, reason, has_asked = list[int](), "", False
    async for response in stub.Generate(sent):
        ids += response.chunk.token_ids
        reason = response.complete.finish_reason
        if len(ids) >= 5 and not has_asked:
            has_asked = True
            await stub.Abort(vllm.AbortRequest(request_ids=[sent.request_id, "nobody"]))
    return ids, reason


async def check(service: Service) -> None:
    """One service for all of it: its start is what costs."""
    async with grpc.aio.insecure_channel(service.target) as channel:
        stub = vllm_grpc.VllmEngineStub(channel)
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        model = OracleModel(vocab_size=info.vocab_size, eos_token_ids=tuple(info.eos_token_ids))
        sent = [request(index, 20 + index, stream=index % 2 == 0) for index in range(32)]
        long = request(100, 1500)
        aborted = asyncio.create_task(aborted_midway(stub, long))
        answers = await asyncio.gather(*(answer(stub, each) for each in sent))
        assert answers == [(expected(each, model), "length") for each in sent]

        ids, reason = await aborted
        assert reason == "abort"
        assert ids == expected(long, model)[: len(ids)]
        assert 5 <= len(ids) < 1500
        await asyncio.to_thread(service.wait_until_idle)
        audits = await asyncio.to_thread(service.audit)
        assert [(list(audit.violations), audit.num_active_blocks) for audit in audits] == [([], 0)]

        holder = stub.Generate(request(7, 1000))
        await holder.read()
        duplicate = await refused(stub.Generate(request(7, 10)))
        assert (duplicate.code, duplicate.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        holder.cancel()
        several = request(8, 10)
        several.sampling_params.n = 3
        assert await outputs(stub, several) == {index: expected(several, model, index) for index in range(3)}
        bad = request(9, 10)
        bad.sampling_params.structural_tag = "{}"
        refusal = await refused(stub.Generate(bad))
        assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("sampling_params.structural_tag",))
        await asyncio.to_thread(service.wait_until_idle)


async def test_a_service_gives_the_oracles_tokens_and_frees_what_is_aborted(
    tmp_path: Path, oracle_checkpoint: Path
) -> None:
    with serve(tmp_path, f"--model={oracle_checkpoint}", "--oracle-step-delay-s=0.002", *ORACLE) as service:
        await check(service)
