"""Every state of a small scope over scheduler and block manager: two requests, three or four blocks of two tokens."""

import pytest

from octavo.blockmgr.ids import PrefixCache
from octavo.worker.scheduler.planner import Admission, InFlight, Planner
from tests.support.worker.scheduler_explore import Scope, explore

LONG, SHORT = (5, 6, 7), (5, 6, 8)
SCOPES = {
    "the same prompt twice": Scope(num_blocks=3, prompts=(LONG, LONG)),
    "two plans in flight": Scope(num_blocks=3, prompts=(LONG, SHORT), max_in_flight=2, budget=(("cancel", 1),)),
    "readers stop": Scope(num_blocks=3, prompts=(LONG, SHORT), budget=(("pause", 2),)),
    "readers stop, one slot": Scope(
        num_blocks=3, prompts=(LONG, SHORT), max_in_flight=2, max_num_seqs=1, budget=(("pause", 2),)
    ),
}
# Larger ones, by hand, all without deadlock and cycle: the second scope with preemptions, failed steps and lack of
# memory: 3,009 states, 6,899 transitions; 4 blocks, two plans, prompts of 5 and 3 tokens, the second of
# higher priority: 7,579 states, 17,861 transitions, depth 23; the same with chunks of two tokens: 6,620 states;
# without prefix cache: 4,117 states.


@pytest.mark.parametrize("name", SCOPES)
def test_there_is_no_deadlock_and_no_way_round_in_circles(name: str) -> None:
    seen = explore(SCOPES[name], max_states=10_000)
    assert (seen.deadlocks, seen.cycles) == ([], [])
    assert seen.num_states > 300
    assert seen.depth > 10


TIGHT = Scope(
    num_blocks=3,
    prompts=((5, 6, 7, 8), (6, 6, 7, 8)),
    max_batch_tokens=2,
    budget=(),
    prefix_cache=PrefixCache.OFF,
)


def test_it_finds_requests_that_are_displaced_again_before_their_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert explore(TIGHT, max_states=1000).cycles == []

    def displace_all(self: Planner, step: int, pipeline: InFlight, now_s: float) -> None:
        for request in self._requests.running:
            self._requests.preempt(request, now_s)

    monkeypatch.setattr(Planner, "_disturb", displace_all)
    assert explore(TIGHT, max_states=1000).cycles != []


def test_it_finds_a_queue_that_nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_may_fit", lambda self, head: self._requests.num_running == 1)
    assert explore(TIGHT, max_states=1000).deadlocks != []


def test_it_finds_those_who_wait_for_the_slot_of_one_whose_caller_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scope = SCOPES["readers stop, one slot"]
    monkeypatch.setattr(Admission, "preempt_for_head", lambda self, pipeline, now_s: None)
    assert explore(scope, max_states=10_000).deadlocks != []
