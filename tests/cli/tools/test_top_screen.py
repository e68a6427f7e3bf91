"""Snapshots of the load as they fit a screen."""

import pytest

from octavo.cli.tools.top_screen import SORT_KEYS, View, plain, screen
from octavo.v1 import load_pb2 as pb

VIEW = View(address="127.0.0.1:50051")


def snapshot(*, num_workers: int = 3, num_requests: int = 40, num_tenants: int = 7) -> pb.WatchLoadResponse:
    """A busy service."""
    percentiles = pb.Percentiles(num_values=9, p50=0.0123, p95=0.5, p99=1.75)
    total = pb.LoadFigures(
        num_in_flight=40, num_preparing=1, num_waiting=20, num_running=18, num_paused=1,
        prompt_tokens_per_s=12345.6, generation_tokens_per_s=7890.1, finished_per_s=2.5,
        time_to_first_token_s=percentiles, inter_token_s=percentiles,
    )  # fmt: skip
    conditions = (pb.WORKER_CONDITION_READY, pb.WORKER_CONDITION_LOST, pb.WORKER_CONDITION_DRAINING)
    workers = [
        pb.WorkerSnapshot(
            worker_id=f"worker-{n}", model="Qwen/Qwen2.5-0.5B-Instruct", condition=conditions[n % 3],
            blocks=pb.KvBlocks(num_blocks=1000, num_active=500, num_cached=1, num_free=499),
            num_running=6, num_waiting=n, prefill_tokens_per_s=100.0, generation_tokens_per_s=2000.0, steps_per_s=50.0,
        )
        for n in range(num_workers)
    ]  # fmt: skip
    requests = [
        pb.RequestSnapshot(
            request_id=f"request-{n:02}", tenant=f"tenant-{n % 3}", phase=1 + n % 5, num_prompt_tokens=n,
            num_output_tokens=300 - n, num_blocks=n * 7 % 40, age_s=300.0 - n, worker_id=f"worker-{n % 4}",
        )
        for n in range(num_requests)
    ]  # fmt: skip
    return pb.WatchLoadResponse(
        time_s=1.0, gateway="gateway-0", total=total, workers=workers, requests=requests,
        tenants=[pb.TenantLoad(tenant=f"tenant-{n}", figures=total) for n in range(num_tenants)],
    )  # fmt: skip


@pytest.mark.parametrize("size", [(80, 24), (60, 20), (40, 12), (132, 43), (200, 60), (20, 5)])
@pytest.mark.parametrize("load", [(3, 40, 7), (0, 0, 0), (64, 200, 100), (1, 1, 0)])
def test_it_fits_any_screen(size: tuple[int, int], load: tuple[int, int, int]) -> None:
    width, height = size
    workers, requests, tenants = load
    given = snapshot(num_workers=workers, num_requests=requests, num_tenants=tenants)
    lines = screen(given, VIEW, width=width, height=height)
    assert len(lines) == height
    assert [line.plain for line in lines if line.cell_len > width] == []
    assert lines[-1].plain.startswith("q quits"[:width])


def test_a_terminal_of_80_by_24_has_it_all() -> None:
    text = [line.plain for line in screen(snapshot(), VIEW, width=80, height=24)]
    assert text[0].startswith("octavo top · 127.0.0.1:50051 · gateway-0 ")
    assert text[1] == "requests 40 in flight: 1 preparing, 20 waiting, 18 running, 1 paused · 2.5 done/s"[:79] + "…"
    assert text[2:6] == [
        "tokens   12,346/s in, 7,890/s out",
        "TTFT     p50 12.3 ms  p95 500.0 ms  p99 1.8 s",
        "gaps     p50 12.3 ms  p95 500.0 ms  p99 1.8 s",
        "queue    -",
    ]
    (worker,) = [line.split() for line in text if line.startswith("worker-0")]
    assert worker[:3] == ["worker-0", "ready", "[████████▓······]"]
    assert worker[3:] == ["50%", "6", "0", "100", "2,000"]
    assert [line.split()[1] for line in text if line.startswith("worker-")] == ["ready", "lost", "draining"]
    assert any(line.startswith("TENANT") for line in text)
    assert any(line.startswith("REQUEST") for line in text)
    assert any(line.startswith("… and ") for line in text)


@pytest.mark.parametrize(
    ("key", "first"),
    [("a", "request-00"), ("o", "request-00"), ("p", "request-39"), ("b", "request-17"), ("t", "request-00")],
)
def test_keys_sort_the_requests_and_r_turns_them_round(key: str, first: str) -> None:
    view = VIEW.pressed(key)

    def listed(view: View) -> list[str]:
        return [line.split()[0] for line in plain(snapshot(), view).splitlines() if line.startswith("request-")]

    assert listed(view)[0] == first
    assert listed(view.pressed("r"))[-1] == first
    assert len(listed(view)) == 40


def test_other_keys_change_nothing_and_every_key_is_told() -> None:
    assert VIEW.pressed("z") == VIEW
    foot = screen(snapshot(), VIEW, width=120, height=24)[-1].plain
    assert all(f"{each.key} {each.name}" in foot for each in SORT_KEYS)


def test_what_is_wrong_stands_above() -> None:
    given = snapshot()
    given.is_draining = True
    given.unreachable_gateways.append("gateway-1")
    text = plain(given, View(address="x", note="no news"))
    for said in ("no news", "the service drains: new requests are refused", "no answer from gateway-1"):
        assert said in text.splitlines()
