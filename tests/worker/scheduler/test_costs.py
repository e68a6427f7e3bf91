"""What is sooner, a copy or computing: by numbers, and what the scheduler makes of it."""

import numpy as np
import pytest

from octavo.worker.scheduler.costs import CopyCosts, DecayingRate
from tests.support.worker.scheduling import World, WorldConfig, key

DEVICE, HOST = False, True


def costs(*, copy_s: float, token_s: float | None, step_s: float = 0.0, max_copies_in: int = 4) -> CopyCosts:
    """Blocks of 16 tokens."""
    made = CopyCosts(block_size=16, max_copies_in=max_copies_in, copy_s=copy_s)
    if token_s is not None:
        made.note_step(100, 0, 100 * token_s)
    if step_s:
        made.note_step(0, 8, step_s)
    return made


def use(made: CopyCosts, *where: bool, num_others: int = 0) -> int:
    return made.num_to_use(np.array(where), num_others=num_others)


def test_a_copy_that_is_sooner_is_taken_and_one_that_is_later_is_not() -> None:
    assert use(costs(copy_s=0.001, token_s=0.001), HOST, HOST, HOST) == 3
    assert use(costs(copy_s=0.1, token_s=0.001), HOST, HOST, HOST) == 0
    assert use(costs(copy_s=0.1, token_s=0.001), DEVICE, DEVICE, HOST) == 2


def test_what_lies_behind_a_copy_on_the_device_counts_for_it() -> None:
    made = costs(copy_s=0.03, token_s=0.001)  # a block takes 0.016 s to compute
    assert use(made, HOST) == 0
    assert use(made, HOST, DEVICE) == 2
    assert use(made, HOST, DEVICE, HOST) == 2


def test_copies_beside_others_take_their_steps() -> None:
    made = costs(copy_s=0.0001, token_s=0.001, step_s=0.05)
    assert use(made, HOST, HOST) == 2
    assert use(made, HOST, HOST, num_others=3) == 0  # one more step is later than 32 tokens
    assert use(made, *[HOST] * 8, num_others=3) == 8  # 128 tokens are not: two plans of four blocks, 0.1 s


def test_what_was_never_measured_is_not_in_the_way() -> None:
    assert use(costs(copy_s=1000.0, token_s=None), HOST) == 1
    assert costs(copy_s=1000.0, token_s=None).is_swap_cheaper(num_blocks=9, num_tokens=9)
    assert use(costs(copy_s=1.0, token_s=1.0)) == 0


def test_a_swap_pays_both_ways() -> None:
    made = costs(copy_s=0.01, token_s=0.001)
    assert made.is_swap_cheaper(num_blocks=1, num_tokens=20)
    assert not made.is_swap_cheaper(num_blocks=1, num_tokens=19)


def test_rates_follow_what_is_measured_large_steps_more_than_small_ones() -> None:
    rate = DecayingRate(7.0)
    assert rate.seconds == 7.0
    rate.add(0, 1.0)
    rate.add(1, 0.0)
    assert rate.seconds == 7.0
    rate.add(1000, 1.0)
    rate.add(10, 1.0)
    assert rate.seconds == pytest.approx(1.9 / 910)
    for _ in range(200):
        rate.add(10, 1.0)
    assert rate.seconds == pytest.approx(0.1, rel=1e-3)


def asked_again(copy_s: float) -> tuple[int, int]:
    """Cached tokens of a prompt that was evicted to the host, and blocks that came back."""
    world = World(WorldConfig(num_blocks=14, num_host_blocks=40, max_batch_tokens=40, copy_s_per_block=copy_s))
    opening = list(range(3, 23))
    for handle, prompt in enumerate([opening, list(range(24, 48)), [*opening, 5]]):
        world.add(handle, prompt, max_tokens=1)
        world.run()
        world.scheduler.costs.prefill.add(1000, 1.0)  # a millisecond a token
    finished = world.streams[key(2)].finished
    assert finished is not None
    world.check_complete()
    return finished.cached_tokens, world.blocks.host.num_copied_in


def test_a_first_token_waits_for_no_copy_that_computing_would_beat() -> None:
    cached_tokens, num_copied_in = asked_again(0.0001)
    assert cached_tokens >= 16
    assert num_copied_in > 0
    assert asked_again(1.0)[1] == 0


@pytest.mark.parametrize(("copy_s", "swaps"), [(0.0001, 1), (1.0, 0)])
def test_the_receipt_tells_how_a_request_gave_way(copy_s: float, swaps: int) -> None:
    world = World(WorldConfig(num_blocks=20, num_host_blocks=40, max_batch_tokens=40, copy_s_per_block=copy_s))
    world.scheduler.costs.prefill.add(1000, 1.0)
    world.add(1, list(range(3, 20)), max_tokens=6)
    world.step()
    world.step()
    world.scheduler.requests.preempt(world.scheduler.requests.running[0], world.now_s)
    world.run()
    finished = world.streams[key(1)].finished
    assert finished is not None
    assert (finished.preemptions, finished.swaps) == (1, swaps)
    assert world.scheduler.counters.num_swaps == swaps
    world.check_complete()


def test_a_paused_request_gives_its_blocks_to_the_host_before_others_do() -> None:
    world = World(WorldConfig(num_blocks=14, num_host_blocks=40, max_batch_tokens=40, max_num_seqs=3))
    for handle in (1, 2):
        world.add(handle, [handle + 2] * 9, max_tokens=4)
    world.step()
    world.pause(1)
    world.add(3, [40] * 9, max_tokens=4)
    world.run()
    assert world.scheduler.counters.num_swaps == 1
    assert world.blocks.host.swapped.keys() == {"0"}
    world.resume(1)
    world.run()
    finished = world.streams[key(1)].finished
    assert finished is not None
    assert finished.swaps == 1
    world.check_complete()
    world.check_quiet()
