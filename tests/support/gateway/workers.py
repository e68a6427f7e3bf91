"""Workers made by tests: plain registrations, and a peer that sends whatever the test wants."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import zmq

from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import OutputSink, WorkerView
from octavo.wire.bundle import bundle_digest
from octavo.wire.codec import decode_to_worker, encode
from octavo.wire.messages import (
    Capacity,
    Finished,
    Message,
    ModelCard,
    NeedTokenizer,
    Register,
    Run,
    SamplingParams,
    StepOutput,
    TokenizerBundle,
    TokenLogprobs,
    ToWorker,
    WireFinishReason,
)
from octavo.wire.options import new_dealer
from tests.support.waiting import WAIT_S, until

FILES = {"tokenizer.json": b"{}"}
PROMPT = np.array([1, 2, 3], np.int32)

MessageT = TypeVar("MessageT", bound=Message)


def card(**changes: object) -> ModelCard:
    """The card of a model with a thousand token ids."""
    plain = ModelCard(
        name="tiny",
        fingerprint="f1",
        architecture="Qwen2ForCausalLM",
        dtype="float32",
        max_model_len=512,
        vocab_size=1000,
        eos_token_ids=(2,),
        default_sampling={},
        tokenizer_digest=bundle_digest(FILES),
    )
    return msgspec.structs.replace(plain, **changes)


def capacity(**changes: object) -> Capacity:
    """A capacity of eight requests at once, with blocks of four tokens."""
    plain = Capacity(num_blocks=64, block_size=4, max_num_seqs=8, max_waiting=8, max_batch_tokens=64)
    return msgspec.structs.replace(plain, **changes)


def register(worker_id: str = "w0", epoch: str = "e" * 32, **changes: object) -> Register:
    """A registration; its process cannot be watched."""
    plain = Register(worker_id=worker_id, epoch=epoch, card=card(), capacity=capacity(), pid=1, pid_namespace="")
    return msgspec.structs.replace(plain, **changes)


def request(request_id: str = "r", *, prompt: tuple[int, ...] = (1, 2, 3), **sampling: object) -> Run:
    """A small greedy request of sixteen tokens."""
    chosen = msgspec.structs.replace(SamplingParams(temperature=0.0, max_tokens=16), **sampling)
    return Run(handle=0, request_id=request_id, prompt_ids=np.array(prompt, "<i4").tobytes(), sampling=chosen)


def submit(pool: WorkerPool, worker: WorkerView, run: Run, sink: OutputSink) -> int:
    """Send a request for one output under a new handle; returns the handle."""
    (handle,) = pool.draw_handles(1)
    pool.submit(worker, msgspec.structs.replace(run, handle=handle), [sink])
    return handle


def step_output(epoch: str, seq: int, rows: list[tuple[int, int]] | None = None, **fields: object) -> StepOutput:
    """rows: (handle, token)."""
    handles, tokens = zip(*rows, strict=True) if rows else ((), ())
    plain = StepOutput(
        epoch=epoch,
        seq=seq,
        step=seq,
        handles=np.array(handles, "<i8").tobytes(),
        tokens=np.array(tokens, "<i4").tobytes(),
    )
    return msgspec.structs.replace(plain, **fields)


def finished(handle: int, completion_tokens: int = 0, **fields: object) -> Finished:
    """The end of an output that reached its length."""
    plain = Finished(handle=handle, reason=WireFinishReason.LENGTH, completion_tokens=completion_tokens)
    return msgspec.structs.replace(plain, **fields)


@dataclass(eq=False)
class RecordingSink:
    """Records all its calls in order; `end` waits for the terminal one."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    moved_s: float = 0.0

    def on_started(self) -> None:
        self.calls.append(("started",))

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        self.calls.append(("tokens", *token_ids) if logprobs is None else ("tokens", *token_ids, *logprobs))

    def on_finished(self, finished: Finished) -> None:
        self.calls.append(("finished", finished))
        self.done.set()

    def on_lost(self, reason: str, detail: str) -> None:
        self.calls.append(("lost", reason))
        self.done.set()

    def on_moved(self, worker_id: str, lost_s: float, moved_s: float) -> None:
        self.calls.append(("moved", worker_id))
        self.moved_s = moved_s

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [token for call in self.calls if call[0] == "tokens" for token in call[1:] if isinstance(token, int)]

    @property
    def ends(self) -> list[tuple[object, ...]]:
        """The terminal calls: one once the output has ended, never more."""
        return [call for call in self.calls if call[0] in ("finished", "lost")]

    async def end(self, timeout_s: float = WAIT_S) -> tuple[object, ...]:
        """Wait for the terminal call."""
        async with asyncio.timeout(timeout_s):
            await self.done.wait()
        return self.ends[0]


