"""Failed steps and rows that are not finite: who ends, who goes on, and what nobody may ever reuse."""

import pytest

from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import OracleModel
from tests.support.worker.scheduling import World, WorldConfig, key

NAN_TOKEN = 40
MODEL = OracleModel(vocab_size=50, eos_token_ids=(2,))


@pytest.mark.parametrize("output_index", [0, 1, 3])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_row_that_is_not_finite_ends_its_own_request_after_its_good_beginning(
    output_index: int, max_in_flight: int
) -> None:
    faults = OracleFaults(nan_token_id=NAN_TOKEN, nan_output_index=output_index)
    world = World(WorldConfig(model=MODEL, max_in_flight=max_in_flight, faults=faults))
    world.add(1, [3, 4, NAN_TOKEN, 5], max_tokens=8)
    world.add(2, [3, 4, 6], max_tokens=8)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "NUMERICAL", 2: "LENGTH"}
    assert len(world.streams[key(1)].tokens) == output_index
    finished = world.streams[key(1)].finished
    assert finished is not None
    assert finished.detail == f"the model gave no finite logits for position {4 + output_index}"


@pytest.mark.parametrize("output_index", [0, 2, 3])
def test_blocks_of_a_request_that_was_not_finite_never_serve_another(output_index: int) -> None:
    faults = OracleFaults(nan_token_id=NAN_TOKEN, nan_output_index=output_index)
    world = World(WorldConfig(model=MODEL, block_size=1, num_blocks=40, max_in_flight=2, faults=faults))
    world.add(1, [3, 4, NAN_TOKEN], max_tokens=8)
    world.run()
    assert world.reasons() == {1: "NUMERICAL"}
    assert world.blocks.num_cached == 0
    assert world.blocks.match(world.asked[key(1)].prompt_ids_T) == 0


def test_chunks_that_nothing_has_verified_serve_nobody_after_a_way_to_the_host_and_back() -> None:
    faults = OracleFaults(nan_token_id=NAN_TOKEN, nan_output_index=-100)  # from the first chunk on
    world = World(WorldConfig(model=MODEL, num_host_blocks=16, max_batch_tokens=4, faults=faults))
    request = world.add(1, [*range(3, 15), NAN_TOKEN], max_tokens=8)
    world.step()
    world.scheduler.requests.preempt(world.scheduler.requests.in_slot(0), world.now_s)
    world.step()
    world.step()
    world.cancel(1)
    world.add(2, [*range(3, 15), 15], max_tokens=3)
    world.run()
    world.check_complete()
    assert world.reasons() == {1: "CANCELLED", 2: "LENGTH"}
    finished = world.streams[request].finished
    assert finished is not None
    assert (finished.swaps, finished.computed_tokens) == (1, 8)  # it was back, and not at its end


