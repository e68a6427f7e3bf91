"""Rows A of the fault matrix: what happens to workers, and what callers see of it."""

from typing import Any

from tests.support.faults.callers import Call, calls

STANDING = {"marked": True, "nan_output_index": 5}
# Each begins with the end token: no output has it, so what is computed again carries it only if it was asked for.
NAN, RAISE, OOM = (2, 12), (2, 13), (2, 14)


async def test_row_10_a_step_that_raises_ends_its_own_batch_and_says_so(standing: Any) -> None:
    async with standing() as faults:
        everybody = [*calls(16, max_tokens=60), Call(prompt=[*RAISE], max_tokens=10)]
        await faults.run(everybody)
        await faults.check(everybody, limit_s=60, victims=["ENGINE_ERROR"])
        assert everybody[-1].reason == "ENGINE_ERROR"


async def test_row_11_memory_that_runs_out_costs_the_one_that_wanted_it(standing: Any) -> None:
    async with standing() as faults:
        culprit = Call(prompt=[*OOM, *range(3, 200)], max_tokens=10)
        everybody = [*calls(16, max_tokens=60), culprit]
        await faults.run(everybody)
        await faults.check(everybody, limit_s=60, victims=["OUT_OF_MEMORY"])
        assert (culprit.code, culprit.reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
        assert [call for call in everybody if call.error] == [culprit]


async def test_row_12_a_row_that_is_not_a_number_ends_alone_after_its_good_beginning(standing: Any) -> None:
    async with standing() as faults:
        culprit = Call(prompt=[*NAN], max_tokens=30)
        everybody = [*calls(16, max_tokens=60), culprit]
        await faults.run(everybody)
        await faults.check(everybody, limit_s=60, victims=["NUMERICAL"])
        assert (culprit.code, culprit.reason, len(culprit.token_ids)) == ("INTERNAL", "NUMERICAL", 5)
        assert [call for call in everybody if call.error] == [culprit]
