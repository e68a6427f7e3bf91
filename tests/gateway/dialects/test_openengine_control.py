"""openengine.v1's Control, and the schema itself: the same names, numbers and types as the reference."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pb2

from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc as oe_grpc
from tests.gateway.dialects.test_openengine import answers_of, inference, request
from tests.gateway.dialects.test_vllm_kv_events import removed, stored, tell
from tests.support.gateway.fake_pool import FakePool, FakeRun, worker_view
from tests.support.gateway.rpc_errors import refused

TOP = oe.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N


def control(served: Any) -> Any:
    return oe_grpc.ControlStub(served.channel)


def finishing() -> FakePool:
    def speak(run: FakeRun) -> None:
        run.tokens([70])
        run.finish()

    return FakePool(on_run=speak)


# ---------------------------------------------------------------- the schema


def described(messages: Any, prefix: str) -> dict[str, object]:
    """name -> (number, label, type, its name, oneof, presence) of every field, of messages inside of them too."""
    found: dict[str, object] = {}
    for message in messages:
        name = f"{prefix}.{message.name}"
        oneofs = [each.name for each in message.oneof_decl]
        for field in message.field:
            oneof = oneofs[field.oneof_index] if field.HasField("oneof_index") else ""
            found[f"{name}.{field.name}"] = (
                field.number, field.label, field.type, field.type_name, oneof, field.proto3_optional,
            )  # fmt: skip
        found[name] = len(message.field)
        found |= described(message.nested_type, name)
    return found


def facts(files: list[descriptor_pb2.FileDescriptorProto]) -> dict[str, object]:
    """Of the package: messages, enums, services."""
    found: dict[str, object] = {}
    for file in files:
        found |= described(file.message_type, file.package)
        for enum in file.enum_type:
            found[f"{file.package}.{enum.name}"] = tuple((value.name, value.number) for value in enum.value)
        for service in file.service:
            for method in service.method:
                found[f"/{file.package}.{service.name}/{method.name}"] = (
                    method.input_type, method.output_type, method.client_streaming, method.server_streaming,
                )  # fmt: skip
    return found


def test_the_schema_is_that_of_the_reference(shared: Path, tmp_path: Path) -> None:
    """The reference is compiled in a process of its own: one process can hold only one package of a name."""
    root = shared / "data/contracts"
    (tmp_path / "ref").symlink_to(root)
    out = tmp_path / "reference.bin"
    files = sorted(str(each.relative_to(root)) for each in (root / "openengine/v1").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--descriptor_set_out={out}", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    reference = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    ours = descriptor_pb2.FileDescriptorProto()
    oe.DESCRIPTOR.CopyToProto(ours)
    expected = facts(list(reference.file))
    assert len(expected) > 250
    assert facts([ours]) == expected


# ---------------------------------------------------------------- what it tells


async def test_the_server_tells_its_revision_and_what_all_workers_hold(serve: Any) -> None:
    async with serve(FakePool(views=[worker_view("w1"), worker_view("w2")])) as served:
        told = await control(served).GetServerInfo(oe.GetServerInfoRequest())
        load = await control(served).GetLoad(oe.GetLoadRequest(include_per_rank=True))
        plain = await control(served).GetLoad(oe.GetLoadRequest())
    one = worker_view().capacity
    assert (told.engine_name, told.engine_role) == ("octavo", oe.ENGINE_ROLE_AGGREGATED)
    assert (told.schema_revision, told.minimum_client_revision) == (1, 1)
    assert told.schema_release
    assert list(told.supported_models) == ["tiny"]
    assert told.capacity == oe.DeploymentCapacity(
        kv_block_size=one.block_size,
        total_kv_blocks=2 * one.num_blocks,
        max_running_requests=2 * one.max_num_seqs,
        max_batched_tokens=one.max_batch_tokens,
        max_loras=0,
    )
    assert told.capacity.HasField("max_loras")
    assert told.kv_connector.HasField("enabled")
    assert not told.kv_connector.enabled
    assert load.instance_id == told.instance_id != ""
    assert load.total_kv_blocks == 2 * one.num_blocks
    assert load.HasField("running_requests")
    assert not load.HasField("running_tokens")  # not known, so not told as 0
    assert [(rank.data_parallel_rank, rank.total_kv_blocks) for rank in load.ranks] == [(0, 2 * one.num_blocks)]
    assert not plain.ranks


async def test_what_is_advertised_is_accepted_and_what_is_not_is_refused(serve: Any) -> None:
    """Each capability of ModelInfo, by a request that uses it."""
    async with serve(finishing()) as served:
        info = await control(served).GetModelInfo(oe.GetModelInfoRequest(model="tiny"))
        capabilities = info.generation

        async def accepts(**fields: Any) -> bool:
            metadata = fields.pop("metadata", ())
            served.pool.runs.clear()
            call = inference(served).Generate(request(**fields), metadata=metadata)
            code = await read_all(call)
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
            return code is grpc.StatusCode.OK

        assert info.supports_text_input is await accepts(token_ids=None, prompt="a")
        assert info.supports_token_ids_input is await accepts()
        assert info.supports_lora is await accepts(lora_name="a")
        assert info.supports_multimodal is await accepts(media=[oe.MediaItem(url="http://a")])
        assert capabilities.supports_priority is await accepts(metadata=[("openengine-priority", "3")])
        stopping = oe.StoppingOptions(include_stop_in_output=True, conditions=[oe.StopCondition(stop_text="zz")])
        assert capabilities.supports_stop_in_output is await accepts(stopping=stopping)
        assert capabilities.supports_cache_salt is await accepts(kv=oe.KvOptions(cache_salt="s"))
        assert capabilities.supports_prefix_cache_bypass is await accepts(kv=oe.KvOptions(bypass_prefix_cache=True))
        for count, expected in ((capabilities.max_num_sequences, True), (capabilities.max_num_sequences + 1, False)):
            assert await accepts(sampling=oe.SamplingParams(num_sequences=count)) is expected
        for scores, what in ((capabilities.prompt_logprobs, "prompt"), (capabilities.output_logprobs, "output")):
            for selection, mode in (
                (oe.CandidateTokenSelection(top_n=scores.max_top_n), TOP),
                (oe.CandidateTokenSelection(all=oe.AllCandidates()), oe.CANDIDATE_TOKEN_SELECTION_MODE_ALL),
                (
                    oe.CandidateTokenSelection(token_ids=oe.TokenIds(ids=[1])),
                    oe.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS,
                ),
            ):
                fields = {f"return_{what}_logprobs": True, f"{what}_candidates": selection}
                accepted = await asks(served, oe.ResponseOptions(**fields))  # type: ignore[arg-type]
                assert accepted is (mode in scores.candidate_selection_modes), (what, mode)
        guides = {
            oe.GUIDED_DECODING_MODE_JSON_SCHEMA: oe.GuidedDecoding(json_schema='{"type": "object"}'),
            oe.GUIDED_DECODING_MODE_REGEX: oe.GuidedDecoding(regex="a+"),
            oe.GUIDED_DECODING_MODE_EBNF_GRAMMAR: oe.GuidedDecoding(ebnf_grammar='root ::= "a"'),
            oe.GUIDED_DECODING_MODE_STRUCTURAL_TAG: oe.GuidedDecoding(structural_tag="{}"),
            oe.GUIDED_DECODING_MODE_CHOICE: oe.GuidedDecoding(choice=oe.ChoiceConstraint(choices=["a"])),
            oe.GUIDED_DECODING_MODE_JSON_OBJECT: oe.GuidedDecoding(json_object=oe.JsonObjectConstraint()),
        }
        assert set(guides) == set(oe.GuidedDecodingMode.values()) - {0}
        for guide_mode, guided in guides.items():
            assert await accepts(guided=guided) is (guide_mode in capabilities.guided_decoding.modes), guide_mode


async def test_a_model_that_gives_ids_alone_refuses_to_stop_at_text(serve: Any) -> None:
    conditions = [oe.StopCondition(stop_token_id=5), oe.StopCondition(stop_text="zz")]
    async with serve(finishing(), files={"tokenizer.json": b"{}"}) as served:
        info = await control(served).GetModelInfo(oe.GetModelInfoRequest(model="tiny"))
        stopping = oe.StoppingOptions(conditions=conditions)
        refusal = await refused(inference(served).Generate(request(stopping=stopping)))
        await answers_of(inference(served).Generate(request(stopping=oe.StoppingOptions(conditions=conditions[:1]))))
    assert not info.supports_text_input
    assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("stopping.conditions[1]",))


async def read_all(call: Any) -> grpc.StatusCode:
    """To its end; the code."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def asks(served: Any, response: oe.ResponseOptions) -> bool:
    """Whether a worker is asked for these scores. The fake one gives none, so that the answer says nothing."""
    served.pool.runs.clear()
    await read_all(inference(served).Generate(request(request_id=None, response=response)))
    return len(served.pool.runs) == 1


