"""Slopes over lives of processes: what grows is seen, a restart is no growth, and the interval holds what it says."""

import numpy as np
import pytest

from tests.soak.memory import MIB, Sample, slope

NUM_SAMPLES = 60
EVERY_S = 25.0


def life(pid: int, rss_mib: np.ndarray, *, born_s: float = 0.0, role: str = "gateway") -> list[Sample]:
    """A process that was looked at regularly."""
    return [
        Sample(
            role=role,
            pid=pid,
            at_s=born_s + EVERY_S * n,
            age_s=EVERY_S * n,
            rss_bytes=round(each * MIB),
            num_fds=30,
            num_threads=9,
        )
        for n, each in enumerate(rss_mib)
    ]


def noise(seed: int, count: int = NUM_SAMPLES) -> np.ndarray:
    """Samples that resemble their neighbours, as memory does: an AR(1) of 1 MiB."""
    drawn, level = np.random.default_rng(seed), 0.0
    return np.array([level := 0.6 * level + drawn.normal(0, 0.8) for _ in range(count)])


def test_what_grows_is_seen_through_the_noise() -> None:
    hours = np.arange(NUM_SAMPLES) * EVERY_S / 3600
    found = slope(life(1, 120 + 100 * hours + noise(0)), "gateway", warm_up_s=60)
    assert found is not None
    assert abs(found.mib_per_h - 100) < 2 * found.half_width < 30
    assert (found.num_lives, found.num_samples, found.is_flat) == (1, NUM_SAMPLES - 3, False)


def test_a_restart_is_no_growth_and_short_lives_and_others_do_not_count() -> None:
    samples = [
        *life(1, 100 + noise(1, 20)),
        *life(2, 140 + noise(2, 20), born_s=600),
        *life(3, np.array([90.0, 120.0])),
        *life(4, np.linspace(100, 400, 20), role="worker"),
    ]
    found = slope(samples, "gateway", warm_up_s=0)
    assert found is not None
    assert (found.num_lives, found.num_samples, found.is_flat) == (2, 40, True)
    assert abs(found.mib_per_h) <= 2 * found.half_width


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    found = [slope(life(1, 120 + noise(seed)), "gateway", warm_up_s=0) for seed in range(200)]
    num_right = sum(abs(each.mib_per_h) <= each.half_width for each in found if each)
    assert 0.8 <= num_right / 200 <= 1.0


@pytest.mark.parametrize("count", [0, 2, 3])
def test_too_few_samples_have_no_slope(count: int) -> None:
    assert slope(life(1, np.full(count, 100.0)), "gateway", warm_up_s=0) is None
