"""A real worker process against a real pool: what callers see while it lives, dies, drains and returns."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from octavo.gateway.workers.pool import WorkerPool
from octavo.wire.keys import generate_keys, save_keys
from octavo.wire.messages import Run, SamplingParams, WireFinishReason
from octavo.worker import main as worker_main
from octavo.worker.config import WorkerConfig
from octavo.worker.runners.oracle.model import OracleModel, oracle_tokens
from octavo.worker.shutdown import EXIT_REFUSED
from tests.support.gateway.workers import RecordingSink, pool_config, submit
from tests.support.waiting import until

REPOSITORY = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 60.0


class WorkerProcess:
    """Started at once; its log lines (JSON) go to a file."""

    def __init__(self, log: Path, **fields: object) -> None:
        self.log = log
        command = [sys.executable, "-m", "tests.support.services.oracle_worker", json.dumps(fields, default=str)]
        with log.open("ab") as output:
            self.popen = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)

    def kill(self) -> None:
        """With -9."""
        self.popen.kill()
        self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Its exit code."""
        return self.popen.wait(timeout_s)

    def events(self) -> list[dict[str, object]]:
        """Its log so far."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def names(self) -> list[object]:
        """The events of its log."""
        return [line["event"] for line in self.events()]


@contextmanager
def running_worker(log: Path, **fields: object) -> Iterator[WorkerProcess]:
    """Killed at the end, if it still runs."""
    process = WorkerProcess(log, **fields)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.kill()


START_S = 120.0
SILENCE_S = 60.0  # until a worker without a heartbeat is lost: a busy machine must not look like one
Start = Callable[..., WorkerProcess]
OpenPool = Callable[..., Awaitable[WorkerPool]]


@pytest.fixture
async def open_pool(tmp_path: Path) -> AsyncIterator[OpenPool]:
    """Starts pools in the run directory of the test, and closes them."""
    async with AsyncExitStack() as stack:

        async def run(**changes: object) -> WorkerPool:
            opened = WorkerPool(pool_config(tmp_path, **({"heartbeat_timeout_s": SILENCE_S} | changes)))
            await opened.start()
            stack.push_async_callback(opened.close)
            return opened

        yield run


@pytest.fixture
async def pool(open_pool: OpenPool) -> WorkerPool:
    return await open_pool()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts worker processes that dial the run directory of the test."""
    with ExitStack() as stack:

        def run(*, log: str = "worker.log", **fields: object) -> WorkerProcess:
            endpoint = f"ipc://{tmp_path / 'run' / 'gateway-0.sock'}"
            plain: dict[str, object] = {"gateway_endpoints": [endpoint], "worker_id": "w0", "log_format": "json"}
            return stack.enter_context(running_worker(tmp_path / log, **(plain | fields)))

        yield run


async def until_ready(pool: WorkerPool, num_workers: int = 1) -> None:
    await until(lambda: pool.cards() and len(pool.workers()) == num_workers, START_S)


def prompt_of(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, 1000, int(rng.integers(1, 120))).astype(np.int32)


def open_one(pool: WorkerPool, seed: int = 0, max_tokens: int = 40) -> tuple[int, RecordingSink]:
    sink = RecordingSink()
    sampling = SamplingParams(temperature=0.0, seed=seed, max_tokens=max_tokens)
    prompt_T = prompt_of(seed)
    asked = Run(handle=0, request_id=f"r{seed}", prompt_ids=prompt_T.tobytes(), sampling=sampling)
    return submit(pool, pool.choose("oracle", prompt_T, ""), asked, sink), sink


def expected(seed: int, max_tokens: int = 40) -> list[int]:
    sampling = SamplingParams(temperature=0.0, seed=seed, max_tokens=max_tokens)
    return oracle_tokens(prompt_of(seed).tolist(), sampling, model=OracleModel(), max_total_tokens=32_768)


