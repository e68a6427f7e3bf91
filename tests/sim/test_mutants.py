"""Real bugs of other servers, planted one at a time, numbered as in the list of mutants: each is noticed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from octavo.blockmgr.manager import BlockManager
from octavo.gateway.requests.admission import Admission
from octavo.gateway.rpc.interceptor import StatusInterceptor
from octavo.gateway.workers.registry import Registry
from octavo.worker.scheduler.results import Results
from octavo.worker.scheduler.slot_state import InFlightStep
from sim.processes.runner import NAN_TOKEN
from sim.scenario import Fault, FaultKind, RequestSpec, Scenario, SimConfig
from sim.world import simulate

Plant = Callable[[pytest.MonkeyPatch], None]


def scenario(**changes: Any) -> Scenario:
    """Tenants with equal prompts, a pool that is too small, steps two at a time; some cancel, one turns NaN."""
    config = SimConfig(
        **{"num_blocks": 24, "block_size": 2, "audit_every_steps": 1, "max_in_flight": 2, "max_num_seqs": 12, **changes}
    )
    requests = [
        RequestSpec(
            index=index,
            at_s=round(index * 0.004, 3),
            prompt=(*((5, 6, 7), (15, 16, 17))[index % 2], 8, NAN_TOKEN if index == 21 else 9, 10 + index % 3),
            max_tokens=14,
            seed=index,
            tenant=("acme", "zen")[index % 2],
            cancel_after_s=0.03 if index % 4 == 0 else None,
            retries=3,
        )
        for index in range(48)
    ]
    others_prompt = RequestSpec(index=48, at_s=1.5, prompt=(15, 16, 17, 8, 9, 10), max_tokens=3, seed=1, tenant="new")
    frozen = RequestSpec(index=50, at_s=1.99, prompt=(5, 6), max_tokens=14, seed=1)
    last = RequestSpec(index=49, at_s=15.0, prompt=(5, 6), max_tokens=3, seed=1, retries=3)
    faults = (Fault(kind=FaultKind.FREEZE, at_s=2.0, duration_s=9.0),)
    return Scenario(seed=2, config=config, requests=(*requests, others_prompt, frozen, last), faults=faults)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The control."""


def m6_salt_ignored(patch: pytest.MonkeyPatch) -> None:
    admit = BlockManager.admit

    def salted(self: BlockManager, request_id: str, token_ids_T: Any, *, salt: str = "", **rest: Any) -> Any:
        return admit(self, request_id, token_ids_T, salt="", **rest)

    patch.setattr(BlockManager, "admit", salted)


def late_results_for_the_next_holder_of_the_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlightStep, "is_live_A", lambda self, rows: self.generations_A == self.generations_A)


def m10_admission_never_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "leave", lambda self, request_id: None)


def m12_nan_row_sampled(patch: pytest.MonkeyPatch) -> None:
    judge = Results._judge

    def blind(self: Results, flight: Any, result: Any, now_s: float) -> Any:
        result.is_finite_S[:] = True
        return judge(self, flight, result, now_s)

    patch.setattr(Results, "_judge", blind)


def m16_cancelled_error_escapes(patch: pytest.MonkeyPatch) -> None:
    end = StatusInterceptor._end

    async def careless(self: StatusInterceptor, error: BaseException, scope: Any, context: Any) -> None:
        if scope.request_id == "r50":
            raise asyncio.CancelledError
        await end(self, error, scope, context)

    patch.setattr(StatusInterceptor, "_end", careless)


def m18_zombie_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forgets(self: Registry, record: Any, reason: Any, detail: str) -> Any:
        return [self._remove(record, reason, detail)]

    patch.setattr(Registry, "give_up", forgets)


MUTANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        m6_salt_ignored,
        late_results_for_the_next_holder_of_the_slot,
        m10_admission_never_left,
        m12_nan_row_sampled,
        m16_cancelled_error_escapes,
        m18_zombie_forgotten,
    )
}


def test_the_world_that_they_are_planted_in_is_well() -> None:
    report = simulate(scenario())
    assert report.violations == ()
    assert report.outcomes["OK"] > 20
    assert report.outcomes["INTERNAL NUMERICAL"] == 1


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert simulate(scenario()).violations
