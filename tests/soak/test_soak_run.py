"""A short soak on real processes: faults of all sorts, nothing violated; and violations that are planted are told."""

import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from octavo import AsyncClient
from octavo.worker.runners.oracle.model import OracleModel
from tests.soak.asked import draw
from tests.soak.bench import SoakBench
from tests.soak.config import FAULTS, SoakConfig
from tests.soak.drive import Soak
from tests.soak.faults import Fault, Field, culprit
from tests.soak.report import figures, whole
from tests.support.faults.bench import NO_RETRIES
from tests.support.faults.figures import show
from tests.support.services.service import Service

SHORT: dict[str, Any] = {"round_s": 2.0, "capacity_s": 1.5, "min_life_s": 0.0, "rehearses": False}
QUICK = (
    "kill worker", "kill gateway", "short freeze", "raise", "not a number", "out of memory", "reset connection",
    "garbage connections", "metadata", "hostile frames", "jumping clock", "scrape flood",
)  # fmt: skip


@pytest.fixture(autouse=True)
def keeps_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has given way cannot take it back: the tests behind these would run so, and their services."""
    monkeypatch.setattr(os, "nice", lambda increment: increment)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_row_60_a_short_soak_under_random_faults_violates_nothing(tmp_path: Path) -> None:
    faults = tuple(each for each in FAULTS if each.name in QUICK)
    soak = Soak(config=SoakConfig(seconds=8.0, min_rounds=4, seed=60, faults=faults, **SHORT), show=show)
    await soak.run(tmp_path)
    assert soak.violations == []
    assert soak.num_rounds >= 4
    assert soak.injected.total() >= 1
    assert soak.outcomes["complete"] > 4
    assert soak.num_checks > soak.outcomes.total()
    assert len(soak.samples) >= 3 * soak.num_rounds - 3
    assert figures(soak)["violations"] == 0
    assert '"seed": 60' in whole(soak)


async def changed_byte(field: Field, drawn: random.Random) -> None:
    """As if a caller had got another token."""
    async with AsyncClient(field.load.target, options=NO_RETRIES) as client:
        asked = await field.load.send(client, draw(drawn, "stream"))
    asked.outputs[0][0] += 1


async def lost_request(field: Field, drawn: random.Random) -> None:
    """An error that no fault of this round explains, of one who looks well-behaved."""
    asked = await culprit(field, drawn, "nan")
    asked.kind = "stream"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_violations_that_are_planted_are_told(tmp_path: Path) -> None:
    planted = {"changed byte": changed_byte, "lost request": lost_request}
    faults = tuple(Fault(name=name, rows="60", inject=inject) for name, inject in planted.items())
    soak = Soak(config=SoakConfig(seconds=0.0, min_rounds=4, seed=7, faults=faults, **SHORT), show=show)
    await soak.run(tmp_path)
    told = " ".join(soak.violations)
    assert soak.violations
    for name, complaint in {"changed byte": "I: stream, output 0", "lost request": "NUMERICAL"}.items():
        assert (complaint in told) == (soak.injected[name] > 0), told


def test_what_only_a_defect_writes_is_found_once(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_bytes(b'{"event": "\xff"}\n')
    service = Service(process=Mock(), port=1, admin_port=2, log=log)
    bench = SoakBench(service=service, model=OracleModel(), metrics_port=3)
    bench.check_log()
    with log.open("a") as more:
        more.write("socket.accept() out of system resource\nsocket: fd=7\nTraceback (most recent call last):\n")
    bench.check_log()
    with log.open("a") as more:
        more.write("Task exception was never retrieved\n")
    with pytest.raises(AssertionError, match="never retrieved"):
        bench.check_log()
    bench.check_log()