async def test_a_model_has_to_be_named_and_known(serve: Any) -> None:
    async with serve() as served:
        unnamed = await refused(control(served).GetModelInfo(oe.GetModelInfoRequest()))
        unknown = await refused(control(served).GetModelInfo(oe.GetModelInfoRequest(model="other")))
    assert (unnamed.code, unnamed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("model",))
    assert unknown.code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["LoadLora", "UnloadLora", "ListLoras"])
async def test_adapters_are_not_offered(serve: Any, method: str) -> None:
    ask = {"LoadLora": oe.LoadLoraRequest, "UnloadLora": oe.UnloadLoraRequest, "ListLoras": oe.ListLorasRequest}
    async with serve() as served:
        refusal = await refused(getattr(control(served), method)(ask[method]()))
    assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION  # as the contract has it without adapters
    assert (refusal.reason, refusal.tokens_delivered) == ("NOT_OFFERED", 0)


# ---------------------------------------------------------------- health


async def test_health_is_the_worst_of_its_checks(serve: Any) -> None:
    async with serve(finishing()) as served:
        stub = control(served)
        plain = await stub.Health(oe.HealthRequest())
        probed = await stub.Health(oe.HealthRequest(include_inference_probe=True, role=oe.ENGINE_ROLE_AGGREGATED))
        prefill = await stub.Health(oe.HealthRequest(role=oe.ENGINE_ROLE_PREFILL))
        other = await stub.Health(oe.HealthRequest(model="other"))
        served.pool.on_run = lambda run: run.lose()
        lost = await stub.Health(oe.HealthRequest(include_inference_probe=True))
        assert served.gateway.tracker.admission.counts().num_entered == 0
        served.gateway.tracker.is_draining = True
        draining = await stub.Health(oe.HealthRequest())
    assert plain.state == probed.state == oe.HEALTH_STATE_READY
    assert [check.name for check in probed.checks] == ["grpc", "scheduler", "model", "role", "inference_probe"]
    assert prefill.state == other.state == lost.state == oe.HEALTH_STATE_NOT_READY
    assert lost.checks[-1].message
    assert draining.state == oe.HEALTH_STATE_DRAINING