async def expect_idle(pool: WorkerPool) -> None:
    """Soon no block is held, and the worker's own recount agrees."""
    async with asyncio.timeout(SILENCE_S):
        while True:
            ((_, reply),) = await pool.query(audit=True, flush=False, timeout_s=SILENCE_S)
            assert reply.violations == ()
            if not reply.num_active_blocks:
                break
    assert reply.num_free_blocks + reply.num_cached_blocks == reply.num_blocks


async def test_fifty_requests_at_once_give_the_oracles_tokens(pool: WorkerPool, start: Start) -> None:
    start(num_blocks=60, max_num_seqs=16, audit_every_steps=1)
    await until_ready(pool)
    opened = [open_one(pool, seed)[1] for seed in range(50)]
    for seed, sink in enumerate(opened):
        assert (await sink.end())[0] == "finished"
        assert sink.tokens == expected(seed)
        assert [call[0] for call in sink.calls if call[0] != "tokens"] == ["started", "finished"]
    assert dict(pool.stats.protocol_errors) == {}
    assert pool.num_outputs == 0
    await expect_idle(pool)


async def test_a_cancelled_request_frees_its_blocks_and_leaves_its_neighbour_alone(
    pool: WorkerPool, start: Start
) -> None:
    start(oracle_step_delay_s=0.005)
    await until_ready(pool)
    (victim, victim_sink), (_, bystander) = open_one(pool, 1, max_tokens=5_000), open_one(pool, 2)
    await until(lambda: victim_sink.tokens)
    pool.cancel(victim)
    name, end = await victim_sink.end()
    assert (name, end.reason) == ("finished", WireFinishReason.CANCELLED)  # type: ignore[attr-defined]
    await bystander.end()
    assert bystander.tokens == expected(2)
    assert victim_sink.tokens == expected(1, 5_000)[: len(victim_sink.tokens)]
    await expect_idle(pool)


async def test_after_kill_9_victims_know_without_waiting_for_a_heartbeat_and_a_new_life_serves(
    pool: WorkerPool, start: Start
) -> None:
    first = start(oracle_step_delay_s=0.005)
    await until_ready(pool)
    sinks = [open_one(pool, seed, max_tokens=5_000)[1] for seed in range(8)]
    await until(lambda: all(sink.tokens for sink in sinks))
    first.kill()
    for seed, sink in enumerate(sinks):
        assert await sink.end(SILENCE_S / 2) == ("lost", "WORKER_LOST")
        assert sink.tokens == expected(seed, 5_000)[: len(sink.tokens)]
    assert pool.cards() == {}
    start()
    await until_ready(pool)
    _, sink = open_one(pool, 7)
    await sink.end()
    assert sink.tokens == expected(7)


async def test_a_restarted_gateway_is_joined_by_itself_and_the_former_requests_are_dropped(
    open_pool: OpenPool, start: Start
) -> None:
    former = await open_pool()
    worker = start(oracle_step_delay_s=0.005)
    await until_ready(former)
    _, orphan = open_one(former, 1, max_tokens=20_000)
    await until(lambda: orphan.tokens)
    await former.close()
    pool = await open_pool()
    await until_ready(pool)
    _, sink = open_one(pool, 2)
    await sink.end()
    assert sink.tokens == expected(2)
    await expect_idle(pool)
    assert (dict(pool.stats.protocol_errors), pool.stats.late_outputs) == ({}, 0)
    assert worker.popen.poll() is None


async def test_two_gateways_share_a_worker_and_the_death_of_one_frees_only_its_requests(
    tmp_path: Path, open_pool: OpenPool, start: Start
) -> None:
    endpoints = [f"ipc://{tmp_path / 'run' / f'gateway-{index}.sock'}" for index in range(2)]
    pools = [await open_pool(endpoints=(endpoint,)) for endpoint in endpoints]
    start(gateway_endpoints=endpoints, oracle_step_delay_s=0.005)
    for pool in pools:
        await until_ready(pool)
    _, doomed = open_one(pools[0], 1, max_tokens=20_000)
    _, bystander = open_one(pools[1], 2, max_tokens=60)
    await until(lambda: doomed.tokens and bystander.tokens)
    await pools[0].close()
    await bystander.end()
    assert bystander.tokens == expected(2, 60)
    await expect_idle(pools[1])


