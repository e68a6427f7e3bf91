"""Workers of several ranks: a rank that dies or stands still takes its worker along and no stream, and what does not
reach every rank is noticed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.worker.runners import group
from octavo.worker.runners.group import GroupLost, GroupRunner, Launch
from octavo.worker.runners.interface import RunnerError
from octavo.worker.scheduler.plan import StepPlan
from octavo.worker.transport.watchdog import Watchdog
from sim.scenario import OF_RANKS, Fault, FaultKind, RequestSpec, Scenario, SimConfig
from sim.shrink import simulate_twice
from sim.swarm import scenario_of
from sim.world import simulate

Plant = Callable[[pytest.MonkeyPatch], None]
NUM_REQUESTS = 24
ALL = NUM_REQUESTS + 2
"""With the last one, and the one that every simulation ends with."""


def scenario(*kinds: FaultKind, **changes: Any) -> Scenario:
    """Two workers of three ranks; long outputs, some forked, in a pool that is too small, before a second tier. These
    things happen to a rank of each worker, one after the other, while they run, and once more when all is done."""
    settings = {
        "num_workers": 2, "num_ranks": 3, "num_blocks": 48, "block_size": 4, "audit_every_steps": 1, "max_in_flight": 2,
        "max_moves": 3, "move_timeout_s": 120.0, "num_host_blocks": 40, "max_copies_in": 4, "copy_s": 0.00001,
        "step_prefill_s": 0.002, "stall_timeout_s": 8.0, "stall_exit_s": 10.0, "eos_every": None,
    }  # fmt: skip
    requests = [
        RequestSpec(
            index=index, at_s=round(index * 0.01, 3), prompt=(5, 6, 7, 8, 9, 10 + index % 4), max_tokens=40, seed=index,
            num_outputs=1 + index % 2, retries=8,
        )
        for index in range(NUM_REQUESTS)
    ]  # fmt: skip
    last = RequestSpec(index=NUM_REQUESTS, at_s=90.0, prompt=(5, 6), max_tokens=3, seed=1, retries=8)
    faults = [
        Fault(kind=kind, at_s=at_s + 20.0 * turn, worker=worker, detail=str(1 + worker))
        for turn, kind in enumerate(kinds)
        for worker, at_s in enumerate((0.1, 0.6))
    ]
    config = SimConfig(**settings | changes)  # type: ignore[arg-type]
    return Scenario(seed=3, config=config, requests=(*requests, last), faults=tuple(faults))


def test_every_rank_does_what_rank_0_does() -> None:
    report = simulate_twice(scenario())
    assert report.violations == ()
    assert report.outcomes["OK"] == ALL
    assert report.outcomes["group lost"] == 0


def test_a_rank_that_dies_takes_its_worker_along_and_no_stream() -> None:
    report = simulate_twice(scenario(FaultKind.RANK_DIES))
    assert report.violations == ()
    assert report.outcomes["OK"] == ALL
    assert report.outcomes["group lost"] >= 1


def test_a_rank_that_stands_still_ends_its_worker_by_the_watchdog_and_no_stream() -> None:
    report = simulate_twice(scenario(FaultKind.RANK_STOPS))
    assert report.violations == ()
    assert report.outcomes["OK"] == ALL
    assert report.outcomes["watchdog"] >= 1


def test_a_step_that_fails_on_rank_0_alone_is_the_end_of_the_group() -> None:
    report = simulate_twice(scenario(FaultKind.ENGINE_ERROR))
    assert report.violations == ()
    assert report.outcomes["OK"] == ALL
    assert report.outcomes["group lost"] >= 1


@pytest.mark.parametrize("first", [200, 203])
def test_seeds_of_the_swarm_in_groups_end_balance_and_repeat(first: int) -> None:
    for seed in range(first, first + 3):
        drawn = scenario_of(seed, num_requests=24)
        config = msgspec.structs.replace(drawn.config, num_ranks=2 + seed % 2)
        added = tuple(
            Fault(kind=kind, at_s=0.2 + 0.7 * turn, worker=turn % config.num_workers, detail="1")
            for turn, kind in enumerate(sorted(OF_RANKS) * 2)
        )
        faults = tuple(sorted((*drawn.faults, *added), key=lambda fault: fault.at_s))
        report = simulate_twice(msgspec.structs.replace(drawn, config=config, faults=faults))
        assert report.violations == (), seed


# ---------------------------------------------------------------- planted


def rank_0_goes_on_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupRunner, "launch", lambda self, plan: self._runner.launch(plan))


def a_lost_rank_is_a_failed_step(patch: pytest.MonkeyPatch) -> None:
    for name in ("launch", "collect"):
        method = getattr(GroupRunner, name)

        def careless(self: GroupRunner, *arguments: Any, method: Any = method) -> Any:
            try:
                return method(self, *arguments)
            except GroupLost as lost:
                raise RunnerError(str(lost)) from None

        patch.setattr(GroupRunner, name, careless)


def changed_orders(patch: pytest.MonkeyPatch, change: Callable[[StepPlan], StepPlan]) -> None:
    encode = group.encode
    patch.setattr(group, "encode", lambda order: encode(Launch(change(order.plan))))


def copies_stay_at_rank_0(patch: pytest.MonkeyPatch) -> None:
    nothing = np.zeros((0, 2), np.int32)
    changed_orders(patch, lambda plan: replace(plan, block_copies_C2=nothing))


def blocks_that_come_back_stay_at_rank_0(patch: pytest.MonkeyPatch) -> None:
    nothing = np.zeros((0, 2), np.int32)
    changed_orders(patch, lambda plan: replace(plan, copies_in_C2=nothing))


def only_steps_with_tokens_are_sent(patch: pytest.MonkeyPatch) -> None:
    launch = GroupRunner.launch

    def frugal(self: GroupRunner, plan: StepPlan) -> None:
        (launch if plan.num_tokens else lambda self, plan: self._runner.launch(plan))(self, plan)

    patch.setattr(GroupRunner, "launch", frugal)


def nobody_watches_a_group_that_stands_still(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watchdog, "is_stalled", lambda self, stats, now_s: False)


PLANTED: dict[str, tuple[Plant, FaultKind | None, str]] = {
    "rank 0 goes on alone": (rank_0_goes_on_alone, None, "cannot do the step of rank 0"),
    "a lost rank is a failed step": (a_lost_rank_is_a_failed_step, FaultKind.RANK_DIES, "ENGINE_ERROR without a cause"),
    "copies of blocks stay at rank 0": (copies_stay_at_rank_0, None, "chose other tokens"),
    "blocks that come back stay at rank 0": (blocks_that_come_back_stay_at_rank_0, None, "the blocks of rank 1"),
    "only steps with tokens are sent": (only_steps_with_tokens_are_sent, None, "chose other tokens"),
    "nobody watches a group that stands still": (
        nobody_watches_a_group_that_stands_still, FaultKind.RANK_STOPS, "still has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind, found = PLANTED[name]
    plant(monkeypatch)
    violations = simulate(scenario(*([kind] if kind else []))).violations
    assert any(found in violation for violation in violations)
