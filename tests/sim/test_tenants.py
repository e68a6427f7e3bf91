"""Tenants with keys, quotas and weights in the simulation: all is well, and what is planted is noticed."""

from collections.abc import Callable
from typing import Any

import pytest

from octavo.gateway.requests.admission import TenantQuotas, TokenBucket
from octavo.gateway.requests.tracker import RequestTracker
from octavo.worker.scheduler.request import Request
from octavo.worker.scheduler.request_queue import TenantFairness, WaitingHeap
from sim.scenario import RequestSpec, Scenario, SimConfig, Tenant
from sim.swarm import scenario_of
from sim.world import simulate

Plant = Callable[[pytest.MonkeyPatch], None]
CROWD = Tenant(name="crowd", weight=1, max_requests=60, max_queued=58, tokens_per_minute=12_000, burst_tokens=1000)
SMALL = Tenant(name="small", weight=2)


def scenario(**changes: Any) -> Scenario:
    """A crowd that has sent all that it may before the others come, and more afterwards; some of it cancels."""
    config = SimConfig(
        **{
            "num_blocks": 64,
            "max_num_seqs": 2,
            "max_waiting": 200,
            "aging_s": 0.4,
            "tenants": (CROWD, SMALL),
            **changes,
        }
    )
    requests = [
        RequestSpec(
            index=index,
            at_s=round(index * 0.0005, 4) if index < 60 else round(0.1 + index * 0.01, 3),
            prompt=(5, 6, 7, 8, 9, 10 + index % 3),
            max_tokens=8,
            seed=index,
            tenant=("small" if index % 2 else "crowd") if index >= 60 else "crowd",
            num_outputs=3 if index % 10 == 5 else 1,
            cancel_after_s=0.05 if index % 5 == 0 else None,
            ignore_eos=True,
            retries=9,
        )
        for index in range(220)
    ]
    return Scenario(seed=4, config=config, requests=tuple(requests))


def test_quotas_are_reached_and_never_exceeded_and_shares_are_as_the_weights() -> None:
    report = simulate(scenario())
    assert report.violations == ()
    assert report.outcomes["OK"] > 120
    assert report.checks > 2000


def quota_not_refunded_on_cancel(patch: pytest.MonkeyPatch) -> None:
    close = RequestTracker.close

    def forgetful(self: RequestTracker, tracked: Any) -> None:
        leave = self.quotas.leave
        if all(stream.finished is None for stream in tracked.streams):
            self.quotas.leave = lambda *args, **kwargs: None  # type: ignore[method-assign]
        close(self, tracked)
        self.quotas.leave = leave  # type: ignore[method-assign]

    patch.setattr(RequestTracker, "close", forgetful)


def tokens_not_refunded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenBucket, "give_back", lambda self, num_tokens, now_ns: None)


def outputs_counted_once(patch: pytest.MonkeyPatch) -> None:
    enter = TenantQuotas.enter

    def careless(self: TenantQuotas, key: str, caller: Any, now_ns: int, *, num_outputs: int = 1) -> None:
        enter(self, key, caller, now_ns)

    patch.setattr(TenantQuotas, "enter", careless)


def queue_that_ignores_a_tenant(patch: pytest.MonkeyPatch) -> None:
    """What the first tenant gets is never charged."""
    served, known = TenantFairness.served, list[str]()

    def blind(self: TenantFairness, tenant: str) -> int:
        known.append(tenant)
        return 0 if tenant == known[0] else 1 + served(self, tenant)

    patch.setattr(TenantFairness, "served", blind)


def queue_without_tenants(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantFairness, "served", lambda self, tenant: 0)


def last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    """Among the aged, and within a tenant."""

    def head(self: WaitingHeap, now_s: float) -> Request | None:
        entries = [entry for entry in self._by_rank if self._spells.get(entry[1]) == entry[2]]
        return max(entries)[-1] if entries else None

    patch.setattr(WaitingHeap, "head", head)


MUTANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        quota_not_refunded_on_cancel,
        tokens_not_refunded,
        outputs_counted_once,
        queue_that_ignores_a_tenant,
        queue_without_tenants,
        last_come_first_served,
    )
}


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert simulate(scenario()).violations


def test_the_swarm_has_tenants_with_and_without_limits() -> None:
    tenants = [scenario_of(seed, num_requests=1).config.tenants for seed in range(60)]
    every = [tenant for some in tenants for tenant in some]
    assert 15 < sum(bool(some) for some in tenants) < 45
    assert {tenant.weight for tenant in every} == {1, 2, 7}
    for name in ("max_requests", "max_queued", "tokens_per_minute"):
        assert {getattr(tenant, name) is None for tenant in every} == {True, False}
