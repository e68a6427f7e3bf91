"""Load that moves every panel of the dashboard: chats with a common prefix, more than the blocks have room for,
schemas, readers that stop, mistakes, strangers, watchers, a worker that dies, another gateway that comes and goes."""

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq.asyncio

from octavo import OctavoError
from octavo.client.aio import AsyncClient
from octavo.gateway.config import PeerConfig
from octavo.gateway.peers.peers import Peers
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.keys import generate_keys, save_keys
from octavo.wire.peer_messages import PeerReply, PeerUse
from tests.support.http2.unread_caller import UnreadingCaller
from tests.support.services.collector import collecting
from tests.support.services.prometheus import SCRAPE_S, Prometheus, scraping, until
from tests.support.services.service import Service, free_port, serve

NUM_WORKERS, NUM_CHATS, NUM_UNREAD = 2, 16, 2  # more chats than slots, so that some wait on any machine
SETTINGS = (
    *(
        f"--workers={NUM_WORKERS}",
        "--num-blocks=64",
        "--max-model-len=1024",
        "--max-num-seqs=5",
        "--host-kv-gib=0.004",
        "--num-threads=1",
    ),
    *("--pause-pending-tokens=64", "--page=off"),
)
SYSTEM = "You are a printer of old books who answers in one or two sentences, and likes paper, ink and type. "
QUESTIONS = ("What is a folio?", "Who made the first press?", "Tell me about paper.", "Name three colours of ink.")
FEW_BYTES = 20_000  # read before a reader stops
READS_FOR_S = 2.0
LONGEST_S = 240.0  # until everything that must happen has happened, on a busy machine
PAUSED = "sum (octavo_num_requests_paused) > 0"
MIGRATED = "sum (octavo_requests_migrated_total) > 0"
MUST_HAPPEN = (
    *(f"sum ({name}) > 0" for name in (
        "octavo_num_preemptions_total", "octavo_kv_copied_blocks_total", "octavo_request_pauses_total",
        "octavo_gateway_trace_spans_total", "octavo_grammar_cache_misses_total",
        "octavo_gateway_zmq_undecodable_frames_total", "octavo_gateway_peer_losses_total",
    )),
    MIGRATED,
    f"count (up == 1) == {1 + NUM_WORKERS}",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A service under load, and the Prometheus that scrapes it. start_s: when the load began, in seconds since 1970."""

    prometheus: Prometheus
    start_s: float
    end_s: float


@contextmanager
def watched(folder: Path, *, seconds: float) -> Iterator[Watched]:
    """Run the load for this long, or longer until everything that must happen has happened; Prometheus can be queried
    until the block ends."""
    gateway_port, worker_port = free_port(), _free_ports(NUM_WORKERS)
    workers = list(range(worker_port, worker_port + NUM_WORKERS))
    pair, _ = save_keys(generate_keys(), folder, "gateway")
    own, other = (f"tcp://{host}:{free_port()}" for host in ("127.0.0.1", "127.0.0.2"))
    beside = PeerConfig(endpoint=other, others=(own,), key_file=pair)
    with collecting() as collector, _variables(OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint):
        arguments = [*SETTINGS, f"--metrics-port={gateway_port}", f"--worker-metrics-port={worker_port}"]
        arguments += [f"--control-endpoint={own}", f"--peer-endpoint={other}", f"--gateway-key-file={pair}"]
        with serve(folder, *arguments) as service:
            service.wait_until_supervised()
            with scraping(folder, {"octavo-gateway": [gateway_port], "octavo-worker": workers}) as prometheus:
                until(lambda: len(prometheus.now("up == 1")) == 1 + NUM_WORKERS)
                start_s = time.time()
                asyncio.run(_load(service, prometheus, beside, seconds))
                yield Watched(prometheus=prometheus, start_s=start_s, end_s=time.time())


def _free_ports(count: int) -> int:
    """The first of this many consecutive free ports."""
    while True:
        ports = [free_port() for _ in range(count)]
        if ports == list(range(ports[0], ports[0] + count)):
            return ports[0]


@contextmanager
def _variables(**values: str) -> Iterator[None]:
    values |= {"OTEL_BSP_SCHEDULE_DELAY": "500"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


async def _load(service: Service, prometheus: Prometheus, beside: PeerConfig, seconds: float) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(service.target))
        tasks = [asyncio.create_task(_chat(client, seed)) for seed in range(NUM_CHATS)]
        others = (
            _schemas(client),
            _mistakes(client),
            _unread(service.port, prometheus),
            _stranger(service.log.parent / "run"),
            _watch(client),
            _beside(beside),
        )
        tasks += [asyncio.create_task(each) for each in others]
        tasks.append(asyncio.create_task(_kill(service, prometheus, after_s=0.6 * seconds)))
        longest_s = time.monotonic() + seconds + LONGEST_S
        await asyncio.sleep(seconds)
        while missing := await asyncio.to_thread(lambda: [each for each in MUST_HAPPEN if not prometheus.now(each)]):
            _raise_what_failed(tasks)
            assert time.monotonic() < longest_s, f"did not happen: {missing}"
            await asyncio.sleep(SCRAPE_S)
        await asyncio.sleep(2 * SCRAPE_S)  # so that lines continue beyond the last events
        _raise_what_failed(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_what_failed(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raise what has ended a part of the load, which nothing else would notice."""
    for task in tasks:
        if task.done():
            task.result()


async def _chat(client: AsyncClient, seed: int) -> None:
    """One caller, whose prompts begin with the common prefix."""
    generator = random.Random(seed)
    while True:
        question = generator.choice(QUESTIONS) + " " + " ".join(generator.choices(("paper", "ink", "type"), k=40))
        with contextlib.suppress(OctavoError):
            await client.complete(
                messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
                max_tokens=generator.randrange(20, 160), num_outputs=generator.choice((1, 1, 1, 2)), seed=seed,
                ignore_eos=generator.random() < 0.7,
            )  # fmt: skip
        await asyncio.sleep(generator.uniform(0, 0.05))


async def _schemas(client: AsyncClient) -> None:
    """Two of three schemas are new."""
    for number in itertools.count():
        properties = {f"year_{number - number % 3 // 2}": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        with contextlib.suppress(OctavoError):
            await client.complete(text="A year:", json_schema=schema, max_tokens=30, seed=number)
        await asyncio.sleep(0.2)


async def _mistakes(client: AsyncClient) -> None:
    """Mistakes of callers, and calls that they give up."""
    for number in itertools.count():
        with contextlib.suppress(OctavoError):
            if number % 4 == 0:
                await client.complete(text="Hello", temperature=-1.0)
            elif number % 4 == 1:
                await client.complete(text="Hello", max_tokens=500, ignore_eos=True, timeout_s=0.3)
            elif number % 4 == 2:
                await client.complete(text="Hello", model="another")
            else:
                stream = client.stream(text="Hello", max_tokens=500, ignore_eos=True)
                await anext(aiter(stream))
                stream.cancel()
        await asyncio.sleep(0.3)


async def _unread(port: int, prometheus: Prometheus) -> None:
    """Readers that stop reading until the workers have paused for them, however long their streams wait before that."""
    while True:
        caller = await UnreadingCaller.connect(port)
        try:
            streams = [caller.open(_wide(number)) for number in range(NUM_UNREAD)]
            _read_on(caller, streams, FEW_BYTES)
            while not (await asyncio.to_thread(prometheus.now, PAUSED) or len(caller.trailers) == NUM_UNREAD):
                await caller.receive(for_s=SCRAPE_S)
            _read_on(caller, streams, 1 << 30)
            until_s = time.monotonic() + READS_FOR_S
            while (left_s := until_s - time.monotonic()) > 0:
                await caller.receive(for_s=left_s)
        finally:
            await caller.close()


def _read_on(caller: UnreadingCaller, streams: Sequence[int], num_bytes: int) -> None:
    for stream in streams:
        if stream not in caller.trailers:
            caller.take(stream, num_bytes)


def _wide(number: int) -> bytes:
    """A request whose output does not fit into the transport's buffers."""
    request = pb.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[9, 10 + number]),
        stop=pb.StopConditions(max_tokens=400, ignore_eos=True),
        output=pb.OutputOptions(logprobs=20),
    )
    return request.SerializeToString()


