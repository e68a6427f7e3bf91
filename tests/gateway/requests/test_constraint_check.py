"""The check of a constraint: what its caller gives up stays given up."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from octavo.gateway.errors import InvalidRequest, Violation
from octavo.gateway.requests import input_processor
from octavo.gateway.requests.input_processor import ConstraintChecker
from octavo.gateway.text.errors import TextQueueFull
from octavo.gateway.text.service import Share, TextService
from octavo.grammar.limits import GrammarLimits
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.generating import speaking


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


class PromptText:
    """Stands for the text threads: the work is done at once."""

    async def run(self, work: Callable[[], object], **_: object) -> None:
        work()


@pytest.mark.parametrize(
    ("choice", "tool_name"), [(pb.TOOL_CHOICE_REQUIRED, ""), (pb.TOOL_CHOICE_NAMED, "bad")], ids=["any", "named"]
)
async def test_what_is_wrong_with_a_tool_is_told_by_its_place_in_the_chat(
    choice: "pb.ToolChoice.ValueType", tool_name: str
) -> None:
    checker = ConstraintChecker(cast(TextService, PromptText()), GrammarLimits(), timeout_s=30.0)
    parameters = '{"properties": {"a": {"contains": 1}}}'
    tools = [pb.ToolDefinition(name="good"), pb.ToolDefinition(name="bad", parameters_json=parameters)]
    request = pb.GenerateRequest(chat=pb.Chat(tools=tools, tool_choice=choice, tool_name=tool_name))
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(request, prefix="generate.", share=cast(Any, None))
    assert caught.value.violations == (
        Violation(
            field="generate.chat.tools[1].parameters_json", description="properties.a.contains: is not supported"
        ),
    )


async def test_checks_that_take_for_ever_hold_up_nothing_but_constraints(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(input_processor, "check_grammar", lambda grammar, limits: over.wait(60))
    async with serve(speaking([5])) as served:
        constraints = [pb.Constraint(regex="a" * length) for length in range(1, 17)]
        stuck = [
            asyncio.ensure_future(served.inference.Complete(
                pb.CompleteRequest(generate=pb.GenerateRequest(text="Hello", constraint=each))
            ))
            for each in constraints
        ]  # fmt: skip
        await asyncio.sleep(0.2)
        plain = pb.CompleteRequest(generate=pb.GenerateRequest(text="Hello"))
        async with asyncio.timeout(5):
            answer = await served.inference.Complete(plain)
        over.set()
        await asyncio.gather(*stuck, return_exceptions=True)
    assert answer.finished.usage.completion_tokens == 1


async def test_a_constraint_whose_turn_does_not_come_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(input_processor, "check_grammar", lambda grammar, limits: over.wait(60))
    text = TextService(num_threads=1, max_waiting=8)
    checker = ConstraintChecker(text, GrammarLimits(), timeout_s=0.2)

    def check(pattern: str) -> "asyncio.Task[object]":
        request = pb.GenerateRequest(text="a", constraint=pb.Constraint(regex=pattern))
        return asyncio.create_task(checker.check(request, prefix="", share=Share()))

    held, waiting = check("a+"), check("b+")
    with pytest.raises(InvalidRequest, match="took longer than"):
        await held
    with pytest.raises(TextQueueFull, match="wait for more than"):
        await waiting
    over.set()
    text.close()
