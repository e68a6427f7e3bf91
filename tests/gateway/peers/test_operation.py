"""What operators see: admin service, model service, drain, stop, metrics, exposure."""

import asyncio
import urllib.request
from typing import Any

import grpc
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from octavo.gateway.config import Exposure, RequestLimits
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector
from octavo.gateway.rpc.addresses import AddressError, check_exposure, is_local, split_host_port
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import WorkerState
from octavo.v1 import admin_pb2, common_pb2, model_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import AdminReply, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, model_card, worker_view
from tests.support.gateway.rpc_errors import refused

REQUEST = pb.GenerateRequest(request_id="r1", token_ids=common_pb2.TokenIds(ids=[4]))


async def test_the_admin_service_is_off_by_default(serve: Any) -> None:
    from octavo.v1 import admin_pb2_grpc

    async with serve() as served:
        stub = admin_pb2_grpc.AdminServiceStub(served.channel)
        refusal = await refused(stub.GetLoad(admin_pb2.GetLoadRequest()))
        assert refusal.code is grpc.StatusCode.UNIMPLEMENTED


async def test_abort_ends_the_stream_of_its_caller(serve: Any, tmp_path: Any) -> None:
    async with serve(admin_address=f"unix:{tmp_path}/admin.sock") as served:
        call = asyncio.ensure_future(refused(served.inference.Generate(REQUEST)))
        await served.until(lambda: served.pool.runs)
        assert (await served.admin.Abort(admin_pb2.AbortRequest(request_id="r1"))).found
        refusal = await call
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "ABORTED")
        assert served.pool.cancelled == [1]
        assert not (await served.admin.Abort(admin_pb2.AbortRequest(request_id="r1"))).found
        assert (await refused(served.admin.Abort(admin_pb2.AbortRequest()))).fields == ("request_id",)


async def test_abort_reaches_a_request_that_is_still_being_tokenized(serve: Any, tmp_path: Any) -> None:
    async with serve(admin_address=f"unix:{tmp_path}/admin.sock") as served:
        release = asyncio.Event()

        async def slow(steps: Any, **_: Any) -> Any:
            await release.wait()

        served.gateway.text.run_steps = slow
        call = asyncio.ensure_future(refused(served.inference.Generate(pb.GenerateRequest(request_id="r2", text="x"))))
        await served.until(lambda: served.gateway.tracker.admission.holds("r2"))
        assert (await served.admin.Abort(admin_pb2.AbortRequest(request_id="r2"))).found
        refusal = await call
        assert (refusal.code, refusal.reason, refusal.request_id) == (grpc.StatusCode.ABORTED, "ABORTED", "r2")
        assert served.gateway.tracker.admission.counts().num_entered == 0
        assert served.pool.runs == []


async def test_load_audit_and_flush_say_what_the_workers_say(serve: Any, tmp_path: Any) -> None:
    reply = AdminReply(
        epoch="e1", query_id=1, num_blocks=64, num_free_blocks=60, num_cached_blocks=3, num_active_blocks=1,
        num_flushed_blocks=2, violations=("block 3 is lost",),
    )  # fmt: skip
    pool = FakePool(views=[worker_view(num_running=2, num_waiting=1)], replies=[("w0", reply), ("w1", reply)])
    async with serve(pool, admin_address=f"unix:{tmp_path}/admin.sock") as served:
        load = await served.admin.GetLoad(admin_pb2.GetLoadRequest())
        audits = (await served.admin.AuditBlocks(admin_pb2.AuditBlocksRequest())).audits
        flushed = await served.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
    assert list(load.workers) == [
        admin_pb2.WorkerLoad(
            worker_id="w0", model="tiny", num_running=2, num_waiting=1, num_blocks=64, num_free_blocks=60,
            num_cached_blocks=4, num_steps=7, heartbeat_age_s=0.25, epoch="e1",
        )
    ]  # fmt: skip
    assert audits[1] == admin_pb2.BlockAudit(
        worker_id="w1", violations=["block 3 is lost"], num_blocks=64, num_free_blocks=60, num_cached_blocks=3,
        num_active_blocks=1,
    )  # fmt: skip
    assert flushed.num_blocks == 4
    assert pool.queries == [
        {"audit": True, "flush": False, "model": None},
        {"audit": False, "flush": True, "model": None},
    ]


