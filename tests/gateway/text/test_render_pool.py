"""Chat templates are foreign code: what they do, they do to their own model only."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.gateway.text.chat_template import ChatInput, ChatTemplate
from octavo.gateway.text.errors import PromptTooLong, TemplateError, TextQueueFull
from octavo.gateway.text.model_text import ModelText
from octavo.gateway.text.process_pool import (
    InProcessRenderer,
    ProcessLimits,
    ProcessPool,
    RenderPool,
    chat_json,
)
from octavo.gateway.text.service import Share
from tests.gateway.text.test_model_text import SPECIAL, WORDS, random_chat
from tests.support.children import live_children
from tests.support.gateway.tokenizers_tiny import TEMPLATE
from tests.support.waiting import until

LIMIT = 1 << 20
CHAT = ChatInput(messages=[{"role": "user", "content": "hi"}])
GOOD = ChatTemplate(TEMPLATE, {})
GOOD_TEXT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
LOOPS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
HOSTILE = {
    "nested loops": (LOOPS, "CPU time"),
    "a power": ("{{ (9 ** (9 ** 9)) ~ '' }}", "CPU time"),
    "a string bomb": (
        "{% set s = namespace(x='x' * 1000) %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "memory",
    ),
    "one large string": ("{{ 'x' * 99999999999 }}", "memory"),
    "endless output": ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "limit is "),
    "endless macros": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
}


def only(bound: str) -> ProcessLimits:
    """Limits of which what a template does meets this one, however much CPU time a busy machine takes for it."""
    return ProcessLimits(cpu_s=0.3 if bound == "CPU time" else 60.0, wall_s=600.0, memory_bytes=64 << 20)


FEATURES = [
    "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}{{ '<é>' | tojson }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% continue %}no{% endfor %}",
    "a{% generation %}  {{ messages[0].content }}\n{% endgeneration %}\nb",
    "{% set ns = namespace(x=1, **{'self': 2}) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}{{ dict(a=1) }}",
    "{{ dict.fromkeys('ab') }}",
    "{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}{{ x is defined }}{{ eos_token }}",
    "  {% if true %}\n  x\n  {% endif %}\n  {#- c #}\n{{- add_generation_prompt }}",
    "{{ messages[0]['content'].upper().split() | first }}{{ messages | length }}{{ range(3) | list }}",
]


@asynccontextmanager
async def pool(limits: ProcessLimits | None = None, **changes: Any) -> AsyncIterator[RenderPool]:
    pool = RenderPool(limits or ProcessLimits(**({"cpu_s": 60.0, "wall_s": 600.0} | changes)))
    try:
        yield pool
    finally:
        await pool.close()


def render(renders: Any, template: ChatTemplate, chat: ChatInput = CHAT, *, tenant: str = "") -> Any:
    return renders.render(template, chat_json(chat), max_bytes=LIMIT, share=Share(tenant=tenant))


async def test_it_renders_as_transformers_does(qwen_text: ModelText, shared: Path) -> None:
    rng = random.Random(3)
    source = (shared / "data" / "tokenizer" / "qwen2.5-instruct.chat_template.jinja").read_text()
    for template in (qwen_text.template_of(CHAT), ChatTemplate(source, {"eos_token": "<|im_end|>"})):
        async with pool() as renders:
            for _ in range(150):
                chat = random_chat(rng, WORDS + SPECIAL)
                (expected,), _ = render_jinja_template(
                    conversations=[chat.messages],
                    tools=chat.tools,
                    chat_template=template.source,
                    add_generation_prompt=chat.add_generation_prompt,
                    **template.special_tokens,
                )
                assert (
                    await render(renders, template, chat)
                    == expected
                    == await render(InProcessRenderer(), template, chat)
                )


@pytest.mark.parametrize("source", FEATURES)
async def test_what_templates_may_use_is_what_transformers_gives_them(source: str) -> None:
    template = ChatTemplate(source, {"eos_token": "</s>"})
    (expected,), _ = render_jinja_template(
        conversations=[CHAT.messages], chat_template=source, add_generation_prompt=True, eos_token="</s>"
    )
    async with pool() as renders:
        assert await render(renders, template) == expected


async def test_strange_values_arrive_as_they_are() -> None:
    values = ["\ud800", "\U0001f999\x00", 2**70, -0.0, 1e300, None, True, {"": []}]
    chat = ChatInput(messages=[{"role": "user", "content": values}])
    async with pool() as renders:
        assert await render(renders, ChatTemplate("{{ messages[0].content }}", {}), chat) == str(values)
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested too deeply"):
        chat_json(ChatInput(messages=[{"content": deep}]))


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_template_is_stopped_and_others_go_on(name: str) -> None:
    source, why = HOSTILE[name]
    hostile = ChatTemplate(source, {}, name="chat_template.jinja")
    async with pool(only(why)) as renders:
        attacks = [asyncio.create_task(render(renders, hostile, tenant="h")) for _ in range(3)]
        await asyncio.sleep(0)
        for _ in range(20):  # beside it
            assert await render(renders, GOOD) == GOOD_TEXT
        for result in await asyncio.gather(*attacks, return_exceptions=True):
            assert isinstance(result, TemplateError | PromptTooLong)
            assert why in str(result)
            if why in ("CPU time", "memory"):
                assert "the chat template (chat_template.jinja) took more than" in str(result)
        assert await render(renders, GOOD) == GOOD_TEXT  # and behind it
        assert len(renders.pids) <= 2


async def test_an_attack_that_runs_does_not_keep_another_model_waiting() -> None:
    """It would run for a minute of CPU time; another template's renderings end while it does."""
    async with pool(cpu_s=60.0) as renders:
        attacks = [asyncio.create_task(render(renders, ChatTemplate(LOOPS, {}))) for _ in range(16)]
        await asyncio.sleep(0)
        assert [await render(renders, GOOD) for _ in range(50)] == [GOOD_TEXT] * 50
        assert not any(each.done() for each in attacks)
        for each in attacks:
            each.cancel()


