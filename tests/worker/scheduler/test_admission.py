"""The head of the queue is looked up again only where that may change the answer, and never too seldom."""

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.worker.runners.interface import RunnerError
from octavo.worker.runners.oracle.faults import OracleFaults
from tests.support.worker import host_traffic
from tests.support.worker.scheduling import World, WorldConfig, key

configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(8, 16),
        "num_host_blocks": st.sampled_from([0, 0, 6, 30]),
        "max_copies_in": st.sampled_from([1, 64]),
        "block_size": st.sampled_from([1, 2]),
        "max_num_seqs": st.integers(2, 5),
        "max_batch_tokens": st.integers(6, 31),  # fewer than what copies are weighed against
        "max_chunk_tokens": st.sampled_from([None, 2]),
        "max_in_flight": st.sampled_from([1, 2]),
        "aging_s": st.sampled_from([5.0, 1000.0]),
        "max_model_len": st.just(16),
    }
)


@settings(max_examples=25, phases=(Phase.explicit, Phase.generate))
@given(config=configs, seed=st.integers(0, 2**32), failing=st.sets(st.integers(1, 60), max_size=2))
def test_whoever_always_looks_again_admits_the_same(config: dict[str, Any], seed: int, failing: set[int]) -> None:
    traces = []
    for always in (False, True):
        errors: dict[int, RunnerError] = {step: RunnerError("broken") for step in failing}
        world = World(WorldConfig(**config, faults=OracleFaults(collect_errors=errors)))
        if always:
            world.blocks.most_hits_in_use = lambda *args, **kwargs: None  # type: ignore[method-assign]
        host_traffic.drive(world, seed, num_events=80)
        traces.append(world.trace)
    assert traces[0] == traces[1]


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that were looked up, in order."""
    found: list[str] = []
    num_hits_in_use = BlockManager.num_hits_in_use

    def counted(self: BlockManager, request_id: str, *args: object, **kwargs: object) -> int:
        found.append(request_id)
        return num_hits_in_use(self, request_id, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockManager, "num_hits_in_use", counted)
    return found


def test_prompts_of_others_that_are_computed_meanwhile_cost_the_head_no_lookup(lookups: list[str]) -> None:
    world = World(WorldConfig(num_blocks=64, max_num_seqs=8, max_batch_tokens=40, max_chunk_tokens=4))
    for handle in range(6):
        world.add(handle, [10 + handle] * (4 + 4 * handle), max_tokens=30)  # each is in the index behind its last chunk
    world.add(6, [3] * 60, max_tokens=2)
    num_indexed = []
    for _ in range(8):
        world.step()
        num_indexed.append(world.blocks.num_indexed)
    assert (len(set(num_indexed)), lookups) == (6, ["6"])
    world.run()
    world.check_complete()


def test_the_head_is_looked_up_again_once_others_have_computed_the_next_block_of_it(lookups: list[str]) -> None:
    world = World(WorldConfig(num_blocks=16, max_batch_tokens=40))
    prefix = list(range(3, 23))
    world.add(1, [*prefix, 30], max_tokens=9)
    world.add(2, [*prefix, 31], max_tokens=2)
    world.step()
    assert lookups == ["1"]
    world.step()
    assert (lookups, world.trace[-1].joins) == (["1", "1"], (2,))
    world.run()
    world.check_complete()


def test_room_that_is_not_enough_with_all_that_the_head_shared_costs_no_lookup(lookups: list[str]) -> None:
    world = World(WorldConfig(num_blocks=24, max_num_seqs=8, max_batch_tokens=40))
    for handle in range(4):
        world.add(handle, [10 + handle] * 7, max_tokens=2 + 2 * handle)
    world.step()
    world.add(4, [*[13] * 6, *[3] * 31], max_tokens=2)  # of 19 blocks, 3 are shared with the last one
    while not world.streams[key(4)].num_started:
        world.step()
    assert lookups == ["4", "4"]
    assert set(world.reasons()) == {0, 1, 2}
    world.run()
    world.check_complete()


def test_forks_of_one_prompt_are_not_preempted_if_the_head_does_not_fit_without_them() -> None:
    """Each of them holds the blocks of the prompt, which become free only once."""
    world = World(WorldConfig(num_blocks=34, max_num_seqs=8, max_batch_tokens=64, prefix_cache=PrefixCache.OFF))
    world.add(1, [3] * 8, max_tokens=9, priority=1)
    world.add(2, [4] * 32, max_tokens=16, num_outputs=4)
    for _ in range(2):
        world.step()
    world.add(3, [5] * 62, max_tokens=2, priority=1)
    for _ in range(2):
        world.step()
    assert world.scheduler.counters.num_preemptions == 0
    world.run()
    world.check_complete()
    assert world.scheduler.counters.num_preemptions == 4


def test_a_request_is_not_preempted_if_what_the_head_shares_with_it_is_not_enough() -> None:
    """Its blocks are room once it is gone, or hits in use while it is there: not both."""
    world = World(WorldConfig(num_blocks=20, max_num_seqs=8, max_batch_tokens=64))
    prefix = list(range(3, 23))
    world.add(1, [30] * 8, max_tokens=9, priority=1)
    world.add(2, [*prefix, 31], max_tokens=12)
    for _ in range(2):
        world.step()
    world.add(3, [*prefix, *[32] * 15], max_tokens=2, priority=1)
    for _ in range(4):
        world.step()
    assert world.scheduler.counters.num_preemptions == 0
    world.run()
    world.check_complete()