async def _stranger(run_dir: Path) -> None:
    """Frames that no worker sends."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(f"ipc://{run_dir}/gateway-0.sock")
    try:
        while True:
            await socket.send_multipart([b"hello", b"gateway"])
            await asyncio.sleep(1.0)
    finally:
        socket.close()
        context.term()


async def _beside(config: PeerConfig) -> None:
    """Another gateway of the service, which dies over and over."""
    while True:
        each = Peers(config, lambda question: PeerReply(call_id=0, gateway_id=""))
        await each.start()
        try:
            for number in range(1, 12):
                each.send_to_all(
                    PeerUse(call_id=0, gateway_id=each.gateway_id, number=number, name="other", is_snapshot=True)
                )
                await asyncio.sleep(0.5)
        finally:
            await each.close()
        await asyncio.sleep(4.0)  # it counts as missing after two


async def _watch(client: AsyncClient) -> None:
    """Two watchers, the second for a while at a time."""
    async with contextlib.aclosing(client.watch_load(interval_s=1.0)) as first:
        await anext(first)
        while True:
            async with contextlib.aclosing(client.watch_load(interval_s=0.5, max_block_cells=64)) as second:
                await _snapshots(second, 10)
            await _snapshots(first, 4)


async def _snapshots(source: AsyncIterator[Any], count: int) -> Sequence[Any]:
    return [await anext(source) for _ in range(count)]


async def _kill(service: Service, prometheus: Prometheus, *, after_s: float) -> None:
    """Kill a worker after this time, and again until streams have moved: it can die while it has none."""
    while True:
        await asyncio.sleep(after_s)
        if children := service.children("worker"):
            children[0].kill()
        await asyncio.sleep(4 * SCRAPE_S)
        if await asyncio.to_thread(prometheus.now, MIGRATED):
            return
