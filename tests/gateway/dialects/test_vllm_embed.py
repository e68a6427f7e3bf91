"""VllmEngine's Embed over a real channel."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto")
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from octavo.wire.messages import Pooling
from tests.support.gateway.fake_pool import FakePool, busy
from tests.support.gateway.rpc_errors import refused

Stub = Callable[[Any], Any]


def request(*ids: int) -> vllm.EmbedRequest:
    return vllm.EmbedRequest(request_id="e1", tokenized=vllm.TokenizedInput(original_text="?", input_ids=ids))


async def test_a_prompt_becomes_the_last_tokens_vector_of_length_one(serve: Any, vllm_stub: Stub) -> None:
    async with serve(FakePool(on_run=lambda run: run.embed([3.0, 0.0, -4.0]))) as served:
        answer = await vllm_stub(served.channel).Embed(request(5, 6, 7))
        (run,) = served.pool.runs
    assert answer.embedding == pytest.approx([0.6, 0.0, -0.8])
    assert (answer.prompt_tokens, answer.embedding_dim) == (3, 3)
    assert (run.prompt_ids.tolist(), run.request.pooling) == ([5, 6, 7], Pooling.LAST_TOKEN)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (vllm.EmbedRequest(request_id="e1"), "tokenized.input_ids"),
        (request(1, 600), "tokenized.input_ids[1]"),
        (vllm.EmbedRequest(request_id="x" * 200, tokenized=request(1).tokenized), "request_id"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_path(serve: Any, vllm_stub: Stub, asked: Any, field: str) -> None:
    async with serve() as served:
        refusal = await refused(vllm_stub(served.channel).Embed(asked))
        assert served.pool.runs == []
    assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))


async def test_a_full_worker_and_a_caller_that_leaves(serve: Any, vllm_stub: Stub) -> None:
    async with serve(FakePool(refuse=[busy()])) as served:
        stub = vllm_stub(served.channel)
        assert (await refused(stub.Embed(request(1)))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        call = stub.Embed(request(1))
        await served.until(lambda: served.pool.runs)
        call.cancel()
        await served.until(lambda: served.pool.cancelled == [served.pool.runs[0].handle])
