"""Renders chat templates in processes with limits, so that a template harms its own model only.

Two of them at most, started when they are needed; one template has one of them at a time, so that another model's
always has the other. What takes too much CPU time, wall time, memory or output is ended and refused, and its process
replaced. Must not know tokens, models or gRPC.
"""

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from octavo.gateway.config import RenderLimits
from octavo.gateway.text.chat_template import ChatInput, ChatTemplate
from octavo.gateway.text.errors import PromptTooLong, TemplateError, TextQueueFull
from octavo.gateway.text.render_child import KNOWN_TEMPLATES, NO_MEMORY, REFUSED, RENDERED, TOO_LONG
from octavo.gateway.text.service import FairQueue, Share

log = structlog.get_logger(__name__)
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "HOME")  # no secrets for foreign code
_NO_TENANT = Share()
_END_S = 5.0


class Renderer(Protocol):
    """Renders chats."""

    async def start(self) -> None:
        """Make the first rendering quick."""

    async def render(self, template: ChatTemplate, chat: bytes, *, max_bytes: int, share: Share) -> str:
        """chat: `chat_json`. Raises TemplateError, PromptTooLong, TextQueueFull."""

    async def close(self) -> None:
        """Nothing runs any more. Idempotent."""


def chat_json(chat: ChatInput) -> bytes:
    """As renderers take it; lone surrogates and large numbers included. Raises TemplateError."""
    fields = {"messages": chat.messages, "tools": chat.tools, "add_generation_prompt": chat.add_generation_prompt}
    try:
        return json.dumps(fields).encode()
    except (RecursionError, ValueError) as error:
        raise TemplateError("the messages are nested too deeply") from error


class InProcessRenderer:
    """Renders where it is called, without limits of time or memory: for trusted templates, in simulations and tests."""

    async def start(self) -> None:
        """Nothing to start."""

    async def render(self, template: ChatTemplate, chat: bytes, *, max_bytes: int, share: Share = _NO_TENANT) -> str:
        """At once."""
        return template.render(ChatInput(**json.loads(chat)), max_bytes=max_bytes)

    async def close(self) -> None:
        """Nothing to close."""


@dataclass(slots=True, eq=False)
class _Job:
    template: ChatTemplate
    chat: bytes
    max_bytes: int
    result: "asyncio.Future[str]"


@dataclass(slots=True, eq=False)
class _Child:
    process: asyncio.subprocess.Process
    known: dict[str, None] = field(default_factory=dict)  # templates that it has, as it forgets them


