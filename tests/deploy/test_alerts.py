"""Alerts fire for what they are about, with the settings that a service has by itself, and for nothing beside it."""

import re
from pathlib import Path
from typing import Any

from octavo.cli.settings.groups import GatewaySettings, WorkerSettings
from octavo.gateway.errors import ERROR_TABLE
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector
from octavo.gateway.workers.stats import PoolStats
from tests.support.services.promtool import alert_rules, check_with_promtool, is_told
from tests.support.services.service import REPOSITORY

SCRAPE_S = 5  # as deploy/prometheus/prometheus.yml has it
HEALTHY = 12  # scrapes before it begins
LONG = 240  # scrapes in all
GATEWAY = 'job="octavo-gateway", instance="g"'
WORKER = 'job="octavo-worker", instance="w"'


def fired(alert: str, summary: str, **labels: str) -> dict[str, Any]:
    rule = alert_rules()[alert]
    annotations = {"summary": summary}
    if "description" in rule["annotations"]:
        annotations["description"] = rule["annotations"]["description"]
    return {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": annotations}


def series(name: str, labels: str, values: str) -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": values}


def case(inputs: list[dict[str, str]], *expected: dict[str, Any]) -> dict[str, Any]:
    return {"interval": f"{SCRAPE_S}s", "input_series": inputs, "alert_rule_test": list(expected)}


def lost(reason: str, after_s: float) -> list[dict[str, str]]:
    """A gateway's counter of lost workers: one more, so long after all was well."""
    before = HEALTHY + int(after_s / SCRAPE_S)
    values = f"0x{before} 1x{LONG - before}"
    return [series("octavo_gateway_workers_lost_total", f'{GATEWAY}, reason="{reason}"', values)]


def moment(after_s: float) -> str:
    """So long after all was well."""
    return f"{HEALTHY * SCRAPE_S + int(after_s)}s"


def test_a_worker_that_makes_no_steps_is_told_although_it_is_given_up_and_ends_itself(tmp_path: Path) -> None:
    """Its gateways are sooner than any rate over a minute."""
    given_up_s, exit_s = GatewaySettings().stall_timeout_s, WorkerSettings().stall_exit_s
    until_exit = int(exit_s / SCRAPE_S)
    inputs = [
        series("octavo_num_requests_running", WORKER, f"3x{HEALTHY + until_exit} _x{LONG}"),
        series("octavo_engine_steps_total", WORKER, f"0+100x{HEALTHY} {100 * HEALTHY}x{until_exit} _x{LONG}"),
        *lost("WORKER_STALLED", given_up_s),
    ]
    told = fired(
        "OctavoWorkerStalled",
        "Gateway g gave up a worker that stood still: work and no step, or a process and no heartbeat",
        job="octavo-gateway", instance="g", reason="WORKER_STALLED",
    )  # fmt: skip
    moments = [(0.0, []), (given_up_s + 2 * SCRAPE_S, [told]), (given_up_s + 600, [])]
    expected = [is_told(moment(at), "OctavoWorkerStalled", *wanted) for at, wanted in moments]
    check_with_promtool(tmp_path, [case(inputs, *expected)])


def test_a_worker_that_falls_silent_is_told_although_its_series_end_with_it(tmp_path: Path) -> None:
    timeout_s = GatewaySettings().heartbeat_timeout_s
    inputs = [
        # Its age is below the timeout whenever it is seen: then the worker is forgotten, and its age with it.
        series("octavo_worker_heartbeat_age_seconds", f'{GATEWAY}, worker_id="w"', f"0.3x{HEALTHY} 4.9 _x{LONG}"),
        *lost("WORKER_LOST", timeout_s),
    ]
    told = fired(
        "OctavoWorkerLost",
        "Gateway g lost a worker: its outputs go on elsewhere, or wait for it",
        job="octavo-gateway", instance="g", reason="WORKER_LOST",
    )  # fmt: skip
    moments = [(0.0, []), (timeout_s + 2 * SCRAPE_S, [told]), (timeout_s + 600, [])]
    expected = [is_told(moment(at), "OctavoWorkerLost", *wanted) for at, wanted in moments]
    check_with_promtool(tmp_path, [case(inputs, *expected)])


def test_workers_that_leave_as_they_were_asked_are_no_alert(tmp_path: Path) -> None:
    silent = [is_told(moment(30), alert) for alert in ("OctavoWorkerLost", "OctavoWorkerStalled")]
    check_with_promtool(tmp_path, [case(lost("DRAINING", 0), *silent)])


def test_a_process_that_does_not_answer_is_told_a_worker_once_it_should_have_loaded(tmp_path: Path) -> None:
    """While a worker loads nobody listens at its port, which takes minutes with a large model; the health check of its
    image gives it as long."""
    gateway = fired("OctavoTargetDown", "octavo-gateway at g does not answer", job="octavo-gateway", instance="g")
    summary = "Worker w has not answered for ten minutes: it loads for long, or is gone"
    worker = fired("OctavoWorkerDown", summary, job="octavo-worker", instance="w")
    down = [series("up", labels, f"0x{LONG}") for labels in (GATEWAY, WORKER)]
    moments = [("20s", [], []), ("1m", [gateway], []), ("9m", [gateway], []), ("11m", [gateway], [worker])]
    expected = [is_told(at, "OctavoTargetDown", *gateways) for at, gateways, _ in moments]
    expected += [is_told(at, "OctavoWorkerDown", *workers) for at, _, workers in moments]
    check_with_promtool(tmp_path, [case(down, *expected)])


def test_a_queue_that_admits_nobody_is_told_by_how_long_its_first_has_waited(tmp_path: Path) -> None:
    """A histogram has who ended, and nobody does."""
    inputs = [
        series("octavo_longest_wait_seconds", WORKER, f"0+{SCRAPE_S}x{LONG}"),
        series("octavo_request_queue_time_seconds_bucket", f'{WORKER}, le="10.0"', f"7x{LONG}"),
        series("octavo_request_queue_time_seconds_bucket", f'{WORKER}, le="+Inf"', f"7x{LONG}"),
    ]
    told = fired("OctavoQueueWaits", "Requests wait 10m 0s in the queue of w", instance="w")
    expected = [is_told("4m", "OctavoQueueWaits"), is_told("10m", "OctavoQueueWaits", told)]
    check_with_promtool(tmp_path, [case(inputs, *expected)])


def test_long_waits_of_requests_that_ended_are_told_where_the_queue_is_empty_between_scrapes(tmp_path: Path) -> None:
    inputs = [
        series("octavo_longest_wait_seconds", WORKER, f"0x{LONG}"),
        *(
            series("octavo_request_queue_time_seconds_bucket", f'{WORKER}, le="{le}"', values)
            for le, values in (("10.0", f"0x{LONG}"), ("20.0", f"0+5x{LONG}"), ("+Inf", f"0+5x{LONG}"))
        ),
    ]
    told = fired("OctavoQueueWaits", "Requests wait 19.9s in the queue of w", instance="w")
    check_with_promtool(tmp_path, [case(inputs, is_told("10m", "OctavoQueueWaits", told))])


def answers(code: str, reason: str) -> list[dict[str, str]]:
    """Two a second."""
    return [series("octavo_requests_total", f'instance="g", method="m", code="{code}", reason="{reason}"', "0+10x240")]


def test_a_full_queue_is_told_and_a_tenant_at_its_own_limit_is_not(tmp_path: Path) -> None:
    """More workers would not let it have more; nor would they make a caller read."""
    told = fired("OctavoRefusing", "g refuses 2 requests a second: add workers", instance="g")
    others = ("TENANT_LIMIT", "SLOW_CONSUMER", "OUT_OF_MEMORY", "")
    cases = [case(answers("RESOURCE_EXHAUSTED", reason), is_told("10m", "OctavoRefusing")) for reason in others]
    cases.append(case(answers("RESOURCE_EXHAUSTED", "QUEUE_FULL"), is_told("10m", "OctavoRefusing", told)))
    check_with_promtool(tmp_path, cases)


def test_failures_are_told_also_of_a_contract_that_says_them_in_a_stream_that_ends_well(tmp_path: Path) -> None:
    """openengine.v1: their reason stands beside the code OK. What callers cause is no failure."""
    faults = {row.reason for row in ERROR_TABLE.values() if row.code.name in ("INTERNAL", "UNAVAILABLE")}
    others = ("", "DEADLINE", "ABORTED", "INVALID_FIELD")
    cases = [case(answers("OK", reason), is_told("10m", "OctavoErrors")) for reason in others]
    for reason in sorted(faults - {"INVALID_FIELD"}):
        told = fired("OctavoErrors", f"g fails 2 requests a second ({reason})", instance="g", reason=reason)
        cases.append(case(answers("OK", reason), is_told("10m", "OctavoErrors", told)))
    check_with_promtool(tmp_path, cases)


def test_preemptions_are_told_by_their_kind(tmp_path: Path) -> None:
    """What was swapped is not computed again."""
    inputs = [
        series("octavo_num_preemptions_total", f'{WORKER}, kind="{kind}"', values)
        for kind, values in (("swap", f"0+10x{LONG}"), ("recompute", f"0x{LONG}"))
    ]
    summary = "w preempts 2 requests a second (swap): the KV pool is too small"
    told = fired("OctavoPreempting", summary, job="octavo-worker", instance="w", kind="swap")
    check_with_promtool(tmp_path, [case(inputs, is_told("12m", "OctavoPreempting", told))])


def test_losses_have_their_series_before_the_first() -> None:
    """Else its increase would be nothing."""
    families = GatewayCollector(GatewayMeters(), PoolStats()).collect()
    (family,) = [each for each in families if each.name == "octavo_gateway_workers_lost"]
    for alert in ("OctavoWorkerStalled", "OctavoWorkerLost"):
        assert any(f'{{reason="{each.labels["reason"]}"}}' in alert_rules()[alert]["expr"] for each in family.samples)


def test_the_page_has_a_row_for_each_alert() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text()
    assert re.findall(r"^\| (Octavo\w+) \|", page, re.MULTILINE) == list(alert_rules())
