"""Negative controls: what the invariants after each row must report is planted, and they do."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest

from octavo import OctavoError
from octavo.worker.runners.oracle.model import OracleModel
from tests.support.faults.bench import FaultBench, Resources
from tests.support.faults.callers import Call, golden
from tests.support.services.scrape import Page

MODEL = OracleModel()


def faults(tmp_path: Path, **service: Any) -> FaultBench:
    """A bench whose service is this process: idle, with a clean log."""
    log = tmp_path / "service.log"
    log.write_text("all is well\n")
    this = psutil.Process()
    plain: dict[str, Any] = {
        "log": log,
        "children": lambda command: [this],
        "wait_until_idle": lambda timeout_s=0.0: None,
        "audit": lambda: [SimpleNamespace(violations=[], num_active_blocks=0)],
    }
    bench = FaultBench(service=SimpleNamespace(**(plain | service)), model=MODEL, metrics_port=0)  # type: ignore[arg-type]
    bench.gateways = [Resources.of(this)]
    return bench


def complete(**changes: Any) -> Call:
    call = Call(prompt=[5, 6], max_tokens=8, sent_s=1.0, ended_s=2.0)
    call.token_ids = golden(call, MODEL)
    for name, value in changes.items():
        setattr(call, name, value)
    return call


def test_what_is_whole_is_not_reported(tmp_path: Path) -> None:
    bench = faults(tmp_path)
    bench.check_calls([complete()], limit_s=1.5)
    bench.check_log()
    assert list(bench._differences()) == []
    assert list(bench._not_reconciled(Page(()))) == []


async def test_a_leaked_block_and_descriptor_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaking = faults(tmp_path, audit=lambda: [SimpleNamespace(violations=["2 blocks for nobody"])])

    async def sings() -> float:
        return 0.0

    monkeypatch.setattr(FaultBench, "canary", lambda self: sings())
    with pytest.raises(AssertionError, match=r"B: .*for nobody"):
        await leaking.check([complete()], limit_s=2)
    bench = faults(tmp_path)
    bench.gateways = [replace(bench.gateways[0], num_fds=bench.gateways[0].num_fds - 1)]
    assert list(bench._differences()) == ["1 more descriptors"]
    bench.gateways = [replace(bench.gateways[0], rss_bytes=1 << 20)]
    assert any("MiB more memory" in each for each in bench._differences())


def test_a_call_without_end_or_too_late_is_reported(tmp_path: Path) -> None:
    bench = faults(tmp_path)
    for changes in ({"ended_s": 0.0}, {"ended_s": 9.0}):
        with pytest.raises(AssertionError, match="H: "):
            bench.check_calls([complete(**changes)], limit_s=2)


def test_a_changed_token_is_reported_also_of_a_victim(tmp_path: Path) -> None:
    bench, call = faults(tmp_path), complete()
    changed = [*call.token_ids[:3], call.token_ids[3] + 1, *call.token_ids[4:]]
    with pytest.raises(AssertionError, match="I: "):
        bench.check_calls([complete(token_ids=changed)], limit_s=2)
    lost = OctavoError("gone", code=grpc.StatusCode.UNAVAILABLE, reason="WORKER_LOST")
    bench.check_calls([complete(token_ids=call.token_ids[:4], error=lost)], limit_s=2, victims=["WORKER_LOST"])
    with pytest.raises(AssertionError, match="T: "):
        bench.check_calls([complete(token_ids=changed[:4], error=lost)], limit_s=2, victims=["WORKER_LOST"])
    with pytest.raises(AssertionError, match=r"I: .*WORKER_LOST"):
        bench.check_calls([complete(error=lost)], limit_s=2)


def test_a_status_that_nobody_explains_is_reported(tmp_path: Path) -> None:
    bench = faults(tmp_path)
    unknown = OctavoError("?", code=grpc.StatusCode.UNKNOWN)
    with pytest.raises(AssertionError, match="P: "):
        bench.check_calls([complete(error=unknown)], limit_s=2, victims=["UNKNOWN"])
    bench.service.log.write_text("Task exception was never retrieved\n")
    with pytest.raises(AssertionError, match="P: "):
        bench.check_log()
    bench.num_rpcs = 1
    assert list(bench._not_reconciled(Page(()))) == ["1 calls were made, 0 have an end"]
