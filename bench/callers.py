"""Callers of a running service, in processes of their own: conversations of one or several turns, streamed and timed.

A turn's prompt is everything said before plus its own new ids. Another load generator can send conversations of a
single turn: a file whose `client(target, jobs, barrier, results, temperature)` takes jobs (request id, ids, tokens of
the answer) and puts into results a list of dicts with `want`, `got` and `arrivals` (seconds since the start, tokens),
or `error`.

Must not know: what is measured, how the service was started.
"""

import asyncio
import itertools
import multiprocessing as mp
import os
import queue
import runpy
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import grpc

from bench.talks import Conversation
from octavo.v1 import inference_pb2, inference_pb2_grpc

TEMPERATURE = 0.6
Results = queue.SimpleQueue[list[dict[str, Any]]]


class CallersError(RuntimeError):
    """The callers did not end in time, or one of them died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one turn. index: of the turn. arrivals: for each message, seconds since the request, and tokens."""

    index: int
    want: int
    got: int = 0
    arrivals: Sequence[tuple[float, int]] = ()
    error: str = ""

    @property
    def first_ms(self) -> float:
        """Time to its first token."""
        return self.arrivals[0][0] * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Times between its messages."""
        times = [at for at, _ in self.arrivals]
        return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerAnswers:
    """All answers, and the seconds from the start signal to the last one."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The rate of all callers together."""
        return sum(each.got for each in self.answers) / self.seconds

    def first_ms(self, *, from_turn: int = 0) -> list[float]:
        """Times to the first token, of turns from this one on."""
        return [each.first_ms for each in self.answers if each.arrivals and each.index >= from_turn]

    @property
    def gaps_ms(self) -> list[float]:
        """Times between messages, of all answers."""
        return [gap for each in self.answers for gap in each.gaps_ms]

    @property
    def complaint(self) -> str:
        """How many answers are incomplete, and why; empty if all are complete."""
        broken = [each for each in self.answers if each.error or each.got != each.want]
        reasons = {each.error or f"{each.got} of {each.want} tokens" for each in broken}
        return f"{len(broken)} of {len(self.answers)} answers not whole: {min(reasons)}" if broken else ""


class Callers:
    """Processes that make calls, kept from one run to the next since their imports take longer than many a run."""

    def __init__(self, processes: int, generator: Path | None = None) -> None:
        self._count, self._generator = processes, generator
        self._context = mp.get_context("spawn")
        self._begin = self._context.Barrier(processes + 1)
        self._links: dict[Connection, BaseProcess] = {}
        self._calls = itertools.count()

    def close(self) -> None:
        """End the processes."""
        for link, child in self._links.items():
            link.close()
            child.kill()
            child.join()
        self._links = {}

    def call(self, target: str, conversations: Sequence[Conversation], *, timeout_s: float) -> CallerAnswers:
        """Run all conversations at once, each turn by turn. If a process does not answer in time, ends all of them and
        raises CallersError."""
        deadline_s = time.monotonic() + timeout_s
        self._start()
        tag = f"{os.getpid()}-{next(self._calls)}"
        jobs = [(f"{tag}-{index}", conversation) for index, conversation in enumerate(conversations)]
        try:
            for index, link in enumerate(self._links):
                link.send((target, jobs[index :: self._count]))
            self._await_callers(deadline_s)
            self._begin.wait(1.0)
            begin_s = time.perf_counter()
            told = [row for rows in self._told(deadline_s) for row in rows]
            seconds = time.perf_counter() - begin_s
        except (BrokenBarrierError, TimeoutError):
            self.close()
            raise CallersError(f"callers did not end within {timeout_s:.0f} s") from None
        except OSError:
            self.close()
            raise CallersError("a process of callers ended; see its own lines above") from None
        return CallerAnswers(answers=[_answer(row) for row in told], seconds=seconds)

    def _start(self) -> None:
        if self._links:
            return
        self._begin = self._context.Barrier(self._count + 1)
        for _ in range(self._count):
            ours, theirs = self._context.Pipe()
            child = self._context.Process(target=_caller, args=(theirs, self._begin, self._generator), daemon=True)
            child.start()
            theirs.close()
            self._links[ours] = child

    def _await_callers(self, deadline_s: float) -> None:
        """Wait until all are connected. Raises TimeoutError, or OSError if one has ended."""
        while self._begin.n_waiting < self._count:
            for link in wait(list(self._links), 0.002):
                assert isinstance(link, Connection)
                _received(link)
            if time.monotonic() > deadline_s:
                raise TimeoutError

    def _told(self, deadline_s: float) -> Iterator[list[dict[str, Any]]]:
        """The results of every process, as they finish. Raises TimeoutError, OSError."""
        waiting = list(self._links)
        while waiting:
            ready = wait(waiting, max(0.1, deadline_s - time.monotonic()))
            if not ready:
                raise TimeoutError
            for link in ready:
                assert isinstance(link, Connection)
                yield _received(link)
                waiting.remove(link)


def _received(link: Connection) -> Any:
    """The next message. Raises OSError if the other end is gone."""
    try:
        return link.recv()
    except EOFError:
        raise OSError from None


def _answer(row: dict[str, Any]) -> Answer:
    known = {name: row[name] for name in ("got", "arrivals", "error") if name in row}
    return Answer(index=row.get("index", 0), want=row.get("want", 0), **known)


def _caller(link: Connection, begin: Barrier, generator: Path | None) -> None:
    """A caller's process: makes the calls that it is told to, until its link is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends us
    theirs = None if generator is None else runpy.run_path(str(generator))["client"]
    while True:
        try:
            target, jobs = link.recv()
        except EOFError:
            return
        results = Results()
        if theirs is None or any(len(conversation) > 1 for _, conversation in jobs):
            asyncio.run(_converse(target, jobs, begin, results))
        else:
            plain = [(name, list(turn.ids), turn.num_output) for name, (turn,) in jobs]
            theirs(target, plain, begin, results, TEMPERATURE)
        link.send(results.get())


async def _converse(target: str, jobs: list[tuple[str, Conversation]], begin: Barrier, results: Results) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await channel.channel_ready()
        begin.wait()
        done = await asyncio.gather(*(_one(stub, name, conversation) for name, conversation in jobs))
    results.put([row for rows in done for row in rows])


async def _one(
    stub: inference_pb2_grpc.InferenceServiceStub, name: str, conversation: Conversation
) -> list[dict[str, Any]]:
    said, rows = list[int](), []
    for index, turn in enumerate(conversation):
        said += turn.ids
        request = inference_pb2.GenerateRequest(request_id=f"{name}-{index}")
        request.token_ids.ids.extend(said)
        request.sampling.temperature = TEMPERATURE
        request.stop.max_tokens, request.stop.ignore_eos = turn.num_output, True
        request.output.format = inference_pb2.OUTPUT_FORMAT_TOKEN_IDS
        begin_s, arrivals, answer = time.perf_counter(), list[tuple[float, int]](), list[int]()
        row: dict[str, Any] = {"index": index, "want": turn.num_output, "arrivals": arrivals}
        rows.append(row)
        try:
            async for event in stub.Generate(request):
                if ids := event.delta.token_ids:
                    arrivals.append((time.perf_counter() - begin_s, len(ids)))
                    answer += ids
        except grpc.RpcError as error:
            row["error"] = f"{error.code().name}: {error.details()}"[:300]
            break
        finally:
            row["got"] = len(answer)
        said += answer
    return rows
