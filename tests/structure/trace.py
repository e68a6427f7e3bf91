"""Prints which functions of ours a Generate calls, in the order of their first call.

Gateway and worker run in this one process over a socket between them: the engine in the main thread, the gateway and
the caller in another. Of several requests, what all of them called. What a clock calls would be in all of them where a
machine is slow, and before the request's own call at times, so it is kept away: the worker sends no heartbeats, turns
of its engine count from the one that finds the request, the gateway's tasks that run at intervals do not count, and the
next request waits until the worker has done with the last.
`python -m tests.structure.trace [MODEL]` prints JSON: {"calls": [[file, function, role], …], "num_until_delta": N,
"wraps": [[file, class], …], "num_heartbeats": N}. wraps: classes of ours that carried the request until the first
delta, in the order in which they were first an argument: their objects have its sampling parameters, in a field or in
a field of a field.
"""

import asyncio
import contextlib
import inspect
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import grpc

from octavo.gateway.app import Gateway
from octavo.gateway.config import GatewayConfig
from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.worker.config import WorkerConfig
from octavo.worker.main import main as worker_main

ROOT = str(Path(__file__).resolve().parent.parent.parent)
OURS = tuple(f"{ROOT}/{folder}/" for folder in ("gateway", "worker", "wire", "blockmgr", "grammar", "model"))
SEED = 20_260_305  # of the traced requests alone: what has it is about them
REQUEST: dict[str, Any] = {
    "chat": {"messages": [{"role": 1, "content": "Hello there"}]},
    "sampling": {"temperature": 0, "seed": SEED},
    "stop": {"max_tokens": 8},
}


NUM_TRACED = 8
CLOCK = "_run_again_after_errors"  # drives the tasks that run whatever requests there are (`gateway.restarting`)
NEVER_S = 3600.0  # an interval longer than any trace takes
SENT = (
    "WorkerLink.put"  # what the worker does behind it races with the gateway, and is on no request's way to its delta
)
TURN, ARRIVED, IDLE = "Engine.step", "WorkerLink._take", "WorkerLink.wait"
HEARTBEAT = "heartbeat_of"


class Calls:
    """What each of the traced requests called, each function once. is_worker_idle: its engine waits for messages."""

    def __init__(self) -> None:
        self.is_worker_idle = False
        self._num_heartbeats = 0
        self._turn: dict[tuple[str, str, str], None] | None = None  # of the engine; None: the request has arrived
        self._found: list[dict[tuple[str, str, str], None]] = []
        self._early: list[set[tuple[str, str, str]]] = []  # of these, those on the way to the first delta
        self._is_early = self._is_early_at_worker = False
        self._wraps: dict[type, None] = {}

    def begin(self) -> None:
        """From now on calls belong to a new request."""
        self._found.append({})
        self._early.append(set())
        self._turn = {}
        self._is_early = self._is_early_at_worker = True

    def mark_delta(self) -> None:
        """The caller has a delta; the first one counts."""
        self._is_early = False

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """For sys.setprofile."""
        code = frame.f_code
        if event in ("call", "return") and code.co_qualname == IDLE:
            self.is_worker_idle = event == "call"
        if event == "return" and code.co_qualname == SENT:
            self._is_early_at_worker = False
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        self._num_heartbeats += code.co_qualname == HEARTBEAT
        if self._found:
            is_worker = threading.current_thread() is threading.main_thread()
            name = os.path.relpath(code.co_filename, ROOT), code.co_qualname, "worker" if is_worker else "gateway"
            if is_worker and self._turn is not None:
                self._take_turn(name)
            elif name not in self._found[-1] and not is_of_clock(frame):
                self._note(name, is_early=self._is_early and (self._is_early_at_worker or not is_worker))
            if self._is_early and code.co_argcount:
                self._look_at([frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]])

    def _take_turn(self, name: tuple[str, str, str]) -> None:
        """A call of the engine's present turn, which is the request's if its message is found in it."""
        assert self._turn is not None
        if name[1] == TURN:
            self._turn.clear()
        self._turn[name] = None
        if name[1] == ARRIVED:
            for each in self._turn:
                self._note(each, is_early=self._is_early and self._is_early_at_worker)
            self._turn = None

    def _note(self, name: tuple[str, str, str], *, is_early: bool) -> None:
        self._found[-1].setdefault(name)
        if is_early:
            self._early[-1].add(name)

    def _look_at(self, arguments: list[object]) -> None:
        for each in arguments:
            if type(each).__module__.startswith("octavo.") and type(each) not in self._wraps and carries(each):
                self._wraps[type(each)] = None

    def as_json(self) -> str:
        """What all requests called, in the order of the last one: first what each of them called before its delta."""
        common, until_delta = set(self._found[0]).intersection(*self._found), set.intersection(*self._early)
        calls = [call for call in self._found[-1] if call in common]
        calls.sort(key=lambda call: call not in until_delta)
        wraps = [(os.path.relpath(inspect.getfile(each), ROOT), each.__qualname__) for each in self._wraps]
        return json.dumps(
            {
                "calls": calls,
                "num_until_delta": len(until_delta),
                "wraps": wraps,
                "num_heartbeats": self._num_heartbeats,
            }
        )


