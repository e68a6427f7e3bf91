"""Every state of a small scope: two requests, three or four blocks of two tokens."""

import pytest

from tests.support.blockmgr.explore import ALL_ACTIONS, Scope, explore

SAME = ((0, 0, 0),)
SCOPES = {
    "copy-on-write": Scope(num_blocks=3, prompts=SAME, max_in_flight=1),
    "two plans in flight": Scope(num_blocks=3, prompts=SAME, max_in_flight=2, actions=ALL_ACTIONS - {"fork", "crash"}),
}
# Larger ones, by hand: 4 blocks, two plans, no fork: 4,278 states; 3 blocks, two plans, fork: 11,812 states (45 s).


@pytest.mark.slow
@pytest.mark.parametrize("name", SCOPES)
def test_no_order_of_actions_breaks_an_invariant_or_strands_a_block(name: str) -> None:
    seen = explore(SCOPES[name], max_states=20_000)
    assert seen.num_states > 1000
    assert seen.depth > 10
