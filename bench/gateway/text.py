"""Does text work ever block the gateway's event loop? `python -m bench.gateway.text [--tokenizer FOLDER]`.

A process runs the gateway with a stand-in for the workers; this one sends requests of thousands of tokens and takes
answers of as many. The gateway's loop has a timer that should fire every millisecond: how much later it fires is the
lag. Part of that is waiting for a core, where others have them all (Linux tells how long); what is left is what the
gateway did to itself: callbacks of the loop, and threads of its own that hold the interpreter. One JSON line a phase;
exit code 1 where what is left of a lag is over the limit.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.figures import percentile
from octavo.cli.serve.ports import free_port

EMBEDDED = Path(__file__).resolve().parents[2] / "model" / "embedded" / "folio-chat"
WORDS = ["the", "fox", "ran", "über", "42", "wonder", "Straße", "你好", "and", "story", "(end)", "🦙", "of", "light\n"]
TIMER_S = 0.001


@dataclass
class Lag:
    """Lags in the current phase."""

    lags_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)  # without waiting for a core
    busy_ms: list[float] = field(default_factory=list)  # CPU time of the loop's thread

    async def watch(self) -> None:
        """Record lags until cancelled."""
        while True:
            waited_ns = core_wait_ns()
            due_s, cpu_s = time.monotonic() + TIMER_S, time.thread_time()
            await asyncio.sleep(TIMER_S)
            self.lags_ms.append(1e3 * max(0.0, time.monotonic() - due_s))
            self.own_ms.append(max(0.0, self.lags_ms[-1] - 1e-6 * (core_wait_ns() - waited_ns)))
            self.busy_ms.append(1e3 * (time.thread_time() - cpu_s))

    def take(self) -> dict[str, float]:
        """The figures so far; starts anew."""
        lags, own, busy = self.lags_ms, self.own_ms, self.busy_ms
        self.lags_ms, self.own_ms, self.busy_ms = [], [], []
        return {
            "lag_ms_p50": _at(lags, 50),
            "lag_ms_p99": _at(lags, 99),
            "lag_ms_max": _at(lags, 100),
            "own_lag_ms_p99": _at(own, 99),
            "own_lag_ms_max": _at(own, 100),
            "loop_cpu_ms_max": _at(busy, 100),
        }


def _at(values: list[float], percent: float) -> float:
    """The percentile, rounded; 0 if the phase was over at once."""
    return round(percentile(values, percent), 2) if values else 0.0


def core_wait_ns() -> int:
    """How long this thread has been ready to run without a core so far (second field of schedstat, see proc(5))."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


@dataclass(frozen=True, kw_only=True)
class Work:
    """num_requests of num_tokens each, several at once; outputs come in steps of step_tokens."""

    tokenizer: Path
    num_requests: int
    num_tokens: int
    concurrency: int
    step_tokens: int


def gateway_process(address: str, work: Work, pipe: Any) -> None:
    """The gateway; answers each word on the pipe with the figures since the last one."""
    import gc

    from bench.gateway.lone_gateway import lone_gateway
    from octavo.cli.main import GC_THRESHOLD
    from octavo.gateway.config import RequestLimits
    from octavo.gateway.main import _loop_factory
    from tests.support.gateway.fake_pool import FakeRun, model_card

    files = {path.name: path.read_bytes() for path in work.tokenizer.iterdir() if path.suffix in (".json", ".jinja")}
    vocab = json.loads(files["tokenizer.json"])
    num_ids = 1 + max([*vocab["model"]["vocab"].values(), *(token["id"] for token in vocab["added_tokens"])])
    tasks: set[asyncio.Task[None]] = set()

    async def speak(run: FakeRun) -> None:
        for start in range(0, work.num_tokens, work.step_tokens):
            await asyncio.sleep(0.01)
            run.tokens([300 + (start + index) % (num_ids - 600) for index in range(work.step_tokens)])
        run.finish()

    def begin(run: FakeRun) -> None:
        task = asyncio.create_task(speak(run))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def main() -> None:
        card = model_card(max_model_len=1 << 20, vocab_size=num_ids, eos_token_ids=())
        limits = RequestLimits(max_pending_tokens=1 << 20, max_tokenizing=4096)
        async with lone_gateway(address, card, files, limits, on_run=begin) as (_, pool):
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            lag = Lag()
            watch = asyncio.create_task(lag.watch())
            pipe.send("ready")
            while await asyncio.to_thread(pipe.recv) != "stop":
                pool.runs.clear()
                pipe.send(lag.take())
            watch.cancel()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())


