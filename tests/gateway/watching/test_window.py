"""What was counted in the last seconds, and percentiles of it."""

import pytest

from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.watching.window import LoadWindow, ModelCounts, WorkerCounts, added, percentiles
from tests.support.gateway.fake_pool import worker_view


def test_rates_are_of_the_last_ten_seconds() -> None:
    meters = GatewayMeters()
    window = LoadWindow(meters, now_s=100.0)
    for second in range(30):
        meters.of_model("m").generation_tokens += 5
        meters.of_tenant("ann").prompt_tokens += 2
        window.sample((), 100.0 + second)
    window_s, counts = window.read((), 129.5)
    assert window_s == 10.5
    assert counts.models["m"].generation_tokens == 50
    assert counts.tenants == {"ann": (20, 0)}


def test_the_first_second_of_a_life_counts_as_one() -> None:
    meters = GatewayMeters()
    window = LoadWindow(meters, now_s=100.0)
    meters.of_model("m").prompt_tokens = 7
    window_s, counts = window.read((), 100.01)
    assert (window_s, counts.models["m"].prompt_tokens) == (1.0, 7)


def test_a_window_that_nobody_has_sampled_for_long_is_as_long_as_that() -> None:
    meters = GatewayMeters()
    window = LoadWindow(meters, now_s=100.0)
    meters.of_model("m").prompt_tokens = 60
    assert window.read((), 160.0)[0] == 60.0


def test_a_workers_counters_begin_with_its_life_and_never_fall() -> None:
    window = LoadWindow(GatewayMeters(), now_s=100.0)
    seen = [worker_view(epoch="e1", num_steps=1000, num_generated_tokens=900)]
    window.sample(seen, 100.0)
    later = [worker_view(epoch="e1", num_steps=1010, num_generated_tokens=800)]
    assert window.read(later, 101.0)[1].workers == {("w0", "e1"): WorkerCounts(num_steps=10)}
    anew = [worker_view(epoch="e2", num_steps=50)]
    assert window.read(anew, 102.0)[1].workers == {("w0", "e2"): WorkerCounts()}
    window.sample(anew, 102.0)
    assert window.read([worker_view(epoch="e2", num_steps=53)], 103.0)[1].workers["w0", "e2"].num_steps == 3


def test_counts_of_a_model_are_differences_of_everything() -> None:
    meters = GatewayMeters()
    model = meters.of_model("m")
    model.time_to_first_token.observe(0.02)
    before = ModelCounts.of(model)
    model.time_to_first_token.observe(0.03)
    model.inter_token.observe(0.001, 4)
    model.queue.observe(9.0)
    model.finished["stop"] += 2
    since = ModelCounts.of(model).since(before)
    assert (sum(since.time_to_first_token), sum(since.inter_token), sum(since.queue)) == (1, 4, 1)
    assert since.num_finished == 2


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0, 0, 0], None),
        ([], None),
        ([10, 0, 0], (0.5, 0.95, 0.99)),
        ([0, 10, 0], (2.0, 2.9, 2.98)),
        ([5, 5, 0], (1.0, 2.8, 2.96)),
        ([0, 0, 3], (3.0, 3.0, 3.0)),  # above the last bound
        ([1], None),  # of other buckets
    ],
)
def test_percentiles_are_interpolated_in_their_bucket(counts: list[int], expected: object) -> None:
    found = percentiles((1.0, 3.0), counts)
    assert found == (pytest.approx(expected) if expected else None)


def test_histograms_of_other_buckets_are_left_out() -> None:
    assert added([(1, 2), (), (3, 4), (1, 1, 1)]) == [4, 6]
    assert added([]) == []
