"""Known bugs of real servers, planted: each must be noticed by a scenario that passes without it.

Numbers m… are those of the project's list of mutants; the others are our own. Scenarios fail by AssertionError, or by
`OracleViolation`, which is one.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from octavo.blockmgr.manager import BlockManager
from octavo.worker.runners.interface import RunnerError
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.scheduler import scheduler as scheduler_module
from octavo.worker.scheduler.plan import GatewayIndex, StepPlan, StepResult
from octavo.worker.scheduler.planner import InFlight, Planner
from octavo.worker.scheduler.request import Ending, Request, SchedulerCounters
from octavo.worker.scheduler.request_table import RequestTable
from octavo.worker.scheduler.scheduler import Scheduler
from octavo.worker.scheduler.slot_state import InFlightStep, SlotState
from tests.support.worker.scheduling import World, WorldConfig, key

NAN_TOKEN = 40

# ---------------------------------------------------------------- scenarios


def unservable_before_servable() -> None:
    world = World(WorldConfig(num_blocks=4, block_size=2))
    world.add(1, [3] * 8)
    world.add(2, [3, 4], max_tokens=1)
    world.run(max_steps=50)
    assert world.reasons() == {1: "EXCEEDS_CAPACITY", 2: "LENGTH"}


def cancel_during_a_step() -> None:
    world = World(WorldConfig(num_blocks=5, block_size=2, max_in_flight=2, max_batch_tokens=16))
    world.add(1, [3, 4, 5, 6], max_tokens=9)
    world.launch()
    world.collect()
    world.launch()
    world.cancel(1)
    world.add(2, [6, 7, 8, 9, 10, 11, 12], max_tokens=2)
    world.run(max_steps=50)
    world.check_complete()
    world.check_quiet()


def gateway_disappears() -> None:
    world = World(WorldConfig(max_num_seqs=1))
    world.add(1, [3, 4], max_tokens=60, gateway=1)
    world.step()
    world.scheduler.drop_gateway(GatewayIndex(1), now_s=world.now_s)
    world.add(2, [3, 4], max_tokens=2)
    for _ in range(4):
        world.step()
    assert world.reasons() == {2: "LENGTH"}
    world.check_quiet()


def tiny_pool_one_step_ahead() -> None:
    world = World(WorldConfig(num_blocks=7, block_size=2, max_in_flight=2, max_num_seqs=4, max_batch_tokens=12))
    for handle in range(4):
        world.add(handle, [handle, handle + 1, handle + 2], max_tokens=8)
    world.run(max_steps=200)
    world.check_complete()
    world.check_quiet()
    assert world.scheduler.counters.num_preemptions <= 6
    first = world.streams[key(0)].finished
    assert first is not None
    assert first.preemptions == 0


def row_turns_nan() -> None:
    model = OracleModel(vocab_size=50, eos_token_ids=(2,))
    faults = OracleFaults(nan_token_id=NAN_TOKEN, nan_output_index=2)
    world = World(WorldConfig(model=model, block_size=1, num_blocks=40, faults=faults))
    world.add(1, [3, NAN_TOKEN], max_tokens=8)
    world.run(max_steps=50)
    world.check_complete()
    assert world.reasons() == {1: "NUMERICAL"}
    known = np.asarray([3, NAN_TOKEN, *world.expected(key(1))], np.int32)
    assert world.blocks.match(known) == 0
    world.check_quiet()


def cancelled_in_a_step_that_fails() -> None:
    faults = OracleFaults(collect_errors={1: RunnerError("broken")})
    world = World(WorldConfig(faults=faults))
    world.add(1, [3, 4, 5, 6], max_tokens=4)
    world.launch()
    world.cancel(1)
    world.add(2, [3, 4, 5, 6], seed=1, max_tokens=4)
    world.run(max_steps=50)
    assert world.reasons() == {1: "CANCELLED", 2: "LENGTH"}
    world.check_complete()


def no_token_is_computed_in_vain() -> None:
    world = World(WorldConfig(max_in_flight=2))
    for handle in range(3):
        world.add(handle, [3, 4, handle], max_tokens=4 + handle)
    world.run(max_steps=50)
    world.check_complete()
    num_decoded = sum(len(stream.tokens) - 1 for stream in world.streams.values())
    assert world.scheduler.counters.num_decode_tokens == num_decoded


def everything_a_little() -> None:
    model = OracleModel(vocab_size=30, eos_token_ids=(2,), eos_every=9)
    base = WorldConfig(num_blocks=9, block_size=2, max_in_flight=2, max_num_seqs=4, max_batch_tokens=9, model=model)
    for config in (base, replace(base, max_chunk_tokens=2), replace(base, num_blocks=6)):
        world = World(config)
        for handle in range(12):
            prompt = [handle % 2] * (1 + handle % 5) + [3]
            world.add(
                handle, prompt, max_tokens=3 + handle % 7, priority=handle % 3, seed=handle % 4, stop_token_ids=(7,)
            )
            world.step()
        world.cancel(10)
        world.run(max_steps=400)
        world.check_complete()
        world.check_quiet()


def readers_stop() -> None:
    """More of them than slots, with steps in flight, and a pool that is soon full."""
    world = World(WorldConfig(num_blocks=10, block_size=2, max_in_flight=2, max_num_seqs=2, max_batch_tokens=8))
    for handle in range(4):
        world.add(handle, [3, 4, handle], max_tokens=9)
    for _ in range(3):
        world.step()
    world.pause(0)
    world.pause(1)
    world.run(max_steps=60)
    assert set(world.reasons()) == {2, 3}
    world.resume_all()
    world.run(max_steps=60)
    world.add(4, [3, 4, 5], max_tokens=9)
    for _ in range(3):
        world.step()
    world.pause(4)
    world.step()
    world.resume(4)
    world.run(max_steps=60)
    world.check_complete()
    world.check_quiet()


SCENARIOS = [
    unservable_before_servable,
    cancel_during_a_step,
    gateway_disappears,
    tiny_pool_one_step_ahead,
    row_turns_nan,
    cancelled_in_a_step_that_fails,
    no_token_is_computed_in_vain,
    everything_a_little,
    readers_stop,
]

# ---------------------------------------------------------------- mutants


def m3_no_fit_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler_module, "refusal", lambda *args, **kwargs: None)


def m8_cancel_frees_blocks_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "begin_step", lambda self, step: None)
    patch.setattr(BlockManager, "end_step", lambda self, step: None)


def m10_slot_kept_after_disconnect(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestTable, "drop_gateway", lambda self, gateway, now_s: self.outputs.forget(gateway))


def m11_preempts_while_blocks_are_deferred(patch: pytest.MonkeyPatch) -> None:
    original = Planner.plan
    patch.setattr(Planner, "plan", lambda self, step, pipeline, now_s: original(self, step, InFlight.EMPTY, now_s))


def m12_nan_row_is_a_token(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.apply

    def apply(self: Scheduler, result: StepResult, *, now_s: float) -> object:
        return original(self, replace(result, is_finite_S=np.ones_like(result.is_finite_S)), now_s=now_s)

    patch.setattr(Scheduler, "apply", apply)


def m13_nan_blocks_are_cached(patch: pytest.MonkeyPatch) -> None:
    def end_tainted(self: RequestTable, request: Request, ending: Ending, now_s: float) -> None:
        self.end(request, ending, now_s)

    patch.setattr(RequestTable, "end_tainted", end_tainted)


def late_results_go_to_the_request_that_has_the_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlightStep, "is_live_A", lambda self, rows: np.ones(len(self.slots_A), np.bool_))


def one_token_too_many_is_scheduled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotState, "decodable", lambda self: self.is_decoding_S.nonzero()[0])


def preemption_forgets_what_was_generated(patch: pytest.MonkeyPatch) -> None:
    original = RequestTable.preempt

    def preempt(self: RequestTable, request: Request, now_s: float) -> None:
        original(self, request, now_s)
        request.token_ids_T = request.prompt_ids_T

    patch.setattr(RequestTable, "preempt", preempt)


def preemption_loses_the_request(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: RequestTable, request: Request, now_s: float) -> None:
        self._leave_slot(request, now_s)
        self.counters.num_preemptions += 1

    patch.setattr(RequestTable, "preempt", preempt)


def the_oldest_gives_way(patch: pytest.MonkeyPatch) -> None:
    def most_important(running: list[Request]) -> Request:
        return min(running, key=lambda request: request.rank)

    patch.setattr("octavo.worker.scheduler.planner.least_important", most_important)


def tokens_not_verified_are_committed(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.commit

    def commit(self: BlockManager, slot: int, token_ids_T: np.ndarray, num_computed: int) -> None:
        original(self, slot, token_ids_T, min(len(token_ids_T), self.capacity(slot)))

    patch.setattr(BlockManager, "commit", commit)


def table_updates_are_lost(patch: pytest.MonkeyPatch) -> None:
    original = Planner._seal

    def seal(self: Planner, *args: object) -> StepPlan:
        plan = original(self, *args)  # type: ignore[arg-type]
        return replace(plan, block_updates_U3=plan.block_updates_U3[:-1])

    patch.setattr(Planner, "_seal", seal)


def ends_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerCounters, "count", lambda self, finished: None)


def paused_requests_keep_their_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("octavo.worker.scheduler.planner.paused_first", lambda paused, others: list(others))


def paused_requests_stay_in_the_steps(patch: pytest.MonkeyPatch) -> None:
    original = RequestTable.pause

    def pause(self: RequestTable, request: Request, now_s: float) -> None:
        original(self, request, now_s)
        if request.slot is not None:
            self.slots.is_decoding_S[request.slot] = True

    patch.setattr(RequestTable, "pause", pause)


def paused_requests_wait_where_others_do(patch: pytest.MonkeyPatch) -> None:
    original = RequestTable._park

    def park(self: RequestTable, request: Request) -> None:
        original(self, request)
        self.waiting.push(request, 0.0)

    patch.setattr(RequestTable, "_park", park)


def a_resume_forgets_that_it_decoded(patch: pytest.MonkeyPatch) -> None:
    def resume(self: RequestTable, request: Request, now_s: float) -> None:
        self.parked.pop(request.order, None)
        if request.slot is None:
            self._queue(request, now_s)

    patch.setattr(RequestTable, "resume", resume)


MUTANTS = [
    (paused_requests_keep_their_slots, readers_stop),
    (paused_requests_stay_in_the_steps, readers_stop),
    (paused_requests_wait_where_others_do, readers_stop),
    (a_resume_forgets_that_it_decoded, readers_stop),
    (m3_no_fit_check, unservable_before_servable),
    (m8_cancel_frees_blocks_in_flight, cancel_during_a_step),
    (m10_slot_kept_after_disconnect, gateway_disappears),
    (m11_preempts_while_blocks_are_deferred, tiny_pool_one_step_ahead),
    (m12_nan_row_is_a_token, row_turns_nan),
    (m13_nan_blocks_are_cached, row_turns_nan),
    (late_results_go_to_the_request_that_has_the_slot, cancel_during_a_step),
    (one_token_too_many_is_scheduled, no_token_is_computed_in_vain),
    (preemption_forgets_what_was_generated, everything_a_little),
    (preemption_loses_the_request, tiny_pool_one_step_ahead),
    (the_oldest_gives_way, tiny_pool_one_step_ahead),
    (tokens_not_verified_are_committed, cancelled_in_a_step_that_fails),
    (table_updates_are_lost, everything_a_little),
    (ends_are_not_counted, everything_a_little),
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_scenario_passes_without_a_mutant(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize(("mutant", "scenario"), MUTANTS)
def test_the_mutant_is_killed(
    mutant: Callable[[pytest.MonkeyPatch], None], scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        scenario()