async def test_the_first_sigterm_drains(pool: WorkerPool, start: Start) -> None:
    worker = start(oracle_step_delay_s=0.005)
    await until_ready(pool)
    _, sink = open_one(pool, 3, max_tokens=60)
    await until(lambda: sink.tokens)
    worker.signal(signal.SIGTERM)
    await sink.end()
    assert sink.tokens == expected(3, 60)
    assert await asyncio.to_thread(worker.wait) == 0
    await until(lambda: not pool.workers())
    assert dict(pool.stats.workers_lost) == {"DRAINING": 1}
    assert worker.names()[-2:] == ["draining", "ended"]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        pytest.param(
            signal.SIGHUP,
            marks=pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="under nohup"),
        ),
    ],
)
async def test_the_second_signal_stops(pool: WorkerPool, start: Start, number: signal.Signals) -> None:
    worker = start(oracle_step_delay_s=0.02)
    await until_ready(pool)
    _, sink = open_one(pool, 3, max_tokens=20_000)
    await until(lambda: sink.tokens)
    worker.signal(number)
    await until(lambda: "draining" in worker.names())
    assert not sink.done.is_set()
    worker.signal(number)
    assert await sink.end() == ("lost", "DRAINING")
    assert await asyncio.to_thread(worker.wait) == 0


async def test_the_grace_of_a_drain_ends(pool: WorkerPool, start: Start) -> None:
    worker = start(oracle_step_delay_s=0.02, drain_grace_s=0.2)
    await until_ready(pool)
    _, sink = open_one(pool, 3, max_tokens=20_000)
    await until(lambda: sink.tokens)
    worker.signal(signal.SIGTERM)
    name, end = await sink.end()
    assert (name, end.error) == ("finished", "DRAINING")  # type: ignore[attr-defined]
    assert await asyncio.to_thread(worker.wait) == 0


async def test_a_frozen_worker_is_given_up_and_leaves_when_it_thaws(open_pool: OpenPool, start: Start) -> None:
    pool = await open_pool(heartbeat_timeout_s=3.0)
    worker = start(oracle_step_delay_s=0.005, heartbeat_interval_s=0.1)
    await until_ready(pool)
    _, sink = open_one(pool, 3, max_tokens=20_000)
    await until(lambda: sink.tokens)
    worker.signal(signal.SIGSTOP)
    assert await sink.end() == ("lost", "WORKER_STALLED")
    num_tokens = len(sink.tokens)
    worker.signal(signal.SIGCONT)
    assert await asyncio.to_thread(worker.wait) == EXIT_REFUSED
    assert (len(sink.tokens), len(sink.ends)) == (num_tokens, 1)
    assert pool.stats.stale_messages > 0


async def test_a_short_freeze_is_only_a_pause(open_pool: OpenPool, start: Start) -> None:
    pool = await open_pool()
    worker = start(oracle_step_delay_s=0.005, heartbeat_interval_s=0.1)
    await until_ready(pool)
    _, sink = open_one(pool, 3, max_tokens=60)
    await until(lambda: sink.tokens)
    worker.signal(signal.SIGSTOP)
    await asyncio.sleep(1.0)
    worker.signal(signal.SIGCONT)
    assert (await sink.end())[0] == "finished"
    assert sink.tokens == expected(3, 60)


async def test_a_wrong_token_ends_the_worker_with_the_reason(open_pool: OpenPool, start: Start) -> None:
    pool = await open_pool(registration_token="secret")
    worker = start(registration_token="guess")
    assert await asyncio.to_thread(worker.wait, START_S) == EXIT_REFUSED
    (refusal,) = [line for line in worker.events() if line["event"] == "gateway_refused_worker"]
    assert refusal["reason"] == "the registration token is wrong"
    assert pool.workers() == ()