async def test_models_are_described_with_their_limits(serve: Any) -> None:
    views = [worker_view("w0"), worker_view("w1"), worker_view("w2", card=model_card("big"))]
    async with serve(FakePool(views=views)) as served:
        models = (await served.models.ListModels(model_pb2.ListModelsRequest())).models
        assert [model.name for model in models] == ["big", "tiny"]
        info = (await served.models.GetModel(model_pb2.GetModelRequest(model="tiny"))).model
        assert info == models[1]
        assert (await refused(served.models.GetModel(model_pb2.GetModelRequest()))).fields == ("model",)
        refusal = await refused(served.models.GetModel(model_pb2.GetModelRequest(model="x")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert (info.fingerprint, info.architecture, info.dtype) == ("fingerprint-of-tiny", "Qwen2ForCausalLM", "float32")
    assert (info.max_model_len, info.vocab_size, list(info.eos_token_ids)) == (256, 600, [0])
    assert (info.num_workers, info.kv_capacity_tokens) == (2, 2 * 64 * 16)
    assert info.default_sampling == pb.SamplingParams(
        temperature=0.5, top_p=0.75, top_k=20, min_p=0, repetition_penalty=1.125, presence_penalty=0,
        frequency_penalty=0,
    )  # fmt: skip
    assert info.limits == model_pb2.RequestLimits(
        max_message_bytes=4 * 1024 * 1024, max_stop_strings=64, max_logprobs=20, max_requests_per_worker=8
    )
    assert {"sampling.temperature", "chat.messages.role", "token_ids.ids"} <= set(info.supported_parameters)


async def test_tokenize_and_detokenize_are_inverse(serve: Any) -> None:
    async with serve() as served:
        text = "Hello 🦙 <|im_end|> world"
        ids = (await served.inference.Tokenize(pb.TokenizeRequest(text=text))).token_ids
        back = await served.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))
        seen = await served.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))
    assert 2 in ids
    assert (back.text, seen.text) == (text, "Hello 🦙  world")


# ---------------------------------------------------------------- drain and stop


async def test_a_drain_refuses_new_requests_and_lets_the_others_finish(serve: Any, tmp_path: Any) -> None:
    async with serve(admin_address=f"unix:{tmp_path}/admin.sock") as served:
        call = served.inference.Generate(REQUEST)
        await served.until(lambda: served.pool.runs)
        assert (await served.admin.Drain(admin_pb2.DrainRequest())).num_in_flight == 1
        await served.until(lambda: served.gateway.tracker.is_draining)
        for late in (
            served.inference.Generate(pb.GenerateRequest(text="x")),
            served.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(text="x"))),
            served.inference.Tokenize(pb.TokenizeRequest(text="x")),
            served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[3])),
        ):
            refusal = await refused(late)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert (refusal.tokens_delivered, refusal.pushback_ms) == (0, 500)
        assert not served.gateway.drained.is_set()
        assert served.pool.has_taken_leave
        served.pool.runs[0].finish()
        assert [event.WhichOneof("event") async for event in call] == ["started", "finished"]
        await served.until(served.gateway.drained.is_set)


async def test_after_the_grace_what_is_left_ends_with_draining(serve: Any) -> None:
    async with serve() as served:
        call = asyncio.ensure_future(refused(served.inference.Generate(REQUEST)))
        await served.until(lambda: served.pool.runs)
        served.gateway.begin_drain(0.05)
        refusal = await call
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await served.until(served.gateway.drained.is_set)
        assert served.pool.cancelled == [1]


async def test_a_stop_ends_streams_with_a_status(serve: Any) -> None:
    async with serve() as served:
        call = asyncio.ensure_future(refused(served.inference.Generate(REQUEST)))
        await served.until(lambda: served.pool.runs)
        await served.gateway.stop()
        refusal = await call
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert served.pool.has_taken_leave
        assert served.pool.is_closed
        await served.gateway.stop()


# ---------------------------------------------------------------- readers that do not read