async def test_a_defect_that_a_probe_meets_is_in_the_log(serve: Any) -> None:
    async with serve(FakePool(refuse=[ZeroDivisionError("secret")])) as served:
        with structlog.testing.capture_logs() as lines:
            health = await control(served).Health(oe.HealthRequest(include_inference_probe=True))
    assert health.checks[-1].message == "internal error; the server's log has it"
    (line,) = [each for each in lines if each["event"] == "defect"]
    assert isinstance(line["exc_info"], ZeroDivisionError)


async def test_a_probe_asks_the_model_for_one_token(serve: Any) -> None:
    async with serve(finishing()) as served:
        await control(served).Health(oe.HealthRequest(include_inference_probe=True, model="tiny"))
    (run,) = served.pool.runs
    assert run.request.sampling.max_tokens == 1


# ---------------------------------------------------------------- the prefix cache


def told(batch: oe.KvEventBatch) -> list[Any]:
    """The events in few words: blocks by their first token."""
    words: list[Any] = []
    for event in batch.events:
        match event.WhichOneof("event"):
            case "block_stored":
                block = event.block_stored
                assert len(block.token_ids) == len(block.block_hashes) * block.block_size
                assert {(len(each.value), each.encoding) for each in block.block_hashes} == {(8, "int64")}
                assert block.medium == oe.STORAGE_MEDIUM_GPU
                firsts = list(block.token_ids)[:: block.block_size]
                words.append(("stored", block.HasField("parent_block_hash"), firsts))
            case "block_removed":
                words.append(("removed", len(event.block_removed.block_hashes)))
            case other:
                words.append(other)
    return words