async def test_over_tcp_only_a_worker_with_a_listed_key_gets_in(
    tmp_path: Path, open_pool: OpenPool, start: Start
) -> None:
    keys = {name: save_keys(generate_keys(), tmp_path / "keys", name) for name in ("gateway", "worker", "stranger")}
    pool = await open_pool(
        endpoints=("tcp://127.0.0.1:0",),
        server_key_file=keys["gateway"][0],
        allowed_key_files=(keys["worker"][1],),
    )

    def start_as(name: str) -> WorkerProcess:
        curve = {"secret_key_file": str(keys[name][0]), "gateway_public_key_file": str(keys["gateway"][1])}
        return start(log=f"{name}.log", worker_id=name, gateway_endpoints=list(pool.bound_endpoints), curve=curve)

    stranger, worker = start_as("stranger"), start_as("worker")
    await until_ready(pool)
    await until(lambda: "gateway_refused_keys" in stranger.names() or "loaded" in stranger.names(), START_S)
    _, sink = open_one(pool, 5)
    await sink.end()
    assert sink.tokens == expected(5)
    assert [view.worker_id for view in pool.workers()] == ["worker"]
    assert worker.popen.poll() is None


async def test_metrics_tell_what_happened(pool: WorkerPool, start: Start) -> None:
    worker = start(metrics_port=0)
    await until_ready(pool)
    sinks = [open_one(pool, seed, max_tokens=10)[1] for seed in range(3)]
    for sink in sinks:
        await sink.end()
    wanted = {
        "octavo_generation_tokens_total 30.0",
        'octavo_request_finished_total{finished_reason="length"} 3.0',
        "octavo_num_requests_running 0.0",
        "octavo_kv_blocks_leaked 0.0",
        "octavo_worker_gateways 1.0",
    }
    port = metrics_port(worker)
    async with asyncio.timeout(SILENCE_S):  # a step is counted behind its message
        while not wanted <= (page := await asyncio.to_thread(read, f"http://127.0.0.1:{port}/metrics")):
            assert page


def metrics_port(worker: WorkerProcess) -> int:
    """As it says in its log; 0 until it does."""
    return next((int(str(line["metrics_port"])) for line in worker.events() if line["event"] == "loaded"), 0)


def read(url: str) -> set[str]:
    with urllib.request.urlopen(url, timeout=SILENCE_S) as response:
        return set(response.read().decode().splitlines())


async def test_the_worker_never_imports_torch(pool: WorkerPool, start: Start) -> None:
    worker = start()
    await until_ready(pool)
    mapped = await asyncio.to_thread(Path(f"/proc/{worker.popen.pid}/maps").read_text)
    assert "libtorch" not in mapped
    assert "libzmq" in mapped or "zmq" in mapped


def test_impossible_settings_stop_the_start(start: Start) -> None:
    worker = start(gateway_endpoints=["tcp://10.0.0.1:1"])
    assert worker.wait(START_S) == 1
    assert "needs CURVE keys" in worker.log.read_text()
    assert os.listdir(worker.log.parent) == ["worker.log"]


def ready_says(port: int) -> tuple[int, str]:
    """Status and text of the worker's /ready; (0, "") while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


async def test_probes_hear_when_a_worker_is_ready_and_when_no_more(start: Start, open_pool: OpenPool) -> None:
    worker = start(metrics_port=0)
    await until(lambda: metrics_port(worker), START_S)
    port = metrics_port(worker)
    await until(lambda: ready_says(port) == (503, "no gateway has taken this worker yet\n"), START_S)
    pool = await open_pool()
    await until(lambda: ready_says(port) == (200, "ready\n"), START_S)
    await pool.close()
    await until(lambda: ready_says(port)[0] == 503, START_S)


def test_no_collection_of_a_start_walks_what_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[int] = []
    monkeypatch.setattr("octavo.worker.loading.group.load_group", lambda *_: skipped.append(gc.get_freeze_count()))
    gc.unfreeze()
    try:
        worker_main._load(WorkerConfig(model="none", gateway_endpoints=()), lambda *_: None, lambda _: None)
    finally:
        gc.unfreeze()
    assert skipped[0] > 100_000