@pytest.mark.parametrize("is_complete", [False, True])
async def test_a_reader_that_does_not_read_is_ended_and_its_worker_freed(serve: Any, is_complete: bool) -> None:
    pool = FakePool()
    request = pb.GenerateRequest(
        request_id="slow",
        token_ids=common_pb2.TokenIds(ids=[4]),
        output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS),
    )
    limits = RequestLimits(max_pending_tokens=10**9)
    async with serve(pool, limits=limits) as served:
        call = served.inference.Generate(request)
        await anext(aiter(call))
        stream = served.gateway.tracker.get("slow").stream
        async with asyncio.timeout(60):
            since_s, num_turns = 0.0, 0
            while num_turns < 40:  # with the same write: in turns, since a pause of the machine is one turn
                pool.runs[0].tokens([599] * 16_000)  # 32 kB a message: soon more than any window
                await asyncio.sleep(0.005)
                num_turns = num_turns + 1 if since_s and since_s == stream.write_since_s else 0
                since_s = stream.write_since_s
        if is_complete:
            pool.runs[0].finish()
        served.gateway.tracker.write_stall_s = 0.2
        await served.until(lambda: not served.gateway.tracker.admission.holds("slow"))
        assert pool.cancelled == ([] if is_complete else [1])
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
        assert refusal.tokens_delivered > 0


@pytest.mark.parametrize("num_outputs", [1, 2])
async def test_a_reader_that_waits_for_its_worker_is_not_slow(serve: Any, num_outputs: int) -> None:
    """Whatever was written to it before: a message that was read leaves no mark behind."""
    pool = FakePool()
    request = pb.GenerateRequest(
        request_id="quick", token_ids=common_pb2.TokenIds(ids=[4]), num_outputs=num_outputs if num_outputs > 1 else None
    )
    async with serve(pool) as served:
        call = served.inference.Generate(request)
        events = aiter(call)
        assert (await anext(events)).WhichOneof("event") == "started"
        tracker = served.gateway.tracker
        for _ in range(2):
            await served.until(lambda: not any(s.write_since_s for s in tracker.get("quick").streams))
            assert tracker.fail_stalled_writes(max_wait_s=0.0) == 0
            for run in pool.runs:
                run.tokens([5])
            assert [(await anext(events)).WhichOneof("event") for _ in pool.runs] == ["delta"] * num_outputs
        await served.until(lambda: not any(s.write_since_s for s in tracker.get("quick").streams))
        assert tracker.fail_stalled_writes(max_wait_s=0.0) == 0
        for run in pool.runs:
            run.finish()
        assert [event.WhichOneof("event") async for event in call] == ["finished"] * num_outputs


async def test_too_many_unread_tokens_end_the_stream(serve: Any) -> None:
    async with serve(limits=RequestLimits(max_pending_tokens=10)) as served:
        call = asyncio.ensure_future(refused(served.inference.Generate(REQUEST)))
        await served.until(lambda: served.pool.runs)
        served.pool.runs[0].tokens([5] * 11)
        refusal = await call
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")


# ---------------------------------------------------------------- metrics


async def test_metrics_reconcile_with_what_callers_saw(serve: Any) -> None:
    def speak(run: Any) -> None:
        asyncio.get_running_loop().call_soon(lambda: (run.tokens([5, 6]), run.finish(WireFinishReason.LENGTH)))

    async with serve(FakePool(on_run=speak), metrics_address="127.0.0.1:0") as served:
        for _ in range(3):
            assert [event async for event in served.inference.Generate(REQUEST)]
        await refused(served.inference.Generate(pb.GenerateRequest()))
        await served.until(lambda: served.gateway.meters.rpcs.total() == 4)  # a caller can be faster than the count
        url = f"http://127.0.0.1:{served.gateway.metrics_port}/metrics"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
    families = {family.name: family for family in text_string_to_metric_families(body)}

    def values(name: str) -> dict[tuple[str, ...], float]:
        family = families[name.removesuffix("_total").removesuffix("_count").removesuffix("_sum")]
        return {tuple(v for _, v in sorted(s.labels.items())): s.value for s in family.samples if s.name == name}

    generate = "/octavo.v1.InferenceService/Generate"
    assert {labels: value for labels, value in values("octavo_requests_total").items() if value} == {
        ("OK", generate, ""): 3,
        ("INVALID_ARGUMENT", generate, "INVALID_FIELD"): 1,
    }
    reasons = ("stop", "length", "tool_calls", "deadline")
    assert values("octavo_request_success_total") == {(each, "tiny"): 3 * (each == "length") for each in reasons}
    assert values("octavo_request_params_n_count") == values("octavo_request_params_n_sum") == {("tiny",): 3}
    assert values("octavo_request_params_max_tokens_sum") == {("tiny",): 3 * 255}  # the rest of the context
    assert values("octavo_request_max_num_generation_tokens_sum") == {("tiny",): 6}
    assert values("octavo_gateway_requests_started_total") == {("tiny",): 3}
    assert values("octavo_gateway_prompt_tokens_total") == {("tiny",): 3}
    assert values("octavo_gateway_generation_tokens_total") == {("tiny",): 6}
    assert values("octavo_time_to_first_token_seconds_count") == {("tiny",): 3}
    assert values("octavo_e2e_request_latency_seconds_count") == {("tiny",): 3}
    assert values("octavo_request_generation_tokens_sum") == {("tiny",): 6}
    assert values("octavo_worker_up") == {("tiny", "w0"): 1}
    assert values("octavo_worker_steps_total") == {("tiny", "w0"): 7}
    assert values("octavo_gateway_requests") == {("preparing",): 0, ("waiting",): 0, ("running",): 0}
    assert list(values("octavo_model_info").values()) == [1]
    assert {"octavo_build_info", "octavo_gateway_event_loop_lag_seconds", "octavo_inter_token_latency_seconds"} <= set(
        families
    )
    assert {"octavo_gateway_zmq_received_bytes", "octavo_gateway_workers_lost", "process_cpu_seconds"} <= set(families)


