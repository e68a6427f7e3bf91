"""The oracle itself: it must notice what a model would, and agree with its slow reference."""

import numpy as np
import pytest

from octavo.wire.messages import SamplingParams
from octavo.worker.runners.interface import RunnerError
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import OracleModel, choose_token, mix_token, oracle_tokens
from octavo.worker.runners.oracle.runner import OracleRunner, OracleViolation, mix_tokens
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepPlan

MODEL = OracleModel(vocab_size=100_000, eos_token_ids=(2,))
SAMPLING = SamplingParams(seed=5, max_tokens=8)
PROMPT = [11, 12, 13, 14, 15]


def make_runner(max_in_flight: int = 1, faults: OracleFaults | None = None) -> OracleRunner:
    """Eight blocks of two, two slots."""
    return OracleRunner(
        MODEL,
        num_blocks=8,
        block_size=2,
        max_slots=2,
        max_blocks_per_slot=4,
        max_in_flight=max_in_flight,
        faults=faults,
    )


def prefill(step: int, slot: int, blocks: list[int], prompt: list[int] = PROMPT) -> StepPlan:
    """A whole prompt into these blocks."""
    join = NewRequest(
        slot=Slot(slot),
        request_id=f"r{slot}",
        token_ids_T=np.asarray(prompt, np.int32),
        num_prompt_tokens=len(prompt),
        sampling=SAMPLING,
    )
    updates = np.asarray([(slot, column, block) for column, block in enumerate(blocks)], np.int32).reshape(-1, 3)
    chunk = Chunk(slot=Slot(slot), start=0, num_tokens=len(prompt), is_last=True)
    return StepPlan(step=step, new_requests=(join,), block_updates_U3=updates, prefill=(chunk,))


def decode(step: int, slot: int, position: int, updates: list[tuple[int, int, int]] | None = None) -> StepPlan:
    """One token of one slot."""
    return StepPlan(
        step=step,
        block_updates_U3=np.asarray(updates or [], np.int32).reshape(-1, 3),
        decode_slots_S=np.asarray([slot], np.int32),
        decode_positions_S=np.asarray([position], np.int32),
    )


def run(runner: OracleRunner, plan: StepPlan) -> list[int]:
    """The tokens of one step."""
    runner.launch(plan)
    return runner.collect().tokens_S.tolist()


def expected(num_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    """The first tokens by the reference."""
    return oracle_tokens(prompt, SAMPLING, model=MODEL, max_total_tokens=100)[:num_tokens]


def test_the_vectorised_hash_equals_the_plain_one() -> None:
    tokens, positions = np.asarray([0, 1, 99, 151_935], np.int32), np.asarray([0, 7, 3, 40_000], np.int32)
    plain = [mix_token(token, position) for token, position in zip(tokens.tolist(), positions.tolist(), strict=True)]
    assert mix_tokens(tokens, positions).tolist() == plain


def test_what_it_reads_back_gives_the_tokens_of_the_reference() -> None:
    runner = make_runner()
    tokens = run(runner, prefill(1, 0, [5, 0, 3]))
    tokens += run(runner, decode(2, 0, 5))
    tokens += run(runner, decode(3, 0, 6, [(0, 3, 7)]))
    assert tokens == expected(3)


def test_two_steps_in_flight_give_the_same_tokens() -> None:
    runner = make_runner(max_in_flight=2)
    runner.launch(prefill(1, 0, [5, 0, 3]))
    runner.launch(decode(2, 0, 5))
    tokens = runner.collect().tokens_S.tolist()
    runner.launch(decode(3, 0, 6, [(0, 3, 7)]))
    tokens += runner.collect().tokens_S.tolist()
    tokens += runner.collect().tokens_S.tolist()
    assert tokens == expected(3)


def test_nothing_is_written_before_collect() -> None:
    runner = make_runner(max_in_flight=2)
    runner.launch(prefill(1, 0, [5, 0, 3]))
    assert (runner.store.tokens_PB == -1).all()


def test_a_block_that_two_requests_use_changes_the_tokens_of_the_first() -> None:
    runner = make_runner()
    run(runner, prefill(1, 0, [5, 0, 3]))
    run(runner, prefill(2, 1, [6, 0, 1], [21, 22, 23, 24, 25]))
    assert run(runner, decode(3, 0, 5)) != expected(2)[1:]


def test_a_poisoned_block_changes_the_tokens() -> None:
    runner = make_runner()
    run(runner, prefill(1, 0, [5, 0, 3]))
    runner.poison(np.asarray([0]))
    assert run(runner, decode(2, 0, 5)) != expected(2)[1:]


def test_a_copied_block_serves_as_well() -> None:
    runner = make_runner()
    run(runner, prefill(1, 0, [5, 0, 3]))
    plan = decode(2, 0, 5, [(0, 2, 4)])
    copied = StepPlan(
        step=2,
        block_updates_U3=plan.block_updates_U3,
        block_copies_C2=np.asarray([(3, 4)], np.int32),
        decode_slots_S=plan.decode_slots_S,
        decode_positions_S=plan.decode_positions_S,
    )
    assert run(runner, copied) == expected(2)[1:]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (decode(2, 0, 6), "slot 0 decodes at 6, its last token is at 5"),
        (decode(2, 0, 4), "slot 0 decodes at 4, its last token is at 5"),
        (StepPlan(step=2, prefill=(Chunk(slot=Slot(0), start=4, num_tokens=3, is_last=True),)), "with 6 tokens"),
        (StepPlan(step=2, prefill=(Chunk(slot=Slot(0), start=4, num_tokens=1, is_last=True),)), "with 6 tokens"),
    ],
)
def test_a_plan_that_no_correct_scheduler_makes_is_refused(plan: StepPlan, message: str) -> None:
    runner = make_runner()
    run(runner, prefill(1, 0, [5, 0, 3]))
    runner.launch(plan)
    with pytest.raises(OracleViolation, match=message):
        runner.collect()