def texts(work: Work) -> list[str]:
    """Texts of at least num_tokens tokens each."""
    dice = random.Random(0)
    return [" ".join(dice.choices(WORDS, k=work.num_tokens)) for _ in range(work.num_requests)]


async def in_parallel(jobs: Sequence[Callable[[], Awaitable[int]]], limit: int) -> int:
    """Run all jobs, at most limit at once; the sum of their counts."""
    gate = asyncio.Semaphore(limit)

    async def one(job: Callable[[], Awaitable[int]]) -> int:
        async with gate:
            return await job()

    return sum(await asyncio.gather(*map(one, jobs)))


async def phases(address: str, work: Work, pipe: Any) -> list[dict[str, Any]]:
    """The phases: Tokenize, Detokenize, Generate with text, chat and stop strings."""
    import grpc

    from octavo.v1 import inference_pb2 as pb
    from octavo.v1 import inference_pb2_grpc

    prompts = texts(work)
    options = [("grpc.max_receive_message_length", 1 << 26)]
    stop = pb.StopConditions(max_tokens=work.num_tokens, strings=["never in it", "nor this"])
    plain = pb.StopConditions(max_tokens=work.num_tokens)
    chats = [pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=text)]) for text in prompts]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def tokenize(text: str) -> int:
            return len((await stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids)

        async def detokenize(index: int) -> int:
            ids = [300 + (index + position) % 2000 for position in range(work.num_tokens)]
            return len((await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text)

        async def generate(request: pb.GenerateRequest) -> int:
            return len([None async for _ in stub.Generate(request)])

        async def complete(request: pb.GenerateRequest) -> int:
            answer = await stub.Complete(pb.CompleteRequest(generate=request))
            return int(answer.finished.usage.completion_tokens)

        runs = {
            "tokenize": [lambda text=text: tokenize(text) for text in prompts],
            "detokenize": [lambda index=index: detokenize(index) for index in range(work.num_requests)],
            "generate text": [
                lambda text=text: generate(pb.GenerateRequest(text=text, stop=plain)) for text in prompts
            ],
            "generate chat, stop strings": [
                lambda chat=chat: generate(pb.GenerateRequest(chat=chat, stop=stop)) for chat in chats
            ],
            "complete": [lambda text=text: complete(pb.GenerateRequest(text=text, stop=plain)) for text in prompts],
        }
        rows = []
        for name, jobs in runs.items():
            pipe.send("next")
            pipe.recv()
            start_s = time.monotonic()
            counted = await in_parallel(jobs, work.concurrency)
            seconds = time.monotonic() - start_s
            pipe.send("next")
            rows.append({"phase": name, "requests": len(jobs), "seconds": round(seconds, 1), "counted": counted})
            rows[-1] |= pipe.recv()
            print(json.dumps(rows[-1]), flush=True)
        pipe.send("stop")
    return rows


def main() -> int:
    """The exit code: 1 if the loop was blocked for longer than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=EMBEDDED, help="folder with tokenizer.json")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=16, help="tokens that one step gives a stream")
    parser.add_argument("--limit-ms", type=float, default=20.0)
    given = parser.parse_args()
    work = Work(
        tokenizer=given.tokenizer,
        num_requests=given.requests,
        num_tokens=given.tokens,
        concurrency=given.concurrency,
        step_tokens=given.step_tokens,
    )
    address = f"127.0.0.1:{free_port('127.0.0.1', set())}"
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=gateway_process, args=(address, work, theirs))
    process.start()
    assert ours.recv() == "ready"
    rows = asyncio.run(phases(address, work, ours))
    process.join()
    return 1 if max(row["own_lag_ms_max"] for row in rows) > given.limit_ms else 0


if __name__ == "__main__":
    sys.exit(main())