def children() -> list[psutil.Process]:
    return live_children("octavo.gateway.text.render_child")


async def test_a_process_that_stands_still_in_its_work_is_ended_and_the_work_refused() -> None:
    async with pool(wall_s=3.0) as renders:
        attack = asyncio.create_task(render(renders, ChatTemplate(LOOPS, {})))
        await until(lambda: any(each.cpu_times().user > 0.3 for each in children()))
        children()[0].suspend()
        with pytest.raises(TemplateError, match=r"took more than 3 s on these messages"):
            await attack
        assert await render(renders, GOOD) == GOOD_TEXT


async def test_a_chat_is_asked_of_another_process_where_the_first_one_stands_still_before_it() -> None:
    async with pool(wall_s=3.0) as renders:
        await renders.start()
        await until(lambda: renders.pids)
        os.kill(renders.pids[0], signal.SIGSTOP)
        assert await render(renders, GOOD) == GOOD_TEXT


async def test_a_chat_is_asked_of_another_process_where_idle_ones_were_killed() -> None:
    async with pool() as renders:
        for _ in range(3):
            assert await render(renders, GOOD) == GOOD_TEXT
            os.kill(renders.pids[0], signal.SIGKILL)
            assert await render(renders, GOOD) == GOOD_TEXT
            os.kill(renders.pids[0], signal.SIGKILL)
            await asyncio.sleep(0.1)  # its pipes are known to be closed then
        assert set(await asyncio.gather(render(renders, GOOD), render(renders, GOOD))) == {GOOD_TEXT}


async def test_a_chat_is_asked_of_another_process_where_one_is_killed_while_it_is_written() -> None:
    """It stands still with a pipe that is full."""
    chat = ChatInput(messages=[{"role": "user", "content": "x" * 500_000}])
    async with pool() as renders:
        expected = await render(renders, GOOD, chat)
        (pid,) = renders.pids
        os.kill(pid, signal.SIGSTOP)
        rendering = asyncio.create_task(render(renders, GOOD, chat))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert await rendering == expected


async def test_a_chat_is_asked_of_another_process_where_one_is_killed_before_it_has_read_it() -> None:
    async with pool() as renders:
        await render(renders, GOOD)
        (pid,) = renders.pids
        os.kill(pid, signal.SIGSTOP)
        rendering = asyncio.create_task(render(renders, GOOD))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert await rendering == GOOD_TEXT


async def test_one_process_that_ends_in_a_chat_may_be_nobodys_fault_and_a_second_is_the_chats() -> None:
    """The first may be the kernel's choice where memory is short."""
    async with pool() as renders:
        attack = asyncio.create_task(render(renders, ChatTemplate(LOOPS, {}, name="chat_template.jinja")))
        killed = set[int]()
        for _ in range(2):
            await until(lambda: any(each.cpu_times().user > 0.3 for each in children() if each.pid not in killed))
            assert not attack.done()
            (child,) = (each for each in children() if each.pid not in killed)
            child.kill()
            killed.add(child.pid)
        with pytest.raises(TemplateError, match=r"\(chat_template.jinja\) ended its process \(-9\) on these messages"):
            await attack
        assert await render(renders, GOOD) == GOOD_TEXT