class RenderPool:
    """Owns the processes; every method on one event loop."""

    def __init__(self, limits: RenderLimits | None = None, *, max_processes: int = 2) -> None:
        self._limits = limits or RenderLimits()
        self._max_processes = max_processes
        self._max_per_template = max(1, max_processes - 1)
        self._queue = FairQueue[_Job]()
        self._idle: list[_Child] = []
        self._tasks = set[asyncio.Task[None]]()  # each has one process, or makes one
        self._busy: dict[str, int] = {}  # processes by template
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Of processes that wait for work."""
        return tuple(child.process.pid for child in self._idle)

    async def start(self) -> None:
        """Make a first process, in the background."""
        if not self._idle and not self._tasks:
            self._keep(self._make_idle())

    async def render(self, template: ChatTemplate, chat: bytes, *, max_bytes: int, share: Share = _NO_TENANT) -> str:
        """A caller that is cancelled leaves at once; what has begun ends by itself."""
        job = _Job(template, chat, max_bytes, asyncio.get_running_loop().create_future())
        self._queue.push(job, num_bytes=len(chat), share=share)
        if len(self._queue) > self._limits.max_waiting:
            refused = self._queue.pop_last()
            refused.result.set_exception(TextQueueFull(f"{len(self._queue)} chats wait to be rendered"))
        self._go_on()
        try:
            return await job.result
        finally:
            self._queue.remove(job)

    async def close(self) -> None:
        """Kill every process; what waits or runs is cancelled. Idempotent."""
        self._is_closed = True
        for _ in range(len(self._queue)):
            self._queue.pop_last().result.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._idle:
            await _kill(self._idle.pop())

    # ------------------------------------------------------------ who renders what

    def _go_on(self) -> None:
        while not self._is_closed and (self._idle or len(self._tasks) < self._max_processes):
            job = self._queue.pop(self._may_go, lambda each: len(each.chat))
            if job is None:
                return
            self._queue.forget(job)
            self._busy[job.template.digest] = self._busy.get(job.template.digest, 0) + 1
            self._keep(self._serve(job, self._idle.pop() if self._idle else None))

    def _may_go(self, job: _Job) -> bool:
        return self._busy.get(job.template.digest, 0) < self._max_per_template

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="render")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("defect", task="render a chat", exc_info=error)
        self._go_on()

    async def _make_idle(self) -> None:
        with contextlib.suppress(TextQueueFull):
            self._idle.append(await self._new_child())

    async def _serve(self, job: _Job, child: _Child | None) -> None:
        digest = job.template.digest
        try:
            child = child or await self._new_child()
            text = await self._ask(child, job)
            if not job.result.done():
                job.result.set_result(text)
        except (TemplateError, PromptTooLong, TextQueueFull) as error:
            if not job.result.done():
                job.result.set_exception(error)
        except BaseException:  # closed, or a defect: the state of the process is unknown
            if child is not None:
                await asyncio.shield(_kill(child))
            job.result.cancel()
            raise
        finally:
            self._busy[digest] -= 1
            if not self._busy[digest]:
                del self._busy[digest]
            if child is not None and child.process.returncode is None:
                self._idle.append(child)
            elif not self._is_closed and not self._idle:
                self._keep(self._make_idle())

    # ------------------------------------------------------------ one process

    async def _new_child(self) -> _Child:
        """Raises TextQueueFull where the system has no room for one."""
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # no modules of the current folder
                "-m",
                "octavo.gateway.text.render_child",
                str(os.getpid()),
                str(self._limits.memory_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
            )
        except OSError as error:
            log.error("no_render_process", error=str(error))
            raise TextQueueFull("no process to render chats could be started") from error
        return _Child(process)

    async def _ask(self, child: _Child, job: _Job) -> str:
        """Raises TemplateError, PromptTooLong; a process that did not answer is gone then."""
        try:
            async with asyncio.timeout(self._limits.wall_s):
                kind, text = await self._exchange(child, self._frame(child, job))
        except TimeoutError:
            await _kill(child)
            raise self._stopped(job, f"took more than {self._limits.wall_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError):  # its end of a pipe is closed: it ends, or does something else
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await child.process.wait()
            await _kill(child)
            if child.process.returncode == -signal.SIGPROF:
                raise self._stopped(job, f"took more than {self._limits.cpu_s:g} s of CPU time") from None
            raise self._stopped(job, f"ended its process ({child.process.returncode})") from None
        if kind == NO_MEMORY:
            await _kill(child)
            raise self._stopped(job, f"took more than {self._limits.memory_bytes >> 20} MiB of memory")
        if kind == TOO_LONG:
            raise PromptTooLong(num_bytes=int(text), max_bytes=job.max_bytes)
        if kind == REFUSED:
            raise TemplateError(text)
        assert kind == RENDERED
        return text

    def _stopped(self, job: _Job, what: str) -> TemplateError:
        log.warning("template_stopped", template=job.template.name, digest=job.template.digest[:12], reason=what)
        return TemplateError(f"the chat template ({job.template.name}) {what} on these messages and was stopped")

    def _frame(self, child: _Child, job: _Job) -> bytes:
        template = job.template
        fields: dict[str, object] = {
            "template": template.digest,
            "max_bytes": job.max_bytes,
            "cpu_s": self._limits.cpu_s,
        }
        if template.digest not in child.known:
            fields |= {"source": template.source, "special_tokens": template.special_tokens}
            child.known[template.digest] = None
            if len(child.known) > KNOWN_TEMPLATES:
                del child.known[next(iter(child.known))]
        head = json.dumps(fields).encode()
        return head[:-1] + b', "chat": ' + job.chat + b"}"

    @staticmethod
    async def _exchange(child: _Child, frame: bytes) -> tuple[bytes, str]:
        source, sink = child.process.stdout, child.process.stdin
        assert source is not None
        assert sink is not None
        sink.write(struct.pack(">I", len(frame)) + frame)
        await sink.drain()
        (length,) = struct.unpack(">I", await source.readexactly(4))
        answer = await source.readexactly(length)
        return answer[:1], answer[1:].decode("utf-8", "surrogatepass")


async def _kill(child: _Child) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
    await child.process.wait()
