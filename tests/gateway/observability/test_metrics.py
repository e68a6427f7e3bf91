"""What a gateway's /metrics shows before anything has happened, so that rates see the first of each kind."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.observability import metrics
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector
from octavo.gateway.workers.stats import LOSSES, PROTOCOL_ERRORS, REFUSALS, PoolStats
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import WireFinishReason
from tests.support.gateway.fake_pool import model_card, worker_view
from tests.support.gateway.generating import speaking

GENERATE = "/octavo.v1.InferenceService/Generate"
Series = dict[tuple[str, ...], float]


def series(collector: GatewayCollector, name: str) -> Series:
    return {
        tuple(sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name == name
    }


@pytest.fixture
def collector() -> GatewayCollector:
    return GatewayCollector(GatewayMeters(), PoolStats())


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("octavo_gateway_workers_lost_total", {("WORKER_LOST",), ("WORKER_STALLED",), ("DRAINING",)}),
        ("octavo_gateway_protocol_errors_total", {(kind,) for kind in PROTOCOL_ERRORS}),
        ("octavo_gateway_refused_registrations_total", {(kind,) for kind in REFUSALS}),
        ("octavo_gateway_routed_requests_total", {("only",), ("prefix",), ("load",), ("balance",)}),
    ],
)
def test_every_label_value_is_there_at_zero(collector: GatewayCollector, name: str, labels: set[str]) -> None:
    assert series(collector, name) == dict.fromkeys(labels, 0)


def test_the_first_loss_is_an_increase(collector: GatewayCollector) -> None:
    before = series(collector, "octavo_gateway_workers_lost_total")
    collector._stats.workers_lost["WORKER_LOST"] += 1
    after = series(collector, "octavo_gateway_workers_lost_total")
    assert after.keys() == before.keys()
    assert {labels: after[labels] - before[labels] for labels in after if after[labels] != before[labels]} == {
        ("WORKER_LOST",): 1
    }


def test_endings_of_calls_are_there_before_the_first_call(collector: GatewayCollector) -> None:
    endings = series(collector, "octavo_requests_total")
    assert set(endings.values()) == {0}
    assert {(GENERATE, "OK", ""), (GENERATE, "UNAVAILABLE", "WORKER_LOST"), (GENERATE, "INTERNAL", "INTERNAL")} <= set(
        endings
    )


def test_a_method_of_another_dialect_has_its_endings_from_its_first_call(collector: GatewayCollector) -> None:
    collector._meters.called.add("/vllm.grpc.engine.VllmEngine/Generate")
    endings = series(collector, "octavo_requests_total")
    assert endings["/vllm.grpc.engine.VllmEngine/Generate", "UNAVAILABLE", "NO_WORKER"] == 0


def test_a_model_has_its_series_when_its_worker_registers(collector: GatewayCollector) -> None:
    assert series(collector, "octavo_request_success_total") == {}
    collector.update_workers((worker_view(),))
    assert series(collector, "octavo_request_success_total") == {
        ("tiny", reason): 0 for reason in ("stop", "length", "tool_calls", "deadline")
    }
    assert series(collector, "octavo_gateway_requests_started_total") == {("tiny",): 0}


def test_of_workers_that_left_the_latest_are_told(collector: GatewayCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_KNOWN_WORKERS", 2)
    for worker_id in ("w0", "w1", "w2"):
        collector.update_workers((worker_view(worker_id),))
    assert series(collector, "octavo_worker_up") == {("w1", "tiny"): 0, ("w2", "tiny"): 1}


def test_every_name_of_a_checkpoint_is_told_and_once_for_all_its_workers(collector: GatewayCollector) -> None:
    cards = [
        model_card(name, fingerprint="same", max_model_len=length)
        for name, length in (("one", 256), ("two", 256), ("two", 512), ("one", 256))
    ]
    collector.update_workers(tuple(worker_view(f"w{index}", card=card) for index, card in enumerate(cards)))
    told = [
        sample.labels for each in collector.collect() for sample in each.samples if sample.name == "octavo_model_info"
    ]
    assert [(labels["model_name"], labels["max_model_len"]) for labels in told] == [
        ("one", "256"),
        ("two", "256"),
        ("two", "512"),
    ]


def test_no_kind_is_counted_that_is_not_listed(repository: Path) -> None:
    found = set(kinds_in(repository / "gateway/workers"))
    assert len(found) > 15
    assert found == {*PROTOCOL_ERRORS, *REFUSALS}
    assert {reason.value for reason in LOSSES} == {"WORKER_LOST", "WORKER_STALLED", "DRAINING"}


@pytest.mark.parametrize("is_unary", [False, True], ids=["stream", "unary"])
@pytest.mark.parametrize(
    ("steps", "end"),
    [
        (([5], [6], [0]), {"reason": WireFinishReason.STOP, "stop_token_id": 0}),
        (([0],), {"reason": WireFinishReason.STOP, "stop_token_id": 0}),
        (([5, 6],), {"reason": WireFinishReason.LENGTH}),
    ],
    ids=["an end token", "nothing else", "the length"],
)
async def test_tokens_are_counted_as_callers_are_told(
    serve: Any, steps: tuple[list[int], ...], end: dict[str, Any], is_unary: bool
) -> None:
    request = pb.GenerateRequest(text="Hello")
    async with serve(speaking(*steps, **end)) as served:
        if is_unary:
            finished = (await served.inference.Complete(pb.CompleteRequest(generate=request))).finished
        else:
            finished = [event async for event in served.inference.Generate(request)][-1].finished
        meters = served.gateway.meters.of_model("tiny")
        await served.until(lambda: meters.finished.total() == 1)
    assert finished.usage.completion_tokens == sum(map(len, steps))
    assert meters.generation_tokens == meters.request_generation_tokens.total == finished.usage.completion_tokens


def kinds_in(folder: Path) -> Iterator[str]:
    """Every literal that is counted by kind: `protocol_errors["…"]`, `_fault(output, "…", …)`, `kind=…`, and what
    `_refusal` and `_card_conflict` return."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Subscript(value=ast.Attribute(attr="protocol_errors"), slice=ast.Constant(value=str(kind))):
                    yield kind
                case ast.Call(func=ast.Attribute(attr="_fault"), args=[_, ast.Constant(value=str(kind)), *_]):
                    yield kind
                case ast.keyword(arg="kind", value=ast.Constant(value=str(kind))):
                    yield kind
                case ast.Assign(targets=[ast.Name(id="kind")], value=ast.IfExp(body=body, orelse=orelse)):
                    yield from (each.value for each in (body, orelse) if isinstance(each, ast.Constant))
                case ast.FunctionDef(name="_refusal" | "_card_conflict"):
                    for each in ast.walk(node):
                        match each:
                            case ast.Return(value=ast.Tuple(elts=[ast.Constant(value=str(kind)), _])):
                                yield kind