async def test_a_chat_that_nobody_waits_for_is_asked_of_no_second_process() -> None:
    async with pool() as renders:
        attack = asyncio.create_task(render(renders, ChatTemplate(LOOPS, {})))
        await until(lambda: any(each.cpu_times().user > 0.3 for each in children()))
        attack.cancel()
        children()[0].kill()
        await until(lambda: renders.pids)
        assert [each.pid for each in children()] == list(renders.pids)


async def test_processes_that_end_before_they_begin_are_told_as_a_lack_of_them() -> None:
    processes = ProcessPool("octavo.no_such_module", ProcessLimits(), task="try")
    work = Mock(key="", num_bytes=2, frame=lambda known: b"{}")
    with pytest.raises(TextQueueFull, match="no process to try began with it"):
        await processes.run(work, share=Share())
    await processes.close()


def test_a_process_that_has_ended_is_replaced_with_uvloop_too() -> None:
    """Its transport is closed then, and raises what no pipe raises."""
    uvloop = pytest.importorskip("uvloop")

    async def work() -> None:
        async with pool() as renders:
            for delay_s in (0.0, 0.1):
                await render(renders, GOOD)
                os.kill(renders.pids[0], signal.SIGKILL)
                await asyncio.sleep(delay_s)
                assert await render(renders, GOOD) == GOOD_TEXT

    uvloop.run(work())


async def test_what_waits_is_bounded_and_who_has_the_most_is_refused() -> None:
    async with pool(cpu_s=60.0, max_waiting=5) as renders:
        attacks = [asyncio.create_task(render(renders, ChatTemplate(LOOPS, {}), tenant="h")) for _ in range(8)]
        await asyncio.sleep(0.05)
        assert [type(each.exception()) for each in attacks if each.done()] == [TextQueueFull] * 2
        assert await render(renders, GOOD, tenant="g") == GOOD_TEXT
        for each in attacks:
            each.cancel()


async def test_closing_leaves_no_process_and_nobody_waiting() -> None:
    renders = RenderPool(ProcessLimits(cpu_s=60.0))
    attack = asyncio.create_task(render(renders, ChatTemplate(LOOPS, {})))
    assert await render(renders, GOOD) == GOOD_TEXT
    mine = children()
    assert len(mine) == 2
    await renders.close()
    await renders.close()
    with pytest.raises(asyncio.CancelledError):
        await attack
    assert [child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in mine] == [False, False]


def test_nothing_is_left_when_its_parent_is_killed() -> None:
    program = f"""
import asyncio
from octavo.gateway.text.chat_template import ChatInput, ChatTemplate
from octavo.gateway.text.process_pool import ProcessLimits, RenderPool, chat_json
async def main():
    pool, chat = RenderPool(ProcessLimits(cpu_s=600.0, wall_s=600.0)), chat_json(ChatInput(messages=[]))
    attack = asyncio.create_task(pool.render(ChatTemplate({LOOPS!r}, {{}}), chat, max_bytes=9))
    await pool.render(ChatTemplate("x", {{}}), chat, max_bytes=9)
    print("ready", flush=True)
    await attack
asyncio.run(main())
"""
    environment = {"PATH": os.environ["PATH"]}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    left = psutil.Process(process.pid).children()
    assert len(left) == 2
    process.kill()
    process.wait(30)
    process.stdout.close()
    gone, alive = psutil.wait_procs(left, timeout=30)
    assert (len(gone), alive) == (2, [])


async def test_no_secret_of_the_gateway_is_with_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_REGISTRATION_TOKEN", "secret")
    async with pool() as renders:
        await render(renders, GOOD)
        environment = psutil.Process(renders.pids[0]).environ()
    assert not [name for name in environment if name.startswith("OCTAVO_")]


async def test_the_way_there_and_back_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    """For the record: no limit is set on a shared machine."""
    async with pool() as renders:
        await render(renders, GOOD)
        begin_s = time.perf_counter()
        for _ in range(200):
            await render(renders, GOOD)
        there_s = (time.perf_counter() - begin_s) / 200
        begin_s = time.perf_counter()
        for _ in range(200):
            await render(InProcessRenderer(), GOOD)
        here_s = (time.perf_counter() - begin_s) / 200
    with capsys.disabled():
        print(json.dumps({"render_ms": round(1000 * there_s, 3), "in_process_ms": round(1000 * here_s, 3)}))  # noqa: T201
