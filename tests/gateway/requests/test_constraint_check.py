"""The check of a constraint: what takes too long is stopped, and holds up nobody else."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import psutil
import pytest

from octavo.gateway.config import ProcessLimits, RequestLimits
from octavo.gateway.errors import InvalidRequest, Violation
from octavo.gateway.requests.constraints import ConstraintChecker
from octavo.gateway.text.errors import TextQueueFull
from octavo.gateway.text.process_child import DONE
from octavo.gateway.text.service import Share
from octavo.grammar.limits import GrammarLimits
from octavo.v1 import inference_pb2 as pb
from tests.support.children import live_children
from tests.support.gateway.generating import speaking
from tests.support.gateway.rpc_errors import refused
from tests.support.waiting import until

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "lines": {
            "type": "array",
            "items": {"type": "object", "properties": {"sku": {"pattern": "^[A-Z]{3}-[0-9]+$"}}},
        },
    },
    "required": ["id", "lines"],
}


def schema_request(schema: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", constraint=pb.Constraint(json_schema=json.dumps(schema)))


def hostile_request(number: int = 0) -> pb.GenerateRequest:
    """Its check takes minutes: the library looks for a text of all patterns, in time that doubles with each of them."""
    patterns = [{"type": "string", "pattern": f"[ab]*a[ab]{{{length}}}"} for length in range(27)]
    return schema_request({"allOf": patterns, "title": str(number)})


@asynccontextmanager
async def checking(*, cpu_s: float = 60.0, **bounds: Any) -> AsyncIterator[ConstraintChecker]:
    checker = ConstraintChecker(GrammarLimits(), ProcessLimits(**({"wall_s": 600.0} | bounds), cpu_s=cpu_s))
    try:
        yield checker
    finally:
        await checker.close()


def check(checker: ConstraintChecker, request: pb.GenerateRequest, tenant: str = "") -> "asyncio.Task[Any]":
    return asyncio.create_task(checker.check(request, prefix="", share=Share(tenant=tenant)))


def check_processes() -> list[psutil.Process]:
    return live_children("octavo.gateway.requests.check_child")


class HeldPool:
    """Stands for the processes: the work ends when the test says so."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()

    async def run(self, work: object, **_: object) -> tuple[bytes, str]:
        await self.done
        return DONE, ""


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_check_that_is_cancelled_as_it_ends_is_cancelled(num_turns: int) -> None:
    """Before Python 3.12, asyncio.wait_for answers instead, and the request goes on without its caller."""
    async with checking() as checker:
        pool = HeldPool()
        checker._processes = cast(Any, pool)
        running = check(checker, schema_request({"type": "object"}))
        await asyncio.sleep(0)
        pool.done.set_result(None)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if running.cancel():  # it had not ended
            with pytest.raises(asyncio.CancelledError):
                await running
        checker._processes = cast(Any, _Nothing())


class _Nothing:
    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("choice", "tool_name"), [(pb.TOOL_CHOICE_REQUIRED, ""), (pb.TOOL_CHOICE_NAMED, "bad")], ids=["any", "named"]
)
@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ('{"properties": {"a": {"contains": 1}}}', "properties.a.contains: is not supported"),
        ('{"properties": {"a": {"$ref": "#/$defs/A"}}}', "properties.a.$ref: points to no schema"),
        ('{"properties": {"a": {"type": "string", "pattern": "("}}}', "properties.a.pattern: unclosed group"),
    ],
    ids=["unsupported", "reference", "pattern"],
)
async def test_what_is_wrong_with_a_tool_is_told_by_its_place_in_the_chat(
    choice: "pb.ToolChoice.ValueType", tool_name: str, parameters: str, said: str
) -> None:
    tools = [pb.ToolDefinition(name="good"), pb.ToolDefinition(name="bad", parameters_json=parameters)]
    request = pb.GenerateRequest(chat=pb.Chat(tools=tools, tool_choice=choice, tool_name=tool_name))
    async with checking() as checker:
        with pytest.raises(InvalidRequest) as caught:
            await checker.check(request, prefix="generate.", share=Share())
    assert caught.value.violations == (Violation(field="generate.chat.tools[1].parameters_json", description=said),)


async def test_a_check_that_takes_too_long_is_stopped_by_its_field_and_others_go_on() -> None:
    async with checking(cpu_s=0.5) as checker:
        checker._max_wait_s = 60.0  # on a busy machine half a second of processor time takes seconds
        attacks = [check(checker, hostile_request(number), "h") for number in range(4)]
        await asyncio.sleep(0)
        assert await checker.check(schema_request(ORDER), prefix="", share=Share(tenant="g")) is not None
        for result in await asyncio.gather(*attacks, return_exceptions=True):
            assert isinstance(result, InvalidRequest)
            assert result.violations == (
                Violation(
                    field="constraint.json_schema",
                    description="took more than 0.5 s of CPU time to check, which was stopped",
                ),
            )
        assert await checker.check(schema_request({"type": "null"}), prefix="", share=Share(tenant="h")) is not None


