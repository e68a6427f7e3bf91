"""How many prompt tokens a step takes beside outputs that are being read: learned from steps, counted in steps."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.shapes import PUBLISHED
from bench.worker.pace import H200, Asked, code, nano, simulate
from octavo.worker.config import GPU_MAX_GAP_S, GPU_MAX_GAP_STEPS
from octavo.worker.scheduler.costs import LEAST_PROMPT_TOKENS, StepBudget, StepPace
from octavo.worker.scheduler.plan import Chunk, Slot
from octavo.worker.scheduler.scheduler import Scheduler
from tests.support.worker.scheduling import World, WorldConfig

AUTO = {"max_gap_s": GPU_MAX_GAP_S, "max_gap_steps": GPU_MAX_GAP_STEPS}


def chunk(start: int, num_tokens: int) -> Chunk:
    return Chunk(slot=Slot(0), start=start, num_tokens=num_tokens, is_last=False)


def learned(
    token_s: float,
    attended_s: float,
    *,
    decode_s: float = 0.002,
    max_gap_s: float = 0.025,
    steps: float = 0.0,
    max_tokens: float = math.inf,
) -> StepPace:
    """From forty steps of a device like that."""
    pace, rng = StepPace(max_gap_s, least_steps=steps, max_tokens=max_tokens), np.random.default_rng(0)
    for _ in range(40):
        start, num = int(rng.integers(0, 20_000)), int(rng.integers(64, 4096))
        seconds = decode_s + num * token_s + num * (start + num / 2) * attended_s
        pace.note((chunk(start, num),), 8, seconds * float(rng.uniform(0.97, 1.03)))
        pace.note((), 8, decode_s)
    return pace


@pytest.mark.parametrize(("token_s", "attended_s"), [(2e-5, 0.0), (2e-5, 8e-10), (1.3e-6, 2e-10), (2e-3, 1e-7)])
@pytest.mark.parametrize("start", [0, 1000, 20_000])
@pytest.mark.parametrize("gap_s", [0.01, 0.025, 0.4])
def test_a_bounded_step_takes_about_as_long_as_it_may(
    token_s: float, attended_s: float, start: int, gap_s: float
) -> None:
    num = learned(token_s, attended_s, max_gap_s=gap_s).allow(8).take(start, 10**6)
    seconds = 0.002 + num * token_s + num * (start + num / 2) * attended_s
    assert num == LEAST_PROMPT_TOKENS or gap_s / 2 < seconds < 1.15 * gap_s
    assert num & (num - 1) == 0 or num % 3 == 0  # as recorded steps are


def test_chunks_of_one_step_share_what_it_may_take() -> None:
    budget = learned(2e-5, 0.0, max_gap_s=0.0221).allow(8)  # for 1,000 tokens
    taken = [budget.take(0, 300), budget.take(0, 300)]
    assert not budget.is_spent
    taken.append(budget.take(0, 5000))
    assert budget.is_spent
    assert taken[:2] == [300, 300]
    assert sum(taken) == 768


@pytest.mark.parametrize("num_decodes", [0, 1])
def test_nothing_is_bounded_before_it_is_learned_or_where_nobody_waits_for_the_step(num_decodes: int) -> None:
    for pace in (StepPace(0.001), StepPace(0.001, least_steps=2.0), *([] if num_decodes else [learned(1.0, 0.0)])):
        assert pace.allow(num_decodes).take(0, 8192) == 8192


def test_prompts_get_on_however_slow_the_device_is() -> None:
    assert learned(1.0, 0.0).allow(1).take(0, 8192) == LEAST_PROMPT_TOKENS
    assert learned(1.0, 0.0).allow(1).take(0, 5) == 5
    assert StepBudget(-1.0, 1.0, 0.0).take(0, 8192) == LEAST_PROMPT_TOKENS
    assert StepBudget(math.inf, 0.0, 0.0).take(0, 8192) == 8192


def test_a_bounded_step_has_the_largest_recorded_size_that_fits() -> None:
    fitting = (47.9, 48.0, 63.9, 64.0, 95.9, 96.0)
    assert [StepBudget(each, 1.0, 0.0).take(0, 8192) for each in fitting] == [32, 48, 48, 64, 64, 96]


def test_by_default_steps_are_as_long_as_the_next_prompt_has_waited() -> None:
    pace = learned(2e-5, 0.0, steps=3.0)
    counts = [pace.allow(8, waited_s=waited_s).take(0, 10**6) for waited_s in (0.0, 0.01, 0.1, 1.0)]
    assert counts[0] == counts[1] < counts[2] < counts[3]
    strict = learned(2e-5, 0.0)
    assert strict.allow(8, waited_s=1.0).take(0, 10**6) == strict.allow(8).take(0, 10**6)


def test_far_behind_in_a_prompt_no_step_is_longer_than_one_full_of_beginnings() -> None:
    """However long prompts wait: 8,192 tokens behind 20,000 others took three times as long, and served nobody."""
    h200 = learned(1.3e-6, 2.2e-10, decode_s=0.001, steps=GPU_MAX_GAP_STEPS, max_gap_s=GPU_MAX_GAP_S, max_tokens=8192)
    slow = learned(1.9e-5, 8e-10, decode_s=0.007, steps=GPU_MAX_GAP_STEPS, max_gap_s=GPU_MAX_GAP_S, max_tokens=8192)
    for pace in (h200, slow):
        assert pace.allow(8, waited_s=9.0).take(0, 8192) == 8192
    far = h200.allow(8, waited_s=9.0).take(20_000, 8192)
    assert far * (1.3e-6 + (20_000 + far / 2) * 2.2e-10) < 1.15 * GPU_MAX_GAP_S
    assert slow.allow(8, waited_s=9.0).take(20_000, 8192) in (4096, 6144)


@pytest.mark.parametrize("late_s", [0.03, 0.05])
@pytest.mark.parametrize("num_since", [0, 3, 40])
def test_a_step_without_prompts_that_was_late_lets_no_step_be_longer(late_s: float, num_since: int) -> None:
    """A flood that is being taken in holds the host up; steps without prompts, which would tell that, are rare then."""
    pace = learned(1.1e-6, 2.3e-10, decode_s=0.0006, steps=GPU_MAX_GAP_STEPS, max_gap_s=GPU_MAX_GAP_S, max_tokens=8192)
    before = pace.allow(80, waited_s=9.0).take(9_000, 8192)
    pace.note((), 1, late_s)
    for _ in range(num_since):
        pace.note((chunk(0, 8000),), 80, 0.0006 + 8000 * (1.1e-6 + 4000 * 2.3e-10))
    assert pace.allow(80, waited_s=9.0).take(9_000, 8192) <= before


def test_a_late_first_step_without_prompts_allows_no_more_than_a_full_step_and_its_lateness() -> None:
    pace = StepPace(GPU_MAX_GAP_S, least_steps=GPU_MAX_GAP_STEPS, max_tokens=8192)
    pace.note((), 1, 0.0095)
    for start in (0, 4000, 8000, 16_000) * 10:
        pace.note((chunk(start, 4096),), 80, 0.0006 + 4096 * (1.1e-6 + (start + 2048) * 2.3e-10))
    num = pace.allow(80, waited_s=9.0).take(20_000, 8192)
    assert 0.0006 + num * (1.1e-6 + (20_000 + num / 2) * 2.3e-10) < 1.5 * GPU_MAX_GAP_S


@pytest.mark.parametrize("late_s", [0.02, 0.05])
@pytest.mark.parametrize("num_since", [1, 12, 60])
def test_a_step_that_was_late_hides_nothing_of_what_long_prompts_cost(late_s: float, num_since: int) -> None:
    """One of few attended tokens that takes long for another reason looks as if tokens cost it all."""
    pace = learned(1.3e-6, 2.2e-10, decode_s=0.001, steps=GPU_MAX_GAP_STEPS, max_gap_s=GPU_MAX_GAP_S, max_tokens=8192)
    rng = np.random.default_rng(1)
    for late in (*[0.0] * 100, late_s, *[0.0] * num_since):
        cut = 2000 if late else int(rng.integers(2000, 6000))
        seconds = 0.001 + 8100 * 1.3e-6 + (cut**2 + (8100 - cut) ** 2) / 2 * 2.2e-10
        pace.note((chunk(0, cut), chunk(0, 8100 - cut)), 80, seconds * float(rng.uniform(0.95, 1.05)) + late)
    far = pace.allow(80, waited_s=9.0).take(20_000, 8192)
    assert far * (1.3e-6 + (20_000 + far / 2) * 2.2e-10) < 1.3 * GPU_MAX_GAP_S


@pytest.mark.parametrize("still_s", [2.0, 60.0])
@pytest.mark.parametrize("start", [0, 9_000])
def test_a_process_that_stood_still_takes_prompts_as_before(still_s: float, start: int) -> None:
    """Stopped, or its machine was: no step beside outputs took more than some hundred tokens for thousands of steps."""
    pace = learned(8e-6, 2.2e-10, decode_s=0.006, steps=GPU_MAX_GAP_STEPS, max_gap_s=GPU_MAX_GAP_S, max_tokens=8192)
    before = pace.allow(8).take(start, 8192)
    pace.note((chunk(0, 2048),), 8, still_s)
    assert before / 2 <= pace.allow(8).take(start, 8192) <= before


def test_a_device_that_is_slower_from_now_on_is_found_out() -> None:
    pace = learned(8e-6, 0.0, decode_s=0.006, max_gap_s=GPU_MAX_GAP_S)
    for _ in range(400):
        pace.note((chunk(0, 2048),), 8, 0.006 + 2048 * 20 * 8e-6)
    assert pace.allow(8).take(0, 8192) <= 1.5 * (GPU_MAX_GAP_S - 0.006) / (20 * 8e-6)


def test_prompts_of_any_length_all_at_once_leave_streams_smooth() -> None:
    """From the first step on, before any without prompts was seen."""
    asked = code(3, count=200, rate=None, long_share=0.03)
    before, after = simulate(asked, H200["0.5B"]), simulate(asked, H200["0.5B"], **AUTO)
    assert before["gap_p99_ms"] > 50
    assert after["gap_p99_ms"] < 1.2e3 * GPU_MAX_GAP_S
    assert after["steps"] < 1.25 * before["steps"]
    assert after["ttft_p50_ms"] < 1.08 * before["ttft_p50_ms"]  # six prompts of 30,000 in 200
    assert after["tokens_per_s"] > 0.92 * before["tokens_per_s"]


def test_a_prompt_beside_a_stream_is_cut_into_steps_of_the_target() -> None:
    """Steps of the scheduler, on a clock by which a token takes a millisecond."""
    config = WorldConfig(num_blocks=800, max_num_seqs=4, max_batch_tokens=512, max_model_len=1000)
    world = World(config, make_scheduler=lambda made, blocks: Scheduler(replace(made, max_gap_s=0.1), blocks))
    world.add(1, [1, 2, 3] * 20, max_tokens=300, min_tokens=300)

    def step() -> int:
        plan = world.launch()
        assert plan is not None
        world.now_s += 0.001 * plan.num_tokens
        world.collect()
        return sum(chunk.num_tokens for chunk in plan.prefill)

    lone = [step() for _ in range(5)]
    assert lone[0] == 60  # alone it is not cut
    world.add(2, list(range(10, 40)) * 13, max_tokens=3)
    seen = [step() for _ in range(10)]
    assert [each for each in seen if each] == [96, 96, 96, 96, 6]


@pytest.mark.parametrize("rate", [14, None])
def test_a_strict_bound_holds_while_prompts_flood_in(rate: float | None) -> None:
    asked = code(3, count=150, rate=rate)
    before, after = simulate(asked, H200["7B"]), simulate(asked, H200["7B"], max_gap_s=0.025)
    assert before["gap_p99_ms"] > 100
    assert after["gap_p99_ms"] < 1.3 * 25


def test_the_default_is_smoother_and_costs_neither_first_tokens_nor_rate() -> None:
    asked = code(3, count=200, rate=8)
    before, after = simulate(asked, H200["7B"]), simulate(asked, H200["7B"], **AUTO)
    assert after["gap_p99_ms"] < 0.75 * before["gap_p99_ms"]
    assert after["ttft_p50_ms"] < 1.03 * before["ttft_p50_ms"]
    assert after["tokens_per_s"] > 0.999 * before["tokens_per_s"]


@pytest.mark.parametrize("shape", ["0.5B", "7B"])
def test_the_default_costs_a_burst_nothing(shape: str) -> None:
    asked = [Asked(at_s=0.0, num_prompt=each.num_prompt, num_output=each.num_output // 4) for each in nano(0)]
    before, after = simulate(asked, H200[shape]), simulate(asked, H200[shape], **AUTO)
    assert after["tokens_per_s"] > 0.99 * before["tokens_per_s"]
    assert after["ttft_p50_ms"] < 1.01 * before["ttft_p50_ms"]


@pytest.mark.parametrize("chunk_s", [0.0, 0.0006])
def test_steps_of_short_prompts_do_not_hide_what_long_ones_cost(chunk_s: float) -> None:
    """Where each prompt costs something, too, the steps that attend to more take less time."""
    pace = StepPace(
        GPU_MAX_GAP_S,
        least_steps=GPU_MAX_GAP_STEPS,
        max_tokens=8192,
        attended_share=PUBLISHED["0.5B"].config.attended_share,
    )
    rng = np.random.default_rng(2)
    for _ in range(200):
        parts = [int(each) for each in np.diff([0, *np.sort(rng.integers(1, 8099, int(rng.integers(1, 9)))), 8100])]
        parts = [each for each in parts if each]
        attended = sum(each * each / 2 for each in parts)
        seconds = 0.001 + 8100 * 1.35e-6 + attended * 1.98e-10 + len(parts) * chunk_s
        pace.note([chunk(0, each) for each in parts], 80, seconds * float(rng.uniform(0.97, 1.03)))
        pace.note((), 80, 0.001)
    for start in (9_000, 17_000):
        num = pace.allow(80, waited_s=9.0).take(start, 8100)
        assert num >= 512
        assert 0.001 + num * 1.35e-6 + num * (start + num / 2) * 1.98e-10 < 1.25 * GPU_MAX_GAP_S
