"""A leak of KV blocks on its way from the block manager to whom it calls at night: recount, gauge, rule, log."""

import operator
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import structlog
import yaml
from prometheus_client import CollectorRegistry

from octavo.blockmgr.pool import BlockPool
from octavo.worker.engine import block_checks
from octavo.worker.engine.interfaces import LinkStats
from octavo.worker.metrics import SnapshotCollector
from tests.support.worker.engine_rig import Rig, run_message
from tests.support.worker.scheduling import WorldConfig

COMPARISONS = {"!=": operator.ne, ">": operator.gt, "==": operator.eq}


def leak_a_block_per_release(patch: pytest.MonkeyPatch) -> None:
    """The last block of each row is given back by nobody."""
    drop = BlockPool.drop
    patch.setattr(BlockPool, "drop", lambda self, blocks: drop(self, blocks[1:]))


def serve(rig: Rig, num_requests: int) -> None:
    """Requests one after the other, each to its end."""
    for handle in range(1, num_requests + 1):
        rig.inbox.put(run_message(handle, [3, 4, 5, handle + 6]))
        rig.steps(8)


def be_idle(rig: Rig) -> None:
    rig.now_s += 1.0
    rig.engine.step()


def samples(rig: Rig) -> dict[str, float]:
    """What a scrape of this worker would give; of series without labels."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: rig.engine.stats, LinkStats(), tuple))
    return {
        sample.name: sample.value for family in registry.collect() for sample in family.samples if not sample.labels
    }


def rule(repository: Path) -> dict[str, Any]:
    rules = yaml.safe_load((repository / "deploy/prometheus/rules/alerts.yml").read_text())["groups"][0]["rules"]
    (found,) = [rule for rule in rules if rule["alert"] == "OctavoBlocksLeaked"]
    return found


def is_firing(node: Any, page: dict[str, float]) -> bool:
    """Whether comparisons of series with numbers, joined by `or`, hold."""
    operation = str(node.op)
    if operation == "or":
        return is_firing(node.lhs, page) or is_firing(node.rhs, page)
    return bool(COMPARISONS[operation](page[node.lhs.name], node.rhs.val))


@pytest.fixture
def alarm(repository: Path) -> Any:
    assert "for" not in rule(repository)  # it fires at the first scrape
    expression = promql_parser.parse(rule(repository)["expr"])
    return lambda rig: is_firing(expression, samples(rig))


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def test_a_worker_that_starts_has_leaked_nothing(alarm: Any) -> None:
    rig = Rig(WorldConfig(num_blocks=512))
    assert samples(rig)["octavo_kv_blocks_leaked"] == 0
    assert rig.engine.stats.num_free_blocks == 512
    assert not alarm(rig)


def test_a_healthy_worker_raises_no_alarm(alarm: Any, logged: list[Any]) -> None:
    rig = Rig(WorldConfig(num_blocks=64), audit_every_steps=1000)
    serve(rig, 4)
    be_idle(rig)
    assert not alarm(rig)
    assert logged == []


@pytest.mark.parametrize("audit_every_steps", [1000, 0])
def test_a_leak_per_release_is_counted_when_there_is_no_work(
    alarm: Any, monkeypatch: pytest.MonkeyPatch, audit_every_steps: int
) -> None:
    leak_a_block_per_release(monkeypatch)
    rig = Rig(WorldConfig(num_blocks=64), audit_every_steps=audit_every_steps)
    serve(rig, 3)
    be_idle(rig)
    stats = rig.engine.stats
    assert stats.num_leaked_blocks == samples(rig)["octavo_kv_blocks_leaked"] == 3
    assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_active_blocks + 3 == stats.num_blocks
    assert alarm(rig)


def test_a_leak_is_counted_while_there_is_always_work(
    alarm: Any, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    leak_a_block_per_release(monkeypatch)
    rig = Rig(WorldConfig(num_blocks=64), audit_every_steps=1000)
    rig.inbox.put(run_message(99, [3, 4, 5], max_tokens=30, min_tokens=30))
    serve(rig, 2)
    assert rig.engine.stats.has_work
    rig.now_s += 2.0
    rig.engine.step()
    assert rig.engine.stats.num_leaked_blocks == 2
    assert alarm(rig)
    assert [line["event"] for line in logged] == ["audit_failed"]


def count_audits(rig: Rig, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[float]:
    """When the blocks were audited, by the rig's clock, each time for so long."""
    at: list[float] = []
    audit = rig.blocks.audit

    def slow_audit() -> Any:
        at.append(rig.now_s)
        rig.now_s += seconds
        return audit()

    monkeypatch.setattr(rig.blocks, "audit", slow_audit)
    return at