@pytest.mark.parametrize("include_snapshot", [True, False])
async def test_a_subscriber_gets_the_state_where_it_asks_and_then_what_changes(
    serve: Any, include_snapshot: bool
) -> None:
    async with serve() as served:
        tell(served.pool, stored("a", 100), stored("b", 200, "a"), stored("c", 300))
        ask = oe.SubscribeKvEventsRequest(include_snapshot=include_snapshot, data_parallel_ranks=[0])
        call = control(served).SubscribeKvEvents(ask)
        await call.wait_for_connection()
        await served.until(lambda: served.pool.prefixes._feed("tiny").is_followed)
        first = (await call.read()).batch if include_snapshot else None
        tell(served.pool, stored("d", 400, "b"), removed("c"), removed("b"))
        second = (await call.read()).batch
        call.cancel()
    if first is not None:
        assert told(first) == [
            "all_blocks_cleared",
            ("stored", False, [100]),
            ("stored", False, [300]),
            ("stored", True, [200]),
        ]
        assert second.sequence_number == first.sequence_number + 1
    assert told(second) == [("stored", True, [400]), ("removed", 2)]
    assert second.timestamp_unix_nanos > 10**18


async def test_a_gateway_that_ends_tells_its_subscribers_by_an_event(serve: Any) -> None:
    async with serve() as served:
        call = control(served).SubscribeKvEvents(oe.SubscribeKvEventsRequest(include_snapshot=True))
        await call.read()
        await served.gateway.stop()
        last = await call.read()
        assert await call.read() == grpc.aio.EOF
        code = await call.code()
    assert (last.error.code, last.error.retryable) == (oe.ERROR_CODE_DRAINING, True)
    assert code is grpc.StatusCode.OK


async def test_ranks_and_past_events_that_do_not_exist_are_refused(serve: Any) -> None:
    async with serve() as served:
        stub = control(served)
        rank = await refused(stub.SubscribeKvEvents(oe.SubscribeKvEventsRequest(data_parallel_ranks=[0, 1])))
        past = await refused(stub.SubscribeKvEvents(oe.SubscribeKvEventsRequest(start_sequence_number=7)))
        source = await refused(stub.GetKvEventSources(oe.GetKvEventSourcesRequest(data_parallel_ranks=[2])))
        none = await stub.GetKvEventSources(oe.GetKvEventSourcesRequest())
    assert (rank.fields, past.fields) == (("data_parallel_ranks[1]",), ("start_sequence_number",))
    assert source.fields == ("data_parallel_ranks[0]",)
    assert none == oe.GetKvEventSourcesResponse()


async def test_several_requests_in_turn_leave_nothing_behind(serve: Any) -> None:
    async with serve(finishing()) as served:
        for _ in range(3):
            await answers_of(inference(served).Generate(request()))
        assert served.gateway.tracker.admission.counts().num_entered == 0


async def test_what_a_method_refuses_itself_is_counted_by_its_code(serve: Any) -> None:
    async with serve() as served:
        await refused(control(served).Abort(oe.AbortRequest(request_id="r1")))
        await refused(control(served).ListLoras(oe.ListLorasRequest()))
        counted = {name: count for name, count in served.gateway.meters.rpcs.items() if "Control" in name[0]}
    assert counted == {
        ("/openengine.v1.Control/Abort", "NOT_FOUND", "REQUEST_NOT_FOUND"): 1,
        ("/openengine.v1.Control/ListLoras", "FAILED_PRECONDITION", "NOT_OFFERED"): 1,
    }
