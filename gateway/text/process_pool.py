"""Untrusted work in processes with limits: work that takes too much CPU time, wall time or memory is ended and refused,
and its process replaced. `RenderPool` renders chat templates here; `gateway.requests.constraints` checks constraints.

A process tells that it begins, so that work is not blamed for one that had ended before, whoever ended it; another one
is asked then. With the system short of memory, one that has begun may be ended by the kernel for others' sake: only
work that ends two is refused.

Processes are started when they are needed. One key (a template, a tenant) has less than all of them at a time, so that
another one always finds one that is free. Must not know tokens, models or gRPC.
"""

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from octavo.gateway.config import ProcessLimits
from octavo.gateway.text.chat_template import ChatInput, ChatTemplate
from octavo.gateway.text.errors import PromptTooLong, TemplateError, TextQueueFull
from octavo.gateway.text.process_child import BEGUN, DONE, NO_MEMORY, REFUSED
from octavo.gateway.text.render_child import KNOWN_TEMPLATES, TOO_LONG
from octavo.gateway.text.service import FairQueue, Share

log = structlog.get_logger(__name__)
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "HOME")  # no secrets for foreign code
_NO_TENANT = Share()
_END_S = 5.0
_MAX_ENDED = 2  # processes that end by themselves with one work: it is their end
_MAX_LOST = 3  # processes that end before they begin on one work: there are none to be had


