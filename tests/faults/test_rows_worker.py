"""Rows A of the fault matrix: what happens to workers, and what callers see of it."""

from typing import Any

from tests.support.fault_callers import Call, calls

MAGIC = 2  # the end token: no output has it, so what is computed again carries it only if it was asked for
ONE = "--workers=1"


async def test_row_10_a_step_that_raises_ends_its_own_batch_and_says_so(bench: Any) -> None:
    async with bench(ONE, raise_token_id=MAGIC) as faults:
        everybody = [*calls(16, max_tokens=60), Call(prompt=[MAGIC, 2], max_tokens=10)]
        await faults.run(everybody)
        await faults.check(everybody, limit_s=60, victims=["ENGINE_ERROR"])
        assert everybody[-1].reason == "ENGINE_ERROR"


async def test_row_11_memory_that_runs_out_costs_the_one_that_wanted_it(bench: Any) -> None:
    async with bench(ONE, oom_token_id=MAGIC) as faults:
        culprit = Call(prompt=[MAGIC, *range(3, 200)], max_tokens=10)
        everybody = [*calls(16, max_tokens=60), culprit]
        await faults.run(everybody)
        await faults.check(everybody, limit_s=60, victims=["OUT_OF_MEMORY"])
        assert (culprit.code, culprit.reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
        assert [call for call in everybody if call.error] == [culprit]


async def test_row_12_a_row_that_is_not_a_number_ends_alone_after_its_good_beginning(bench: Any) -> None:
    async with bench(ONE, nan_token_id=MAGIC, nan_output_index=5) as faults:
        culprit = Call(prompt=[MAGIC, 2], max_tokens=30)
        everybody = [*calls(16, max_tokens=60), culprit]
        await faults.run(everybody)
        await faults.check(everybody, limit_s=60, victims=["NUMERICAL"])
        assert (culprit.code, culprit.reason, len(culprit.token_ids)) == ("INTERNAL", "NUMERICAL", 5)
        assert [call for call in everybody if call.error] == [culprit]