def test_writing_without_a_block_is_refused() -> None:
    runner = make_runner()
    runner.launch(prefill(1, 0, [5, 0]))
    with pytest.raises(OracleViolation, match="writes"):
        runner.collect()


def test_more_in_flight_than_agreed_is_refused_and_none_to_collect_too() -> None:
    runner = make_runner()
    with pytest.raises(LookupError):
        runner.collect()
    runner.launch(prefill(1, 0, [5, 0, 3]))
    with pytest.raises(OracleViolation, match="one more in flight than 1"):
        runner.launch(decode(2, 0, 5))


def test_errors_come_at_launch_or_at_collect_as_asked() -> None:
    faults = OracleFaults(launch_errors={1: RunnerError("at launch")}, collect_errors={2: RunnerError("at collect")})
    runner = make_runner(faults=faults)
    with pytest.raises(RunnerError, match="at launch"):
        runner.launch(prefill(1, 0, [5, 0, 3]))
    runner.launch(prefill(2, 0, [5, 0, 3]))
    with pytest.raises(RunnerError, match="at collect"):
        runner.collect()
    assert run(runner, prefill(3, 0, [5, 0, 3])) == expected(1)


def test_a_row_that_reads_what_a_nan_row_wrote_is_nan_too() -> None:
    runner = make_runner(faults=OracleFaults(nan_token_id=13))
    runner.launch(prefill(1, 0, [5, 0, 3]))
    assert runner.collect().is_finite_S.tolist() == [False]
    join = prefill(2, 1, [5, 0, 1], [11, 12, 3, 4, 15])
    reader = StepPlan(
        step=2,
        new_requests=join.new_requests,
        block_updates_U3=join.block_updates_U3,
        prefill=(Chunk(slot=Slot(1), start=4, num_tokens=1, is_last=True),),
    )
    runner.launch(reader)
    assert runner.collect().is_finite_S.tolist() == [False]


def test_the_reference_ends_at_stop_tokens_from_min_tokens_on_and_at_the_limit() -> None:
    endless = oracle_tokens([1], SamplingParams(max_tokens=20), model=MODEL, max_total_tokens=100)
    assert len(endless) == 20
    assert oracle_tokens([1], SamplingParams(max_tokens=20), model=MODEL, max_total_tokens=9) == endless[:8]
    stop = SamplingParams(max_tokens=20, stop_token_ids=(endless[4],))
    assert oracle_tokens([1], stop, model=MODEL, max_total_tokens=100) == endless[: endless.index(endless[4]) + 1]


def test_end_tokens_come_about_as_often_as_asked_and_never_before_min_tokens() -> None:
    model = OracleModel(vocab_size=100, eos_token_ids=(2, 9), eos_every=10)
    tokens = [choose_token(model, state, SamplingParams(min_tokens=3), 3) for state in range(2000)]
    assert 120 < sum(token in (2, 9) for token in tokens) < 280
    early = [choose_token(model, state, SamplingParams(min_tokens=3, stop_token_ids=(4,)), 2) for state in range(2000)]
    assert not {2, 9, 4} & set(early)
