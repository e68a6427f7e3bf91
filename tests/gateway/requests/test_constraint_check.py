"""The check of a constraint: what its caller gives up stays given up."""

import asyncio
from typing import Any, cast

import pytest

from octavo.gateway.requests.input_processor import ConstraintChecker
from octavo.gateway.text.service import TextService
from octavo.grammar.limits import GrammarLimits
from octavo.v1 import inference_pb2 as pb


class HeldText:
    """Stands for the text threads: the work ends when the test says so."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()

    async def run(self, work: object, **_: object) -> None:
        await self.done


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_check_that_is_cancelled_as_it_ends_is_cancelled(num_turns: int) -> None:
    """Before Python 3.12, asyncio.wait_for answers instead, and the request goes on without its caller."""
    text = HeldText()
    checker = ConstraintChecker(cast(TextService, text), GrammarLimits(), timeout_s=30.0)
    request = pb.GenerateRequest(text="a", constraint=pb.Constraint(json_schema='{"type": "object"}'))
    checking = asyncio.create_task(checker.check(request, prefix="", share=cast(Any, None)))
    await asyncio.sleep(0)
    text.done.set_result(None)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if checking.cancel():  # it had not ended
        with pytest.raises(asyncio.CancelledError):
            await checking