def is_of_clock(frame: FrameType | None) -> bool:
    """Whether it, or what called it, is a task that runs at intervals."""
    while frame is not None and frame.f_code.co_qualname != CLOCK:
        frame = frame.f_back
    return frame is not None


def carries(thing: object, depth: int = 2) -> bool:
    """Whether an object of ours has the traced request's sampling parameters."""
    return any(
        getattr(value, "seed", None) == SEED
        or (isinstance(value, inference_pb2.GenerateRequest) and value.sampling.seed == SEED)
        or (depth > 1 and type(value).__module__.startswith("octavo.") and carries(value, depth - 1))
        for value in fields_of(thing)
    )


def fields_of(thing: object) -> list[object]:
    """Values of an object's fields, whether it has a dictionary or slots."""
    slots = [name for each in type(thing).__mro__ for name in getattr(each, "__slots__", ())]
    names = [*getattr(thing, "__dict__", ()), *slots, *getattr(thing, "__struct_fields__", ())]
    return [getattr(thing, name, None) for name in names]


async def serve_and_ask(socket: str, calls: Calls) -> None:
    """The first request is not traced: it also fills caches."""
    workers = WorkerPoolConfig(endpoints=(socket,), heartbeat_timeout_s=NEVER_S, tick_s=NEVER_S)
    gateway = Gateway(GatewayConfig(listen_address="127.0.0.1:0", metrics_address=None, workers=workers))
    await gateway.start()
    async with asyncio.timeout(120), grpc.aio.insecure_channel(gateway.listeners.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while not await _answered(stub, calls):  # noqa: ASYNC110  # until the worker is there
            await asyncio.sleep(0.1)
        for _ in range(NUM_TRACED):
            calls.begin()
            if not await _answered(stub, calls):
                raise RuntimeError("a worker that was there is gone")


async def _answered(stub: Any, calls: Calls) -> bool:
    try:
        async for event in stub.Generate(inference_pb2.GenerateRequest(**REQUEST)):
            if event.WhichOneof("event") == "delta":
                calls.mark_delta()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    await asyncio.sleep(0.3)  # the gateway's last calls
    while not calls.is_worker_idle:  # noqa: ASYNC110  # it gives the blocks up
        await asyncio.sleep(0.01)
    return True


def main(model: str = "folio-chat") -> None:
    """Ends the process."""
    calls = Calls()
    threading.setprofile(calls.profile)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        socket = f"ipc://{folder}/trace.sock"

        def ask() -> None:
            status = 1
            try:
                asyncio.run(serve_and_ask(socket, calls))
                os.write(1, calls.as_json().encode())
                status = 0
            finally:
                os._exit(status)  # the engine in the main thread knows no caller

        threading.Thread(target=ask, name="gateway").start()
        sys.setprofile(calls.profile)
        worker_main(
            WorkerConfig(
                model=model,
                gateway_endpoints=(socket,),
                metrics_port=None,
                device="cpu",
                num_blocks=64,
                heartbeat_interval_s=NEVER_S,
                stall_exit_s=NEVER_S,  # it is counted from heartbeat to heartbeat
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
