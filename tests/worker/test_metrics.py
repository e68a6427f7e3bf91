"""What /metrics shows, as a scraper sees it."""

import re
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from octavo.wire.messages import Capacity, WireFinishReason
from octavo.worker.engine.interfaces import EngineStats, LinkStats, NullObserver, StepReport
from octavo.worker.metrics import (
    INTERVAL_S,
    BusyLog,
    CacheInfo,
    InfoCollector,
    MetricsServer,
    SnapshotCollector,
    StepMetrics,
)
from tests.support.gateway.workers import card, finished


def report(**changes: object) -> StepReport:
    plain: dict[str, object] = {
        "step": 1,
        "num_prefill_tokens": 10,
        "num_decode_tokens": 6,
        "num_sampled": 7,
        "step_s": 0.004,
        "host_s": 0.0003,
    }
    return StepReport(**(plain | changes))  # type: ignore[arg-type]


def page_of(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_gauges_and_counters_are_the_snapshots() -> None:
    registry = CollectorRegistry()
    stats = EngineStats(
        num_blocks=10,
        num_free_blocks=3,
        num_cached_blocks=2,
        num_active_blocks=4,
        num_leaked_blocks=1,
        num_running=4,
        num_waiting=1,
        num_preemptions=6,
        num_queried_tokens=100,
        num_hit_tokens=40,
    )
    registry.register(SnapshotCollector(lambda: stats, LinkStats(sent_messages=3), lambda: (True, False)))
    page = page_of(registry)
    for line in (
        "octavo_num_requests_running 4.0",
        "octavo_num_requests_waiting 1.0",
        "octavo_kv_cache_usage_ratio 0.4",
        'octavo_kv_blocks{state="active"} 4.0',
        "octavo_kv_blocks_leaked 1.0",
        'octavo_num_preemptions_total{kind="recompute"} 6.0',
        "octavo_prefix_cache_queries_total 100.0",
        "octavo_prefix_cache_hits_total 40.0",
        'octavo_zmq_messages_total{direction="sent"} 3.0',
        "octavo_worker_gateways 1.0",
    ):
        assert line in page


@pytest.mark.parametrize(("since_s", "told_s"), [(None, 0.0), (7.5, 12.5), (21.0, 0.0)])
def test_the_longest_wait_goes_on_while_the_queue_admits_nobody(since_s: float | None, told_s: float) -> None:
    """The snapshot is as old as the last step; the wait is not."""
    registry = CollectorRegistry()
    stats = EngineStats(num_waiting=1, waiting_since_s=since_s)
    registry.register(SnapshotCollector(lambda: stats, LinkStats(), tuple, lambda: 20.0))
    assert f"octavo_longest_wait_seconds {told_s}" in page_of(registry)


def test_an_output_of_one_token_has_no_time_per_token() -> None:
    registry = CollectorRegistry()
    StepMetrics(registry).on_finished(finished(1, completion_tokens=1, prefill_s=0.25))
    page = page_of(registry)
    assert "octavo_request_inference_time_seconds_count 1.0" in page
    assert "octavo_request_time_per_output_token_seconds_count 0.0" in page


def test_every_series_of_the_blocks_stands_for_what_there_is() -> None:
    registry = CollectorRegistry()
    stats = EngineStats(
        num_preemptions=5, num_swaps=2, num_host_blocks=9, num_free_host_blocks=4, num_cached_host_blocks=3,
        num_copied_out_blocks=7, num_copied_in_blocks=6,
    )  # fmt: skip
    registry.register(SnapshotCollector(lambda: stats, LinkStats(), tuple))
    page = page_of(registry)
    for line in (
        'octavo_num_preemptions_total{kind="recompute"} 3.0',
        'octavo_num_preemptions_total{kind="swap"} 2.0',
        'octavo_kv_host_blocks{state="active"} 2.0',
        'octavo_kv_copied_blocks_total{direction="out"} 7.0',
        'octavo_kv_copied_blocks_total{direction="in"} 6.0',
    ):
        assert line in page.splitlines()
    assert set(re.findall(r'octavo_kv_host_blocks\{state="(\w+)"\}', page)) == {"free", "cached", "active"}
    assert set(re.findall(r'octavo_kv_blocks\{state="(\w+)"\}', page)) == {"free", "cached", "active"}
    assert re.findall(r'octavo_num_preemptions_total\{kind="(\w+)"\}', page) == ["recompute", "swap"]


def test_steps_and_ends_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(registry)
    metrics.on_step(report())
    metrics.on_step(report(failed="RunnerError"))
    metrics.on_finished(finished(1, prompt_tokens=12, completion_tokens=5, queue_s=0.5, prefill_s=0.25, decode_s=2.0))
    metrics.on_finished(finished(2, reason=WireFinishReason.ERROR, error="NUMERICAL"))
    metrics.on_finished(finished(3, reason=WireFinishReason.ERROR, error="x" * 100))
    page = page_of(registry)
    for line in (
        "octavo_iteration_tokens_sum 32.0",
        "octavo_step_time_seconds_count 2.0",
        "octavo_step_failures_total 1.0",
        'octavo_request_finished_total{finished_reason="error"} 2.0',
        'octavo_request_errors_total{reason="numerical"} 1.0',
        'octavo_request_errors_total{reason="internal"} 1.0',
        "octavo_prompt_tokens_total 12.0",
        "octavo_request_queue_time_seconds_sum 0.5",
        "octavo_request_inference_time_seconds_sum 2.25",
        "octavo_request_time_per_output_token_seconds_sum 0.5",
        "octavo_request_time_per_output_token_seconds_count 1.0",
    ):
        assert line in page


def test_the_set_of_series_is_closed() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(registry)
    before = {line.split(" ")[0] for line in page_of(registry).splitlines()}
    for number in range(200):
        metrics.on_finished(finished(number, reason=WireFinishReason.ERROR, error=f"made up {number}"))
    assert {line.split(" ")[0] for line in page_of(registry).splitlines()} == before


def test_the_page_is_served_on_loopback_and_closes() -> None:
    registry = CollectorRegistry()
    capacity = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_waiting=8, max_batch_tokens=64)
    registry.register(InfoCollector(card(), capacity, version="1.2", cache=CacheInfo(dtype="fp8")))
    server = MetricsServer(registry, host="127.0.0.1", port=0)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as response:
        page = response.read().decode()
    assert 'octavo_build_info{role="worker",version="1.2"} 1.0' in page
    assert re.search(r'octavo_model_info\{.*model_name="tiny".*\} 1\.0', page)
    labels = 'block_size="16",cache_dtype="fp8",enable_prefix_caching="True",num_gpu_blocks="64"'
    assert f"octavo_cache_config_info{{{labels}}} 1.0" in page
    with pytest.raises(OSError, match=f"127.0.0.1:{server.port}"):
        MetricsServer(registry, host="127.0.0.1", port=server.port)
    server.close()


def test_a_busy_worker_says_so_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, INTERVAL_S, INTERVAL_S + 1.0])
    stats = EngineStats(
        num_prefill_tokens=500, num_generated_tokens=200, num_running=3, num_blocks=10, num_active_blocks=4
    )
    busy = BusyLog(NullObserver(), lambda: stats, lambda: next(times))
    for _ in range(3):
        busy.on_step(report())
    written = capsys.readouterr().out
    assert written.count("busy") == 1
    assert re.search(r"generation_tokens_per_s.{0,9}=.{0,9}20\.0", written)