@pytest.mark.parametrize(("num_blocks", "num_audits"), [(block_checks.AUDITED_AT_WORK, 8), (2 * 10**6, 0)])
def test_no_step_waits_for_the_audit_of_a_large_pool(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_audits: int
) -> None:
    rig = Rig(WorldConfig(num_blocks=num_blocks), audit_every_steps=3)
    at = count_audits(rig, monkeypatch, 0.0)
    rig.inbox.put(run_message(99, [3, 4, 5], max_tokens=30, min_tokens=30))
    rig.steps(24)
    assert rig.engine.stats.has_work
    assert len(at) == num_audits


def test_an_audit_that_takes_long_waits_longer_for_a_quiet_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(WorldConfig(num_blocks=64), audit_every_steps=1000)
    at = count_audits(rig, monkeypatch, 0.2)
    serve(rig, 1)
    be_idle(rig)
    assert len(at) == 1
    serve(rig, 1)
    worked_s = rig.now_s
    while len(at) == 1 and rig.now_s < worked_s + 60:
        rig.now_s += 0.1
        rig.engine.step()
    assert 0.2 * block_checks.IDLE_PER_AUDIT - 1 < at[1] - worked_s < 0.2 * block_checks.IDLE_PER_AUDIT + 1


def test_violations_are_logged_once_and_named(monkeypatch: pytest.MonkeyPatch, logged: list[Any]) -> None:
    leak_a_block_per_release(monkeypatch)
    rig = Rig(WorldConfig(num_blocks=64), audit_every_steps=1)
    serve(rig, 1)
    for _ in range(5):
        be_idle(rig)
    assert [(line["event"], line["log_level"], line["num_leaked_blocks"]) for line in logged] == [
        ("audit_failed", "error", 1)
    ]
    assert any("references" in violation for violation in logged[0]["violations"])


def test_blocks_that_wait_for_steps_in_flight_have_not_leaked() -> None:
    rig = Rig(WorldConfig(num_blocks=16, max_in_flight=2))
    rig.inbox.put(run_message(1, [3, 4, 5], max_tokens=6))
    recount = rig.blocks.recount()
    for _ in range(12):
        rig.engine.step()
        recount.look_at_all()
        assert recount.num_leaked == rig.blocks.audit().num_leaked == 0


def test_prometheus_agrees_that_the_rule_fires(repository: Path, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    series = {"octavo_kv_blocks_leaked": "0 0 3 3", "octavo_kv_audit_violations": "0 0 0 0"}
    labels = {"instance": "w", "severity": "critical"}
    test = {
        "rule_files": [str(repository / "deploy/prometheus/rules/alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": f'{name}{{instance="w"}}', "values": values} for name, values in series.items()
                ],
                "alert_rule_test": [
                    {"eval_time": "1m", "alertname": "OctavoBlocksLeaked", "exp_alerts": []},
                    {
                        "eval_time": "2m",
                        "alertname": "OctavoBlocksLeaked",
                        "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations(repository)}],
                    },
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def annotations(repository: Path) -> dict[str, str]:
    return {name: text.replace("{{ $labels.instance }}", "w") for name, text in rule(repository)["annotations"].items()}
