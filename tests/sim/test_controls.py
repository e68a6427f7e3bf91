"""Negative controls: what the simulation must notice is planted, one at a time, and it does."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.blockmgr.manager import BlockManager
from octavo.gateway.requests.tracker import stream_response as real_stream_response
from octavo.gateway.rpc.interceptor import StatusInterceptor
from octavo.gateway.streams.stream import OutputStream
from octavo.wire.messages import StepOutput
from sim.processes.dealer import FaultyOutbox
from sim.scenario import Fault, FaultKind, RequestSpec, Scenario, SimConfig
from sim.world import simulate

Plant = Callable[[pytest.MonkeyPatch], None]
assert real_stream_response


def scenario(*faults: Fault, **changes: Any) -> Scenario:
    config = SimConfig(num_blocks=24, block_size=2, audit_every_steps=1, **changes)
    requests = tuple(
        RequestSpec(
            index=index,
            at_s=index * 0.01,
            prompt=(5, 6, 7, 8, 9, 10 + index % 3),
            max_tokens=12,
            seed=index,
            output=("ids", "text", "both")[index % 3],
            cancel_after_s=0.05 if index % 5 == 0 else None,
            retries=3,
        )
        for index in range(40)
    )
    return Scenario(seed=1, config=config, requests=requests, faults=faults)


def test_without_anything_planted_there_is_nothing_to_report() -> None:
    report = simulate(scenario())
    assert report.violations == ()
    assert report.outcomes["OK"] > 25
    assert report.outcomes["CANCELLED"] > 0


def plant_leak(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release
    calls = iter(range(10**9))

    def leaking(self: BlockManager, slot: Any, request_id: str) -> None:
        if next(calls) != 7:
            release(self, slot, request_id)

    patch.setattr(BlockManager, "release", leaking)


def plant_hung_stream(patch: pytest.MonkeyPatch) -> None:
    on_finished, calls = OutputStream.on_finished, iter(range(10**9))

    def forgetful(self: OutputStream, finished: Any) -> None:
        if next(calls) != 9:
            on_finished(self, finished)

    patch.setattr(OutputStream, "on_finished", forgetful)


def plant_changed_byte(patch: pytest.MonkeyPatch) -> None:
    put, calls = FaultyOutbox.put, iter(range(10**9))

    def changing(self: FaultyOutbox, gateway: Any, message: Any) -> None:
        if isinstance(message, StepOutput) and message.tokens and next(calls) == 20:
            tokens = np.frombuffer(message.tokens, "<i4").copy()
            tokens[-1] = (tokens[-1] + 1) % 390
            message = msgspec.structs.replace(message, tokens=tokens.tobytes())
        put(self, gateway, message)

    patch.setattr(FaultyOutbox, "put", changing)


def plant_unknown_status(patch: pytest.MonkeyPatch) -> None:
    abort = StatusInterceptor._abort

    async def careless(self: StatusInterceptor, error: Exception, scope: Any, context: Any) -> None:
        if scope.request_id == "r11":
            raise error
        await abort(self, error, scope, context)

    patch.setattr(StatusInterceptor, "_abort", careless)


FAILING_STEP = Fault(kind=FaultKind.ENGINE_ERROR, at_s=0.13)
CONTROLS: dict[str, tuple[Plant, tuple[Fault, ...], str]] = {
    "a leak": (plant_leak, (), "blocks for nobody"),
    "a hung stream": (plant_hung_stream, (), "waits for ever"),
    "a changed byte": (plant_changed_byte, (), "expected"),
    "an UNKNOWN status": (
        plant_unknown_status,
        tuple(Fault(kind=FaultKind.ENGINE_ERROR, at_s=0.12 + 0.01 * k) for k in range(4)),
        "UNKNOWN",
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_it_reports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, faults, told = CONTROLS[name]
    plant(monkeypatch)
    report = simulate(scenario(*faults))
    assert any(told in violation for violation in report.violations), report.violations