class Stopped(Exception):
    """The work was ended, or ended its process. reason: completes a sentence that begins with the work's name.
    exit_code: of a process that ended by itself; negative if by a signal."""

    def __init__(self, reason: str, *, exit_code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


class _NotBegun(Stopped):
    """The process ended, or was ended, before it began on the work."""


class Work(Protocol):
    """One question to a process."""

    @property
    def key(self) -> str:
        """Work with the same key never gets all processes."""

    @property
    def num_bytes(self) -> int:
        """Size of the input, for fair turns."""

    def frame(self, known: dict[str, None]) -> bytes:
        """The frame to send. known: what this process has been sent before; may be updated."""


@dataclass(slots=True, eq=False)
class _Job:
    work: Work
    result: "asyncio.Future[tuple[bytes, str]]"


@dataclass(slots=True, eq=False)
class _Child:
    process: asyncio.subprocess.Process
    known: dict[str, None] = field(default_factory=dict)


class ProcessPool:
    """Owns the processes; every method on one event loop."""

    def __init__(
        self, module: str, limits: ProcessLimits, *, task: str, max_processes: int = 2, max_per_key: int = 1
    ) -> None:
        """module: runs `gateway.text.process_child.answer_frames`. task: the purpose, as in "to …", for messages."""
        self._module = module
        self._limits = limits
        self._task = task
        self._max_processes = max_processes
        self._max_per_key = max_per_key
        self._queue = FairQueue[_Job]()
        self._idle: list[_Child] = []
        self._tasks = set[asyncio.Task[None]]()  # each uses one process, or starts one
        self._busy = Counter[str]()  # number of processes in use, by key
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of idle processes."""
        return tuple(child.process.pid for child in self._idle)

    async def start(self) -> None:
        """Start a first process in the background."""
        if not self._idle and not self._tasks:
            self._keep(self._make_idle())

    async def run(self, work: Work, *, share: Share, max_wait_s: float | None = None) -> tuple[bytes, str]:
        """(kind, text) of the answer. Raises Stopped, and TextQueueFull if too much is waiting, its turn has not come
        within max_wait_s, or no process can be had. A cancelled caller leaves at once; work that has begun ends by
        itself."""
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future())
        self._queue.push(job, num_bytes=work.num_bytes, share=share)
        if len(self._queue) > self._limits.max_waiting:
            refused = self._queue.pop_last()
            refused.result.set_exception(TextQueueFull(f"{len(self._queue)} wait for a process to {self._task}"))
        self._go_on()
        waiting = None if max_wait_s is None else loop.call_later(max_wait_s, self._give_up, job, max_wait_s)
        try:
            return await job.result
        finally:
            self._queue.remove(job)
            if waiting is not None:
                waiting.cancel()

    def _give_up(self, job: _Job, max_wait_s: float) -> None:
        if self._queue.remove(job) and not job.result.done():
            job.result.set_exception(TextQueueFull(f"no process to {self._task} was free for {max_wait_s:g} s"))

    async def close(self) -> None:
        """Kill every process and cancel all work. Idempotent."""
        self._is_closed = True
        for _ in range(len(self._queue)):
            self._queue.pop_last().result.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._idle:
            await _kill(self._idle.pop())

    # ------------------------------------------------------------ scheduling

    def _go_on(self) -> None:
        while not self._is_closed and (self._idle or len(self._tasks) < self._max_processes):
            job = self._queue.pop(self._may_go, lambda each: each.work.num_bytes)
            if job is None:
                return
            self._queue.forget(job)
            self._busy[job.work.key] += 1
            self._keep(self._serve(job, self._idle.pop() if self._idle else None))

    def _may_go(self, job: _Job) -> bool:
        return self._busy[job.work.key] < self._max_per_key

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=self._task)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("defect", task=self._task, exc_info=error)
        self._go_on()

    async def _make_idle(self) -> None:
        with contextlib.suppress(TextQueueFull):
            self._idle.append(await self._new_child())

    async def _serve(self, job: _Job, child: _Child | None) -> None:
        """Give the caller an answer or the reason why there is none. child: an idle process; None: start one."""
        try:
            if (answer := await self._answer(job, child)) and not job.result.done():
                job.result.set_result(answer)
        except (Stopped, TextQueueFull) as error:
            if not job.result.done():
                job.result.set_exception(error)
        finally:
            job.result.cancel()  # if it is not done: the pool is closed, or a defect raised
            self._busy -= Counter([job.work.key])  # drops what is 0 then
            if not self._is_closed and not self._idle:
                self._keep(self._make_idle())

    async def _answer(self, job: _Job, child: _Child | None) -> tuple[bytes, str] | None:
        """Ask one process after another until one answers; None if nobody waits. Raises Stopped, TextQueueFull."""
        num_ended = num_lost = 0
        while not job.result.done():
            try:
                return await self._ask_and_keep(child or await self._new_child(), job.work)
            except _NotBegun as lost:
                num_lost += 1
                log.warning("process_lost", task=self._task, reason=lost.reason)
                if num_lost == _MAX_LOST:
                    raise TextQueueFull(f"no process to {self._task} began with it") from None
            except Stopped as stopped:
                num_ended += 1
                if stopped.exit_code is None or num_ended == _MAX_ENDED:
                    raise
                log.warning("process_lost", task=self._task, reason=stopped.reason)
            child = None
        self._put_back(child)
        return None

    async def _ask_and_keep(self, child: _Child, work: Work) -> tuple[bytes, str]:
        """As `_ask`. The process is idle again, or gone: after an interruption its state would be unknown."""
        try:
            answer = await self._ask(child, work)
        except BaseException as error:
            if not isinstance(error, Stopped):
                await asyncio.shield(_kill(child))
            raise
        self._put_back(child)
        return answer

    def _put_back(self, child: _Child | None) -> None:
        if child is not None and child.process.returncode is None:
            self._idle.append(child)

    # ------------------------------------------------------------ one process

    async def _new_child(self) -> _Child:
        """Raises TextQueueFull if the system has no room for another process."""
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # do not import from the current folder
                "-m",
                self._module,
                *map(str, (os.getpid(), self._limits.memory_bytes, self._limits.cpu_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
            )
        except OSError as error:
            log.error("no_process", task=self._task, error=str(error))
            raise TextQueueFull(f"no process to {self._task} could be started") from error
        return _Child(process)

    async def _ask(self, child: _Child, work: Work) -> tuple[bytes, str]:
        """Raises _NotBegun, Stopped; a process that did not answer is gone then."""
        has_begun = False
        try:
            async with asyncio.timeout(self._limits.wall_s):
                await _send(child, work.frame(child.known))
                kind, _ = await _receive(child)
            assert kind == BEGUN
            has_begun = True
            async with asyncio.timeout(self._limits.wall_s):
                kind, text = await _receive(child)
        except TimeoutError:
            await _kill(child)
            if not has_begun:
                raise _NotBegun(f"did not begin within {self._limits.wall_s:g} s") from None
            raise Stopped(f"took more than {self._limits.wall_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError):  # it closed its end of a pipe: it is exiting, or misbehaves
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await child.process.wait()
            await _kill(child)
            exit_code = child.process.returncode
            if not has_begun:
                raise _NotBegun(f"ended before it began ({exit_code})") from None
            if exit_code == -signal.SIGPROF:
                raise Stopped(f"took more than {self._limits.cpu_s:g} s of CPU time") from None
            raise Stopped(f"ended its process ({exit_code})", exit_code=exit_code) from None
        if kind == NO_MEMORY:
            await _kill(child)
            raise Stopped(f"took more than {self._limits.memory_bytes >> 20} MiB of memory")
        return kind, text


async def _send(child: _Child, frame: bytes) -> None:
    sink = child.process.stdin
    assert sink is not None
    if sink.is_closing():  # uvloop has no OSError for it
        raise BrokenPipeError
    sink.write(struct.pack(">I", len(frame)) + frame)
    await sink.drain()


async def _receive(child: _Child) -> tuple[bytes, str]:
    source = child.process.stdout
    assert source is not None
    (length,) = struct.unpack(">I", await source.readexactly(4))
    answer = await source.readexactly(length)
    return answer[:1], answer[1:].decode("utf-8", "surrogatepass")


async def _kill(child: _Child) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
    await child.process.wait()


# ---------------------------------------------------------------- chats


class Renderer(Protocol):
    """Renders chats."""

    async def start(self) -> None:
        """Prepare, so that the first rendering is quick."""

    async def render(self, template: ChatTemplate, chat: bytes, *, max_bytes: int, share: Share) -> str:
        """chat: `chat_json`. Raises TemplateError, PromptTooLong, TextQueueFull."""

    async def close(self) -> None:
        """Stop all rendering. Idempotent."""


def chat_json(chat: ChatInput) -> bytes:
    """A chat as renderers take it, including lone surrogates and large numbers. Raises TemplateError."""
    fields = {"messages": chat.messages, "tools": chat.tools, "add_generation_prompt": chat.add_generation_prompt}
    try:
        return json.dumps(fields).encode()
    except (RecursionError, ValueError) as error:
        raise TemplateError("the messages are nested too deeply") from error


class InProcessRenderer:
    """Renders in this process without limits on time or memory: for trusted templates, in simulations and tests."""

    async def start(self) -> None:
        """Nothing to start."""

    async def render(self, template: ChatTemplate, chat: bytes, *, max_bytes: int, share: Share = _NO_TENANT) -> str:
        """See Renderer."""
        return template.render(ChatInput(**json.loads(chat)), max_bytes=max_bytes)

    async def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chat:
    """A chat as `Work`. One template has one process at a time, so that another model's always finds the other."""

    template: ChatTemplate
    chat: bytes
    max_bytes: int

    @property
    def key(self) -> str:
        return self.template.digest

    @property
    def num_bytes(self) -> int:
        return len(self.chat)

    def frame(self, known: dict[str, None]) -> bytes:
        """known: templates that the process has, in the order in which it forgets them."""
        template = self.template
        fields: dict[str, object] = {"template": template.digest, "max_bytes": self.max_bytes}
        if template.digest not in known:
            fields |= {"source": template.source, "special_tokens": template.special_tokens}
            known[template.digest] = None
            if len(known) > KNOWN_TEMPLATES:
                del known[next(iter(known))]
        head = json.dumps(fields).encode()
        return head[:-1] + b', "chat": ' + self.chat + b"}"


class RenderPool:
    """Renders chat templates in processes, so that a bad template only harms its own model."""

    def __init__(self, limits: ProcessLimits | None = None) -> None:
        self._pool = ProcessPool("octavo.gateway.text.render_child", limits or ProcessLimits(), task="render chats")

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of idle processes."""
        return self._pool.pids

    async def start(self) -> None:
        """Start a first process in the background."""
        await self._pool.start()

    async def render(self, template: ChatTemplate, chat: bytes, *, max_bytes: int, share: Share = _NO_TENANT) -> str:
        """See Renderer."""
        try:
            kind, text = await self._pool.run(_Chat(template, chat, max_bytes), share=share)
        except Stopped as stopped:
            log.warning("template_stopped", template=template.name, digest=template.digest[:12], reason=stopped.reason)
            what = f"the chat template ({template.name}) {stopped.reason} on these messages and was stopped"
            raise TemplateError(what) from None
        if kind == TOO_LONG:
            raise PromptTooLong(num_bytes=int(text), max_bytes=max_bytes)
        if kind == REFUSED:
            raise TemplateError(text)
        assert kind == DONE
        return text

    async def close(self) -> None:
        """Kill every process and cancel all work. Idempotent."""
        await self._pool.close()
