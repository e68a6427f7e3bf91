"""No livelock, no starvation, no difference: many small random worlds, each within a bound of steps."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from octavo.worker.runners.oracle.model import OracleModel
from tests.support.worker.scheduling import World, WorldConfig, key


def _random_world(seed: int, max_in_flight: int, tenants: Sequence[str] = ("",)) -> World:
    """A pool so tiny that nearly everyone is preempted, requests of all sizes that fit it."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4])
    config = WorldConfig(
        num_blocks=rng.randint(3, 14),
        block_size=block_size,
        max_num_seqs=rng.randint(1, 6),
        max_batch_tokens=rng.randint(6, 14),
        max_chunk_tokens=rng.choice([None, 2, 4]),
        max_in_flight=max_in_flight,
        aging_s=rng.choice([4.0, 30.0, 1000.0]),
        model=OracleModel(vocab_size=30, eos_token_ids=(2,), eos_every=rng.choice([None, 12])),
    )
    world = World(config)
    room = config.num_blocks * block_size - 1
    for handle in range(rng.randint(1, 10)):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, min(room, 12)))]
        tenant = tenants[handle * 7 % 5 % len(tenants)]
        world.add(handle, prompt, max_tokens=rng.randint(1, 16), priority=rng.choice([0, 0, 0, 1, 2]), tenant=tenant)
        for _ in range(rng.choice([0, 0, 1, 3])):
            world.step()
    return world


def _bound(world: World) -> int:
    """Steps that suffice if at least one known token is computed for good in every other step."""
    return 10 + 2 * sum(len(asked.prompt_ids_T) + asked.sampling.max_tokens for asked in world.asked.values())


@pytest.mark.parametrize("tenants", [("",), ("a", "b", "many")])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_tiny_pools_come_to_an_end_and_every_output_is_what_the_reference_says(
    max_in_flight: int, tenants: tuple[str, ...]
) -> None:
    num_preemptions = 0
    for seed in range(250):
        world = _random_world(seed, max_in_flight, tenants)
        world.run(max_steps=_bound(world))
        world.check_complete()
        world.check_quiet()
        num_preemptions += world.scheduler.counters.num_preemptions
    assert num_preemptions > 120


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_every_request_of_a_crowd_is_preempted_and_none_notices(max_in_flight: int) -> None:
    config = WorldConfig(
        num_blocks=24,
        block_size=4,
        max_num_seqs=16,
        max_batch_tokens=64,
        max_in_flight=max_in_flight,
        model=OracleModel(vocab_size=1000, eos_token_ids=(2,), eos_every=60),
    )
    world = World(config)
    rng = random.Random(7)
    for handle in range(64):
        shared = [5, 6, 7, 8] if rng.random() < 0.5 else []
        world.add(handle, [*shared, *(rng.randint(3, 999) for _ in range(rng.randint(1, 12)))], max_tokens=32)
        if rng.random() < 0.3:
            world.step()
        running = world.scheduler.requests.running
        if running and rng.random() < 0.3:
            world.scheduler.requests.preempt(rng.choice(running), world.now_s)
    world.run(max_steps=_bound(world))
    world.check_complete()
    world.check_quiet()
    assert world.scheduler.counters.num_preemptions > 30


def test_a_stream_of_important_requests_does_not_starve_a_humble_one() -> None:
    world = World(WorldConfig(max_num_seqs=2, num_blocks=8, block_size=2, aging_s=20.0))
    world.add(0, [3, 4, 5], max_tokens=6, priority=0)
    for handle in range(1, 80):
        world.add(handle, [6, 7, 8], max_tokens=4, priority=5)
        world.step()
        if world.streams[key(0)].finished:
            break
    assert world.now_s <= 20.0 + 2 * 6 + 4
    assert world.streams[key(0)].tokens == world.expected(key(0))