def pool_config(folder: Path, **changes: object) -> WorkerPoolConfig:
    """One ipc endpoint in the folder's run directory."""
    address = f"ipc://{folder / 'run' / 'gateway-0.sock'}"
    fields: dict[str, object] = {"endpoints": (address,), "tick_s": 0.05, "max_migrations": 0}
    return WorkerPoolConfig(**(fields | changes))  # type: ignore[arg-type]


class FakeWorker:
    """A DEALER that the test drives message by message."""

    def __init__(self, address: str, worker_id: str = "w0", **changes: object) -> None:
        self.epoch = secrets.token_hex(16)
        self.register = register(worker_id, self.epoch, **changes)
        self.seq = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = new_dealer(self._context)
        self.socket.connect(address)

    async def send(self, message: Message) -> None:
        """Send a well-formed message."""
        await self.send_frames(encode(message))

    async def send_frames(self, *frames: bytes) -> None:
        """Send arbitrary frames."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    self.socket.send_multipart(frames, zmq.NOBLOCK)
                    return
                except zmq.Again:
                    await asyncio.sleep(0.002)

    async def receive(self) -> ToWorker:
        """The next message from the gateway."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    return decode_to_worker(self.socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    await asyncio.sleep(0.002)

    async def expect(self, kind: type[MessageT]) -> MessageT:
        """The next message, which must be of this kind."""
        message = await self.receive()
        assert isinstance(message, kind), message
        return message

    async def hears_nothing(self, for_s: float = 0.1) -> bool:
        """Whether the gateway stays silent."""
        await asyncio.sleep(for_s)
        return not self.socket.poll(0)

    async def join(self, pool: WorkerPool) -> None:
        """Register, send the tokenizer if asked for it, and become ready."""
        await self.send(self.register)
        await self.receive()
        if self.register.card.name not in pool.cards():
            await self.expect(NeedTokenizer)
            digest = self.register.card.tokenizer_digest
            await self.send(TokenizerBundle(epoch=self.epoch, digest=digest, files=FILES))
        await until(lambda: any(view.epoch == self.epoch for view in pool.workers()) and pool.cards())

    async def step(self, rows: list[tuple[int, int]] | None = None, **fields: object) -> None:
        """Send the output of one step."""
        self.seq += 1
        await self.send(step_output(self.epoch, self.seq, rows, **fields))

    def close(self) -> None:
        """Vanish without a farewell."""
        self._context.destroy(linger=0)


Dial = Callable[..., FakeWorker]
"""The fixture that makes workers connected to the test's pool."""


def open_one(pool: WorkerPool, model: str = "tiny") -> tuple[int, RecordingSink]:
    """An output on the worker that the pool chooses: its handle and its sink."""
    asked, sink = request(), RecordingSink()
    return submit(pool, pool.choose(model, np.frombuffer(asked.prompt_ids, "<i4"), ""), asked, sink), sink


@asynccontextmanager
async def open_pool(folder: Path, *names: str, **changes: object) -> AsyncIterator[tuple[WorkerPool, list[FakeWorker]]]:
    """A started pool that workers with these names have joined; all are closed at the end."""
    pool = WorkerPool(pool_config(folder, **changes))
    await pool.start()
    workers: list[FakeWorker] = []
    try:
        for name in names:
            workers.append(FakeWorker(pool.bound_endpoints[0], name))
            await workers[-1].join(pool)
        yield pool, workers
    finally:
        await pool.close()
        for worker in workers:
            worker.close()