def test_a_worker_that_left_is_shown_as_down_and_old_ones_are_forgotten() -> None:
    collector = GatewayCollector(GatewayMeters(), PoolStats())

    def up() -> dict[str, float]:
        (family,) = [family for family in collector.collect() if family.name == "octavo_worker_up"]
        return {sample.labels["worker_id"]: sample.value for sample in family.samples}

    collector.update_workers((worker_view("w0"), worker_view("w1", state=WorkerState.DRAINING)))
    assert up() == {"w0": 1, "w1": 0}
    collector.update_workers((worker_view("w2"),))
    assert up() == {"w0": 0, "w1": 0, "w2": 1}
    collector.update_workers((worker_view("w0"),))
    assert up() == {"w1": 0, "w2": 0, "w0": 1}
    for index in range(100):
        collector.update_workers((worker_view(f"x{index}"),))
    assert len(up()) == 64
    assert up()["x99"] == 1


# ---------------------------------------------------------------- who may reach us


def test_addresses_are_parsed_and_judged() -> None:
    assert split_host_port("127.0.0.1:50051") == ("127.0.0.1", 50051)
    assert split_host_port("[::1]:1") == ("::1", 1)
    for address in ("127.0.0.1", "x:", "x:y", "x:70000", "x:-1"):
        with pytest.raises(AddressError):
            split_host_port(address)
    local = ["127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1", "unix:/tmp/x"]
    public = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "localhost.example.org:1"]
    assert [is_local(address) for address in local + public] == [True] * 5 + [False] * 5
    for address in public:
        with pytest.raises(AddressError, match=r"--port .*--exposure insecure"):
            check_exposure(address, Exposure.LOOPBACK_ONLY, setting="--port")
        check_exposure(address, Exposure.INSECURE, setting="--port")


@pytest.mark.parametrize("setting", ["listen_address", "admin_address", "metrics_address"])
async def test_no_listener_leaves_this_host_unasked(serve: Any, setting: str) -> None:
    with pytest.raises(AddressError, match="--exposure insecure"):
        async with serve(**{setting: "0.0.0.0:0"}):
            pass


@pytest.mark.parametrize("setting", ["listen_address", "admin_address", "metrics_address"])
async def test_a_port_in_use_names_the_setting(serve: Any, setting: str) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} cannot be bound"):
            async with serve(**{setting: f"127.0.0.1:{port}"}):
                pass


# ---------------------------------------------------------------- the log


async def test_every_request_leaves_one_line_with_its_id_and_no_prompt(serve: Any) -> None:
    pool = FakePool(on_run=lambda run: (run.tokens([5]), run.finish()))
    async with serve(pool) as served:
        with structlog.testing.capture_logs() as lines:
            async for _ in served.inference.Generate(pb.GenerateRequest(request_id="r7", text="my secret")):
                pass
            await refused(served.inference.Generate(pb.GenerateRequest(request_id="r8")))
            await served.until(lambda: len(lines) == 2)
    first, second = lines
    assert first | {"seconds": 0, "first_token_s": 0} == {
        "event": "end", "log_level": "info", "request_id": "r7", "method": "Generate", "code": "OK", "seconds": 0,
        "model": "tiny", "worker": "w0", "prompt_tokens": first["prompt_tokens"], "completion_tokens": 1,
        "first_token_s": 0,
    }  # fmt: skip
    assert (second["request_id"], second["code"], second["reason"]) == ("r8", "INVALID_ARGUMENT", "INVALID_FIELD")
    assert "secret" not in str(lines)
