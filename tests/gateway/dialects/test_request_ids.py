"""A request id that no header can carry is refused by its field, in every dialect; never a defect of the gateway."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from octavo.v1 import admin_pb2, common_pb2
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway import kserve_calls
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.rpc_errors import Refusal, refused

UNFIT = ["é", "日本", "a\nb", "a\x00b", "\x7f", "a\tb", "\u2028", "😀"]
TOO_LONG = "x" * 200_000  # a trailer of that size would cost the caller the whole status
IDS = common_pb2.TokenIds(ids=[4, 5])
Call = Callable[[Any, str], Any]

OURS: dict[str, tuple[Call, str]] = {
    "Generate": (lambda s, i: s.inference.Generate(pb.GenerateRequest(request_id=i, token_ids=IDS)), "request_id"),
    "Complete": (
        lambda s, i: s.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(request_id=i, token_ids=IDS))),
        "generate.request_id",
    ),
    "Embed": (
        lambda s, i: s.inference.Embed(pb.EmbedRequest(request_id=i, inputs=[pb.EmbedInput(token_ids=IDS)])),
        "request_id",
    ),
    "Abort": (lambda s, i: s.admin.Abort(admin_pb2.AbortRequest(request_id=i)), "request_id"),
}


def _is_refused_by(refusal: Refusal, field: str) -> None:
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refusal.fields == (field,)
    assert refusal.request_id in ("", None)


@pytest.mark.parametrize("method", OURS)
async def test_our_own_methods_name_the_field(serve: Any, method: str) -> None:
    call, field = OURS[method]
    async with serve(FakePool(), admin_address="127.0.0.1:0") as served:
        for request_id in [*UNFIT, "a b", TOO_LONG]:
            _is_refused_by(await refused(call(served, request_id)), field)
        assert served.pool.runs == []


async def test_vllms_methods_name_the_field(serve: Any, vllm_stub: Any) -> None:
    from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

    prompt = vllm.TokenizedInput(input_ids=[5, 6])
    async with serve(FakePool()) as served:
        stub = vllm_stub(served.channel)
        for request_id in [*UNFIT, TOO_LONG]:
            generate = vllm.GenerateRequest(request_id=request_id, tokenized=prompt)
            _is_refused_by(await refused(stub.Generate(generate)), "request_id")
            embed = vllm.EmbedRequest(request_id=request_id, tokenized=prompt)
            _is_refused_by(await refused(stub.Embed(embed)), "request_id")
            abort = vllm.AbortRequest(request_ids=["r1", request_id])
            _is_refused_by(await refused(stub.Abort(abort)), "request_ids[1]")
        assert served.pool.runs == []


async def test_kserves_methods_name_the_field(serve: Any) -> None:
    async with serve(kserve_calls.speaking(5)) as served:
        for request_id in UNFIT:
            asked = kserve_calls.request()
            asked.id = request_id
            _is_refused_by(await refused(kserve_calls.stub_of(served).ModelInfer(asked)), "id")
            (answer,) = await kserve_calls.stream(served, asked)
            assert answer.error_message.startswith("[INVALID_ARGUMENT] INVALID_FIELD: id: ")
        asked = kserve_calls.request()
        asked.id = "request 7 of mine"  # Triton's callers may write spaces
        assert (await kserve_calls.stub_of(served).ModelInfer(asked)).id == asked.id
