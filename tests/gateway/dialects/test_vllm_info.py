"""What VllmEngine tells gateways in front of us."""

import asyncio
import hashlib
import io
import random
import zipfile
from collections.abc import Callable
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto")
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

from octavo.gateway.config import Dialects, RequestLimits
from octavo.gateway.dialects.vllm import servicer as tokenizer_zip
from octavo.gateway.dialects.vllm import translate as vllm_fields
from octavo.gateway.dialects.vllm.info import model_info
from octavo.gateway.dialects.vllm.servicer import archive_of
from octavo.wire.messages import AdminReply
from tests.support.gateway.fake_pool import FakePool, model_card, worker_view
from tests.support.gateway.rpc_errors import refused
from tests.support.gateway.tokenizers_tiny import tiny_files

Stub = Callable[[Any], Any]


def fields(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


async def test_the_model_is_told_without_paths_of_the_server(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        info = await vllm_stub(served.channel).GetModelInfo(vllm.GetModelInfoRequest())
    defaults = '{"temperature": 0.5, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.125}'
    assert info.default_sampling_params_json == defaults
    info.ClearField("default_sampling_params_json")
    assert info == vllm.GetModelInfoResponse(
        model_path="tiny",
        tokenizer_path="tiny",
        served_model_name="tiny",
        is_generation=True,
        max_context_length=256,
        max_req_input_len=255,
        vocab_size=600,
        architectures=["Qwen2ForCausalLM"],
        eos_token_ids=[0],
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (b'{"model_type": "qwen2", "pad_token_id": 7, "bos_token_id": null}', ("qwen2", 7, 0)),
        (b'{"pad_token_id": -1, "bos_token_id": 99999999999}', ("", 0, 0)),
        (b"[]", ("", 0, 0)),
        (b"{", ("", 0, 0)),
    ],
)
def test_what_the_card_does_not_say_is_read_from_the_checkpoints_config(
    config: bytes, expected: tuple[str, int, int]
) -> None:
    info = model_info(model_card(), {"config.json": config})
    assert (info.model_type, info.pad_token_id, info.bos_token_id) == expected


async def test_health_follows_the_workers_and_the_drain(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        stub = vllm_stub(served.channel)

        async def healthy() -> bool:
            return bool((await stub.HealthCheck(vllm.HealthCheckRequest())).healthy)

        assert await healthy()
        check = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
        assert (await health_pb2_grpc.HealthStub(served.channel).Check(check)).status == 1
        served.pool.set_views()
        assert not await healthy()
        assert (await refused(stub.GetModelInfo(vllm.GetModelInfoRequest()))).reason == "NO_WORKER"
        served.pool.set_views(worker_view())
        served.gateway.begin_drain(0)
        assert not await healthy()


async def test_server_and_loads_are_those_of_all_workers(serve: Any, vllm_stub: Stub) -> None:
    tokens = {"num_queried_tokens": 400, "num_hit_tokens": 150}
    busy = worker_view("w1", num_running=3, num_waiting=2, num_free_blocks=10, num_cached_blocks=6, **tokens)
    other = worker_view(card=model_card(kv_cache_dtype="fp8"), num_queried_tokens=200, num_hit_tokens=0)
    async with serve(FakePool(views=[other, busy])) as served:
        stub = vllm_stub(served.channel)
        info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
    assert info.kv_cache_dtype == "fp8"
    names = ("server_type", "block_size", "max_num_seqs", "active_requests", "is_paused", "model_dtype")
    assert fields(info, *names) == dict(zip(names, ("vllm-grpc", 16, 8, 0, False, "float32"), strict=True))
    assert info.constrained_decoding_start == "first_token"  # which shapes the calls that smg forces
    assert load == vllm.SchedulerLoad(
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_total_reqs=5,
        num_used_tokens=48 * 16,
        max_total_num_tokens=128 * 16,
        token_usage=48 / 128,
        cache_hit_rate=150 / 600,
        utilization=3 / 8,
        max_running_requests=8,
    )


async def test_the_tokenizer_comes_as_a_zip_in_chunks_with_its_digest_at_the_end(
    serve: Any, vllm_stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_zip, "CHUNK_BYTES", 1000)
    async with serve() as served:
        call = vllm_stub(served.channel).GetTokenizer(common.GetTokenizerRequest())
        chunks = [chunk async for chunk in call]
    data = b"".join(chunk.data for chunk in chunks)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == tiny_files()
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    assert max(len(chunk.data) for chunk in chunks) == 1000
    assert len(chunks) == -(-len(data) // 1000) > 1


async def test_a_tokenizer_that_nobody_reads_is_not_kept_for_ever(
    serve: Any, vllm_stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(60), serve(limits=RequestLimits(write_stall_s=0.2)) as served:
        files = {"tokenizer.json": random.Random(1).randbytes(16 << 20)}  # more than any window
        monkeypatch.setattr(served.gateway.models, "files_of", lambda card: files)
        call = vllm_stub(served.channel).GetTokenizer(common.GetTokenizerRequest())
        calls = served.gateway.listeners._unread_calls.calls
        await served.until(lambda: any(each.done() for each in calls))
        refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")


def test_the_same_files_give_the_same_archive_and_a_full_last_chunk_is_the_last() -> None:
    files = {"b.json": b"2" * 5000, "a.json": b"1"}
    archive = archive_of(files)
    assert archive == archive_of(dict(reversed(files.items())))
    assert list(archive.chunks()) == [(archive.data, archive.sha256)]


async def test_flush_says_how_much_and_whether_every_worker_answered(serve: Any, vllm_stub: Stub) -> None:
    replies = [("w0", AdminReply(epoch="e1", query_id=1, num_flushed_blocks=5))]
    async with serve(FakePool(replies=replies)) as served:
        stub = vllm_stub(served.channel)
        done = await stub.FlushCache(common.FlushCacheRequest())
        served.pool.replies = []
        silent = await stub.FlushCache(common.FlushCacheRequest(timeout_s=1))
    assert served.pool.queries == [{"audit": False, "flush": True, "model": None}] * 2
    assert done == common.FlushCacheResponse(success=True, message="5 blocks of 1 of 1 workers")
    assert silent == common.FlushCacheResponse(success=False, message="0 blocks of 0 of 1 workers")


async def test_what_is_not_offered_is_unimplemented(serve: Any, vllm_stub: Stub) -> None:
    async with serve() as served:
        stub = vllm_stub(served.channel)
        calls = {
            "StartProfile": stub.StartProfile(common.StartProfileRequest()),
            "StopProfile": stub.StopProfile(common.StopProfileRequest()),
        }
        refusals = {name: await refused(call) for name, call in calls.items()}
    assert {each.code for each in refusals.values()} == {grpc.StatusCode.UNIMPLEMENTED}
    assert {each.reason for each in refusals.values()} == {"NOT_OFFERED"}


@pytest.mark.parametrize(("rank", "is_there"), [(None, True), (0, True), (1, False), (-1, False)])
async def test_the_load_of_a_rank_that_is_not_there_is_refused(
    serve: Any, vllm_stub: Stub, rank: int | None, is_there: bool
) -> None:
    async with serve() as served:
        call = vllm_stub(served.channel).GetLoads(vllm.GetLoadsRequest(dp_rank=rank))
        if is_there:
            assert [load.dp_rank for load in (await call).loads] == [0]
        else:
            assert (await refused(call)).fields == ("dp_rank",)


@pytest.mark.parametrize(("dialects", "is_there"), [(Dialects.INSTALLED, True), (Dialects.NONE, False)])
async def test_the_dialect_is_there_by_default_and_can_be_left_out(
    serve: Any, vllm_stub: Stub, dialects: Dialects, is_there: bool
) -> None:
    async with serve(dialects=dialects) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name async for reply in call for service in reply.list_services_response.service}
        assert ("vllm.grpc.engine.VllmEngine" in names) == is_there
        if not is_there:
            code = (await refused(vllm_stub(served.channel).HealthCheck(vllm.HealthCheckRequest()))).code
            assert code is grpc.StatusCode.UNIMPLEMENTED


def test_every_field_that_is_said_to_be_served_exists() -> None:
    for name, served in vllm_fields.SERVED.items():
        assert served <= set(vllm.DESCRIPTOR.message_types_by_name[name].fields_by_name)