@pytest.mark.parametrize("where", ["launch_errors", "collect_errors"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_failed_step_ends_everyone_in_it_and_the_next_request_is_served(where: str, max_in_flight: int) -> None:
    faults = OracleFaults(**{where: {3: RunnerError("illegal memory access")}})  # type: ignore[arg-type]
    world = World(WorldConfig(model=MODEL, max_in_flight=max_in_flight, faults=faults))
    world.add(1, [3, 4, 5, 6], max_tokens=8)
    world.add(2, [3, 4], max_tokens=8)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "ENGINE_ERROR", 2: "ENGINE_ERROR"}
    assert [len(world.streams[key(handle)].tokens) for handle in (1, 2)] == [2, 2]
    assert world.blocks.num_cached == 0
    world.add(3, [3, 4, 5, 6], max_tokens=3)
    world.run()
    world.check_complete()
    assert world.reasons()[3] == "LENGTH"


@pytest.mark.parametrize("where", ["launch_errors", "collect_errors"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_failed_step_spares_who_was_not_in_it(where: str, max_in_flight: int) -> None:
    faults = OracleFaults(**{where: {1: RunnerError("broken")}})  # type: ignore[arg-type]
    world = World(WorldConfig(model=MODEL, max_in_flight=max_in_flight, max_batch_tokens=4, faults=faults))
    world.add(1, [3, 4, 5, 6, 7, 8], max_tokens=3)
    world.add(2, [9, 10, 11], max_tokens=3)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "ENGINE_ERROR", 2: "LENGTH"}


def test_a_paused_output_whose_own_block_was_to_be_copied_by_a_failed_step_does_not_trust_it() -> None:
    faults = OracleFaults(launch_errors={2: RunnerOutOfMemory("short")})
    world = World(
        WorldConfig(model=MODEL, num_blocks=12, max_batch_tokens=32, max_num_seqs=6, max_in_flight=2, faults=faults)
    )
    for handle in (1, 2, 3):
        world.add(handle, [10 * handle + n for n in range(4)], max_tokens=8)
    world.add(4, [5, 6, 7], max_tokens=8, num_outputs=3)
    world.launch()
    assert world.launch() is None  # each of the others got a block, 4 the copy of one, and its sisters got none
    world.pause(4)
    world.cancel(1)
    world.collect()
    world.launch()
    world.resume(4)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert [world.reasons()[handle] for handle in (1, 4)] == ["CANCELLED", "LENGTH"]


@pytest.mark.parametrize("where", ["launch_errors", "collect_errors"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_out_of_memory_ends_the_largest_prefill_and_computes_the_others_again(where: str, max_in_flight: int) -> None:
    faults = OracleFaults(**{where: {3: RunnerOutOfMemory("3 GiB short")}})  # type: ignore[arg-type]
    world = World(WorldConfig(model=MODEL, max_in_flight=max_in_flight, max_batch_tokens=12, faults=faults))
    world.add(1, [3, 4], max_tokens=6)
    world.launch()
    world.launch() if max_in_flight == 2 else (world.collect(), world.launch())
    world.add(2, [5, 6, 7], max_tokens=4)
    world.add(3, [9, 10, 11, 12], max_tokens=4)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "LENGTH", 2: "LENGTH", 3: "OUT_OF_MEMORY"}
    ends = [world.streams[key(handle)].finished for handle in (1, 2, 3)]
    assert [end.preemptions for end in ends if end] == [1, 1, 0]


def test_out_of_memory_does_not_end_a_request_whose_blocks_are_on_their_way_back() -> None:
    errors: dict[int, RunnerError] = {}
    faults = OracleFaults(collect_errors=errors)
    world = World(
        WorldConfig(model=MODEL, num_blocks=12, num_host_blocks=16, max_copies_in=1, max_batch_tokens=20, faults=faults)
    )
    opening = list(range(3, 19))
    for handle, prompt in ((1, opening), (2, list(range(20, 40)))):
        world.add(handle, prompt, max_tokens=1)
        world.run()
    world.add(3, [40, 41], max_tokens=12)
    world.step()
    world.add(4, [*opening, 45], max_tokens=2)
    world.step()
    errors[len(world.trace) + 1] = RunnerOutOfMemory("short")
    world.step()
    world.run()
    world.check_complete()
    assert (world.reasons()[3], world.reasons()[4]) == ("OUT_OF_MEMORY", "LENGTH")


def test_out_of_memory_again_and_again_ends_one_request_each_time() -> None:
    errors = {step: RunnerOutOfMemory("short") for step in range(1, 100)}
    world = World(WorldConfig(model=MODEL, faults=OracleFaults(collect_errors=errors)))
    for handle in range(6):
        world.add(handle, [3, 4, 5], max_tokens=4)
    assert world.run() == 6
    assert set(world.reasons().values()) == {"OUT_OF_MEMORY"}
    world.check_quiet()


def test_who_was_cancelled_during_a_failed_step_stays_cancelled() -> None:
    faults = OracleFaults(collect_errors={2: RunnerError("broken")})
    world = World(WorldConfig(model=MODEL, faults=faults))
    world.add(1, [3, 4], max_tokens=6)
    world.step()
    world.launch()
    world.cancel(1)
    world.run()
    assert world.reasons() == {1: "CANCELLED"}
    world.check_quiet()


def test_a_prompt_that_a_failed_step_should_have_computed_for_outputs_that_are_gone_is_not_found() -> None:
    faults = OracleFaults(collect_errors={1: RunnerError("broken")})
    world = World(WorldConfig(faults=faults))
    world.add(1, [3, 4, 5, 6, 7], num_outputs=2)
    world.launch()
    world.cancel(1)
    world.cancel(1001)
    world.collect()
    assert world.blocks.num_indexed == 0
    world.add(2, [3, 4, 5, 6, 7])
    world.run()
    world.check_complete()
    world.check_quiet()


def test_what_a_failed_copy_has_lost_counts_as_computed_no_more() -> None:
    """The request comes back without, and leaves again before it is where it was."""
    errors: dict[int, RunnerError] = {}
    faults = OracleFaults(collect_errors=errors)
    world = World(WorldConfig(num_host_blocks=16, max_num_seqs=1, max_batch_tokens=4, faults=faults))
    world.add(1, list(range(3, 11)), max_tokens=9)
    for _ in range(3):
        world.step()
    world.scheduler.requests.preempt(world.scheduler.requests.in_slot(0), world.now_s)
    world.add(2, [30, 31], priority=1)
    errors[len(world.trace) + 1] = RunnerError("broken")
    assert world.launch() is not None
    assert len(world.plans[0].copies_out_C2) == 5
    world.collect()
    assert world.step() is not None
    world.cancel(1)
    assert world.blocks.num_indexed == 0  # four tokens of ten are there, and nothing has verified them
    world.add(3, list(range(3, 13)), max_tokens=2)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "CANCELLED", 2: "ENGINE_ERROR", 3: "LENGTH"}


def test_a_fork_that_had_its_first_token_outlives_a_failed_step_of_the_first_output() -> None:
    errors: dict[int, RunnerError] = {}
    world = World(WorldConfig(faults=OracleFaults(collect_errors=errors)))
    world.add(1, [3, 4, 5, 6, 7], num_outputs=2, max_tokens=9)
    world.step()
    world.pause(1001)
    world.step()
    errors[len(world.trace) + 1] = RunnerError("broken")
    world.step()
    assert world.reasons() == {1: "ENGINE_ERROR"}
    world.resume(1001)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "ENGINE_ERROR", 1001: "LENGTH"}