async def test_a_tenant_whose_checks_take_for_ever_leaves_a_process_to_others() -> None:
    """The others' constraints are told nothing of a full queue; what waits behind its own is, in the end."""
    async with checking(cpu_s=60.0) as checker:
        checker._max_wait_s = 1.0
        attacks = [check(checker, hostile_request(number), "h") for number in range(3)]
        await asyncio.sleep(0)
        for number in range(20):
            assert await check(checker, schema_request({"const": number}), "g") is not None
        with pytest.raises(TextQueueFull, match="no process to check constraints was free for 1 s"):
            await attacks[2]
        assert [each.done() for each in attacks] == [False, False, True]
        assert len(check_processes()) == 3


async def test_two_processes_that_die_with_a_constraint_are_that_constraints_end() -> None:
    async with checking(cpu_s=600.0) as checker:
        attack = check(checker, hostile_request())
        killed = set[int]()
        for _ in range(2):
            await until(lambda: any(e.cpu_times().user > 0.3 for e in check_processes() if e.pid not in killed))
            (child,) = (each for each in check_processes() if each.pid not in killed)
            os.kill(child.pid, signal.SIGSEGV)
            killed.add(child.pid)
        with pytest.raises(InvalidRequest, match=r"ended its process \(-11\) to check"):
            await attack
        assert await check(checker, schema_request(ORDER)) is not None


async def test_processes_that_die_between_constraints_are_nobodys_end() -> None:
    async with checking() as checker:
        for number in range(3):
            assert await check(checker, schema_request(ORDER | {"title": str(number)})) is not None
            for each in check_processes():
                each.kill()


async def test_a_defect_of_the_check_is_no_mistake_of_the_caller() -> None:
    async with checking() as checker:
        checker._limits = cast(Any, GrammarLimits(max_depth=cast(Any, "x")))
        with pytest.raises(RuntimeError, match=r"ended its process \(\d+\)"):
            await check(checker, schema_request(ORDER))


async def test_processes_are_there_from_the_first_constraint_until_the_gateway_ends() -> None:
    before = len(check_processes())
    async with checking() as checker:
        assert await checker.check(pb.GenerateRequest(text="a"), prefix="", share=Share()) is None
        assert len(check_processes()) == before
        attack = check(checker, hostile_request())
        assert await check(checker, schema_request(ORDER)) is not None
        mine = check_processes()
        assert len(mine) == before + 2
    with pytest.raises(asyncio.CancelledError):
        await attack
    assert [each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in mine] == [False, False]


async def test_what_was_good_is_not_checked_again() -> None:
    async with checking() as checker:
        first = await check(checker, schema_request(ORDER))
        await checker.close()
        assert await check(checker, schema_request(ORDER)) == first


async def test_checks_that_take_for_ever_hold_up_nothing_but_constraints(serve: Any) -> None:
    async with serve(speaking([5]), limits=RequestLimits(constraint_timeout_s=60.0)) as served:
        stuck = [
            asyncio.ensure_future(served.inference.Complete(
                pb.CompleteRequest(generate=hostile_request(number))
            ))
            for number in range(16)
        ]  # fmt: skip
        await until(lambda: len(check_processes()) == 2)
        async with asyncio.timeout(30):
            answer = await served.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(text="Hello")))
        assert not any(each.done() for each in stuck)
        for each in stuck:
            each.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
    assert answer.finished.usage.completion_tokens == 1


async def test_callers_get_the_refusal_of_a_stopped_check(serve: Any) -> None:
    async with serve(speaking([5]), limits=RequestLimits(constraint_timeout_s=0.3)) as served:
        refusal = await refused(served.inference.Generate(hostile_request()))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "INVALID_FIELD"
    assert "constraint.json_schema: took more than 0.3 s of CPU time to check" in refusal.message


async def test_the_way_there_and_back_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    """For the record: no limit is set on a shared machine."""
    async with checking() as checker:
        begin_s = time.perf_counter()
        await check(checker, schema_request(ORDER))
        first_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        for number in range(100):
            await check(checker, schema_request(ORDER | {"title": str(number)}))
        each_s = (time.perf_counter() - begin_s) / 100
    with capsys.disabled():
        print(json.dumps({"first_check_ms": round(1e3 * first_s, 1), "check_ms": round(1e3 * each_s, 2)}))  # noqa: T201