def test_an_aged_request_that_runs_gives_way_to_nobody() -> None:
    world = World(WorldConfig(max_num_seqs=1, aging_s=2.0))
    world.add(1, [3, 4], max_tokens=4)
    world.add(2, [5, 6], max_tokens=6)
    for _ in range(5):
        world.step()
    world.add(3, [7, 8], max_tokens=1, priority=9)
    world.run()
    world.check_complete()
    finished = world.streams[key(2)].finished
    assert finished is not None
    assert finished.preemptions == 0


def test_a_request_whose_prefix_is_computed_while_it_waits_waits_no_longer_for_room_that_it_does_not_need() -> None:
    """Several requests with one long prefix come at once: the second shares it as soon as the first has it."""
    world = World(WorldConfig(num_blocks=16, block_size=2, max_batch_tokens=40))
    prefix = list(range(3, 23))
    world.add(1, [*prefix, 30], max_tokens=9)
    world.add(2, [*prefix, 31], max_tokens=2)
    assert [world.step_seen() is not None for _ in range(3)] == [True, True, True]
    assert [seen.joins for seen in world.trace] == [(1,), (2,), ()]
    world.run()
    world.check_complete()


def test_those_who_run_keep_a_block_each_to_grow_by_when_another_comes_in() -> None:
    """As far as a fiftieth of the pool goes: the newcomer would soon be preempted."""
    world = World(WorldConfig(num_blocks=100, block_size=8, max_batch_tokens=900, max_model_len=900))
    for handle in (1, 2):
        world.add(handle, [3, 4, handle], max_tokens=20)
    world.step()
    world.add(3, [5] * 97 * 8, max_tokens=2)  # of the 98 blocks that are free
    seen = world.step_seen()
    assert seen is not None
    assert seen.joins == ()
    world.cancel(3)
    world.add(4, [5] * 96 * 8, max_tokens=2)
    seen = world.step_seen()
    assert seen is not None
    assert seen.joins == (4,)
    world.run()
    world.check_complete()


def test_no_step_is_left_out_where_room_is_guessed_from_what_is_cached() -> None:
    """Blocks that are cached are room, or a hit: not both. Nothing else runs, so that the engine would go to sleep."""
    world = World(WorldConfig(num_blocks=12, block_size=2, max_batch_tokens=64))
    prefix = [3, 4, 5, 6, 7, 8, 9, 10]
    world.add(1, prefix, max_tokens=1)
    world.run()
    world.add(2, [20, 21, 22, 23, 24, 25], max_tokens=10)
    world.step()
    world.pause(2)
    world.run()
    world.add(3, [*prefix, *[30] * 12], max_tokens=2)
    assert world.step() is not None
    world.run()
    world.resume_all()
    world.run()
    world.check_complete()


def test_the_same_events_give_the_same_plans() -> None:
    def trace(seed: int) -> list[object]:
        world = _random_world(seed, max_in_flight=2)
        world.run()
        return [*world.trace]

    for seed in range(20):
        assert trace(seed) == trace(seed)


@pytest.mark.parametrize("seed", range(10))
def test_chunks_lookahead_cache_and_pool_size_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 1) for _ in range(rng.randint(1, 14))] for _ in range(8)]
    model = OracleModel(vocab_size=30, eos_token_ids=(2,), eos_every=15)
    wide = WorldConfig(num_blocks=200, block_size=2, max_num_seqs=8, max_batch_tokens=200, model=model)
    outputs = []
    for config in (
        wide,
        replace(wide, max_in_flight=2),
        replace(wide, max_chunk_tokens=1),
        replace(wide, block_size=1),
        replace(wide, num_blocks=16, max_in_flight=2, max_batch_tokens=8),
    ):
        world = World(config)
        for handle, prompt in enumerate(prompts):
            world.add(handle, prompt, max_tokens=16)
        world.run()
        world.check_quiet()
        outputs.append([world.streams[key(handle)].tokens for handle in range(len(prompts))])
    assert all(output == outputs[0] for output in outputs)
