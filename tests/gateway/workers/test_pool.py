"""The pool over real sockets: registration, requests, and every way in which a worker can go wrong."""

import asyncio
import os
import pickle
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from gateway.workers import NoWorker, WorkerBusy, WorkerGone, WorkerPool, WorkerState
from tests.support.workers import (
    FILES,
    FakeWorker,
    RecordingSink,
    capacity,
    card,
    finished,
    open_pool,
    pool_config,
    request,
    until,
)
from wire.codec import encode
from wire.endpoints import EndpointError
from wire.host import pid_namespace
from wire.messages import (
    AdminQuery,
    AdminReply,
    Cancel,
    Drain,
    Heartbeat,
    KvEvent,
    KvEventKind,
    KvEvents,
    Leaving,
    ModelCard,
    NeedTokenizer,
    Refused,
    Run,
    Sampling,
    TokenizerBundle,
    Welcome,
    WireFinishReason,
)
from wire.run_dir import RunDirError

Dial = Callable[..., FakeWorker]
Sleeper = subprocess.Popen[bytes]
PROMPT = np.array([1, 2, 3], np.int32)


def open_one(pool: WorkerPool, model: str = "tiny") -> tuple[int, RecordingSink]:
    sink = RecordingSink()
    return pool.open(pool.choose(model, PROMPT, ""), request(), sink), sink


def stop_the_loop(for_s: float) -> None:
    """Block as a long callback does."""
    time.sleep(for_s)


# ---------------------------------------------------------------- the plain way


async def test_a_worker_registers_hands_over_its_tokenizer_and_is_ready(tmp_path: Path) -> None:
    seen: list[tuple[ModelCard, dict[str, bytes]]] = []
    changes: list[int] = []
    pool = WorkerPool(pool_config(tmp_path), on_model=lambda *model: seen.append(model))
    pool.on_change(lambda: changes.append(len(pool.cards())))
    await pool.start()
    worker = FakeWorker(pool.bound_endpoints[0])
    await worker.send(worker.register)
    welcome = await worker.expect(Welcome)
    assert welcome == Welcome(gateway_id=pool.gateway_id, epoch=worker.epoch)
    assert await worker.expect(NeedTokenizer) == NeedTokenizer(epoch=worker.epoch, digest=card().tokenizer_digest)
    assert pool.cards() == {}
    await worker.send(TokenizerBundle(epoch=worker.epoch, digest=card().tokenizer_digest, files=FILES))
    await until(pool.cards)
    assert (seen, changes, pool.cards()) == ([(card(), FILES)], [1], {"tiny": card()})
    worker.close()
    await pool.close()


async def test_a_request_goes_out_and_its_tokens_come_back(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    sink = RecordingSink()
    asked = request("r1", prompt=(7, 8, 9), seed=5, max_tokens=2)
    handle = pool.open(pool.choose("tiny", PROMPT, ""), asked, sink)
    assert await worker.expect(Run) == Run(
        handle=handle,
        request_id="r1",
        prompt_ids=np.array([7, 8, 9], "<i4").tobytes(),
        sampling=Sampling(temperature=0.0, max_tokens=2, seed=5),
    )
    assert [view.in_flight for view in pool.workers()] == [1]
    await worker.step([(handle, 41)], started=(handle,))
    await worker.step([(handle, 42)], finished=(finished(handle, 2),))
    assert await sink.end() == ("finished", finished(handle, 2))
    assert sink.calls[:-1] == [("started",), ("tokens", 41), ("tokens", 42)]
    assert [view.in_flight for view in pool.workers()] == [0]


async def test_what_arrives_while_we_send_is_read_without_waiting_for_a_tick(tmp_path: Path) -> None:
    async with open_pool(tmp_path, "w0", tick_s=60.0) as (pool, (worker,)):
        handle, sink = open_one(pool)
        await worker.expect(Run)
        await worker.step([(handle, 1)], finished=(finished(handle, 1),))
        stop_the_loop(0.1)  # it has arrived; the next send takes the socket's news, and with it the descriptor's signal
        open_one(pool)
        await sink.end()


async def test_cancels_of_one_turn_travel_in_one_message(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    opened = [open_one(pool) for _ in range(3)]
    for _ in opened:
        await worker.expect(Run)
    handles = [handle for handle, _ in opened]
    for handle in (*handles, handles[0], 999):
        pool.cancel(handle)
    assert await worker.expect(Cancel) == Cancel(handles=tuple(handles))
    await worker.step(
        [(handles[0], 1)],
        finished=tuple(finished(each, 1, reason=WireFinishReason.CANCELLED) for each in handles),
    )
    for _, sink in opened:
        assert (await sink.end())[0] == "finished"
        assert sink.tokens == []
    assert pool.num_outputs == 0


async def test_heartbeats_update_the_view_over_any_connection(pool: WorkerPool, dial: Dial) -> None:
    worker, heart = dial(), dial()
    await worker.join(pool)
    beat = Heartbeat(
        epoch=worker.epoch,
        num_steps=9,
        has_work=True,
        num_running=2,
        num_waiting=1,
        num_free_blocks=5,
        is_draining=True,
    )
    await heart.send(beat)
    await until(lambda: pool.workers()[0].num_steps == 9)
    (view,) = pool.workers()
    assert (view.num_running, view.num_waiting, view.num_free_blocks) == (2, 1, 5)
    assert view.state is WorkerState.DRAINING
    assert view.heartbeat_age_s < 1.0
    with pytest.raises(NoWorker):
        pool.choose("tiny", PROMPT, "")


async def test_requests_follow_the_cached_prefix(pool: WorkerPool, dial: Dial) -> None:
    first, second = dial("w1"), dial("w2")
    await first.join(pool)
    await second.join(pool)
    prompt = np.arange(9, dtype=np.int32)
    event = KvEvent(kind=KvEventKind.STORED, block_hash=b"a", token_ids=prompt[:4].tobytes())
    await second.send(KvEvents(epoch=second.epoch, events=(event,)))
    await until(lambda: pool.stats.kv_events)
    assert {pool.choose("tiny", prompt, "").worker_id for _ in range(4)} == {"w2"}
    assert {pool.choose("tiny", prompt, "salt").worker_id for _ in range(4)} == {"w1", "w2"}
    await second.send(Leaving(epoch=second.epoch))
    await until(lambda: len(pool.workers()) == 1)
    assert pool.choose("tiny", prompt, "").worker_id == "w1"


async def test_models_are_routed_by_name(pool: WorkerPool, dial: Dial) -> None:
    tiny, other = dial("w1"), dial("w2", card=card(name="other", fingerprint="f9"))
    await tiny.join(pool)
    await other.join(pool)
    assert set(pool.cards()) == {"tiny", "other"}
    assert [pool.choose(name, PROMPT, "").worker_id for name in ("tiny", "other")] == ["w1", "w2"]
    with pytest.raises(NoWorker, match="'none'"):
        pool.choose("none", PROMPT, "")


async def test_admin_questions_are_answered_by_those_who_can(pool: WorkerPool, dial: Dial) -> None:
    quick, silent = dial("w1"), dial("w2")
    await quick.join(pool)
    await silent.join(pool)
    asked = asyncio.create_task(pool.query(audit=True, flush=False, timeout_s=0.3))
    query = await quick.expect(AdminQuery)
    assert (query.audit, query.flush_prefix_cache) == (True, False)
    reply = AdminReply(epoch=quick.epoch, query_id=query.query_id, num_blocks=64, violations=("v",))
    await quick.send(AdminReply(epoch=quick.epoch, query_id=query.query_id + 1))  # somebody else's question
    await quick.send(reply)
    assert await asked == [("w1", reply)]
    assert await pool.query(audit=True, flush=False, timeout_s=0.05, model="none") == []


async def test_a_worker_can_be_asked_to_drain(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    pool.drain("w0", grace_s=3.0)
    assert await worker.expect(Drain) == Drain(grace_s=3.0)
    assert pool.cards() == {}
    with pytest.raises(WorkerGone):
        pool.drain("nobody", grace_s=1.0)


# ---------------------------------------------------------------- ends


async def test_closing_the_pool_ends_every_stream(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    _, sink = open_one(pool)
    await pool.close()
    await pool.close()
    assert sink.calls == [("lost", "DRAINING")]


async def test_a_closed_pool_takes_nothing(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    view = pool.choose("tiny", PROMPT, "")
    handle, _ = open_one(pool)
    pool.cancel(handle)
    await pool.close()
    with pytest.raises(WorkerGone):
        pool.open(view, request(), RecordingSink())
    with pytest.raises(NoWorker):
        pool.choose("tiny", PROMPT, "")
    assert await pool.query(audit=True, flush=False, timeout_s=1.0) == []


async def test_a_worker_that_leaves_takes_its_streams_along(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    _, sink = open_one(pool)
    await worker.send(Leaving(epoch=worker.epoch, reason="STOPPED"))
    assert await sink.end() == ("lost", "DRAINING")
    assert pool.workers() == ()


async def test_a_killed_process_is_noticed_at_once(pool: WorkerPool, dial: Dial, sleeper: Sleeper) -> None:
    worker = dial(pid=sleeper.pid, pid_namespace=pid_namespace())
    await worker.join(pool)
    _, sink = open_one(pool)
    sleeper.kill()
    assert await sink.end(timeout_s=1.0) == ("lost", "WORKER_LOST")


async def test_an_id_whose_process_lives_is_not_taken_over(pool: WorkerPool, dial: Dial, sleeper: Sleeper) -> None:
    former = dial(pid=sleeper.pid, pid_namespace=pid_namespace())
    await former.join(pool)
    twin = dial()
    await twin.send(twin.register)
    assert "in use by the running process" in (await twin.expect(Refused)).reason
    assert [view.epoch for view in pool.workers()] == [former.epoch]


async def test_a_restarted_worker_is_taken_at_once(pool: WorkerPool, dial: Dial, sleeper: Sleeper) -> None:
    await dial(pid=sleeper.pid, pid_namespace=pid_namespace()).join(pool)
    _, sink = open_one(pool)
    twin = dial()
    sleeper.kill()
    sleeper.wait()  # the pool has no turn of the loop between the end of the process and the registration
    await twin.send(twin.register)
    assert await twin.expect(Welcome) == Welcome(gateway_id=pool.gateway_id, epoch=twin.epoch)
    assert sink.calls == [("lost", "WORKER_LOST")]


async def test_a_silent_worker_is_given_up_and_told_when_it_speaks_again(tmp_path: Path) -> None:
    async with open_pool(tmp_path, "w0", heartbeat_timeout_s=0.3) as (pool, (worker,)):
        handle, sink = open_one(pool)
        await worker.expect(Run)
        assert await sink.end(timeout_s=2.0) == ("lost", "WORKER_LOST")
        await worker.step([(handle, 1)])
        await worker.send(Heartbeat(epoch=worker.epoch, num_steps=1, has_work=True))
        assert (await worker.expect(Refused)).epoch == worker.epoch
        await worker.send(worker.register)
        assert (await worker.expect(Refused)).epoch == worker.epoch
        assert (sink.calls, pool.stats.stale_messages) == ([("lost", "WORKER_LOST")], 2)


async def test_a_stalled_worker_is_given_up_though_it_beats(tmp_path: Path) -> None:
    async with open_pool(tmp_path, "w0", stall_timeout_s=0.3) as (pool, (worker,)):
        _, sink = open_one(pool)
        while not sink.done.is_set():
            await worker.send(Heartbeat(epoch=worker.epoch, num_steps=0, has_work=True))
            await asyncio.sleep(0.05)
        assert sink.calls == [("lost", "WORKER_STALLED")]


async def test_a_gap_in_the_numbers_recycles_the_worker(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    handle, sink = open_one(pool)
    await worker.step([(handle, 1)])
    worker.seq += 1
    await worker.step([(handle, 3)])
    assert await sink.end() == ("lost", "WORKER_LOST")
    assert sink.tokens == [1]
    assert pool.stats.sequence_gaps == 1


async def test_a_closed_connection_is_noticed_by_the_next_send(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    view = pool.choose("tiny", PROMPT, "")
    worker.close()
    await asyncio.sleep(0.1)
    with pytest.raises(WorkerGone):
        pool.open(view, request(), RecordingSink())
    with pytest.raises(WorkerGone):
        pool.open(view, request(), RecordingSink())
    assert (pool.workers(), pool.num_outputs) == ((), 0)


async def test_a_view_of_a_former_life_is_not_served(pool: WorkerPool, dial: Dial) -> None:
    first = dial()
    await first.join(pool)
    view = pool.choose("tiny", PROMPT, "")
    _, sink = open_one(pool)
    await dial().join(pool)
    assert sink.calls == [("lost", "WORKER_LOST")]
    with pytest.raises(WorkerGone):
        pool.open(view, request(), RecordingSink())


# ---------------------------------------------------------------- limits


async def test_a_full_worker_refuses(pool: WorkerPool, dial: Dial) -> None:
    worker = dial(capacity=capacity(max_num_seqs=2, max_waiting=1))
    await worker.join(pool)
    for _ in range(3):
        open_one(pool)
    with pytest.raises(WorkerBusy, match="3 requests"):
        open_one(pool)
    assert pool.num_outputs == 3


async def test_a_worker_that_reads_nothing_fills_its_queue_and_blocks_nobody(pool: WorkerPool, dial: Dial) -> None:
    stuck = dial("stuck", capacity=capacity(max_num_seqs=1_000_000))
    other = dial("other", card=card(name="other", fingerprint="f9"))
    await stuck.join(pool)
    await other.join(pool)
    view = pool.choose("tiny", PROMPT, "")
    asked = request(prompt=tuple(range(5_000)))
    loop = asyncio.get_running_loop()
    waits_s: list[float] = []
    while pool.stats.busy_sends == 0 and len(waits_s) < 20_000:
        started_s = loop.time()
        with suppress(WorkerBusy):
            pool.open(view, asked, RecordingSink())
        waits_s.append(loop.time() - started_s)
    assert len(waits_s) > 1_000
    assert sorted(waits_s)[len(waits_s) // 2] < 0.01  # the median: this machine may take the processor away
    with pytest.raises(WorkerBusy, match="queue towards it is full"):
        pool.open(view, asked, RecordingSink())
    handle, sink = open_one(pool, "other")
    await other.expect(Run)
    await other.step(finished=(finished(handle),))
    assert (await sink.end())[0] == "finished"


# ---------------------------------------------------------------- lies and garbage


async def test_a_lie_costs_its_victim_and_the_worker_is_told_to_stop_it(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    (victim, victim_sink), (bystander, bystander_sink) = open_one(pool), open_one(pool)
    for _ in range(2):
        await worker.expect(Run)
    await worker.step([(victim, 5_000), (bystander, 7), (77, 1)])
    assert await victim_sink.end() == ("lost", "INTERNAL")
    assert await worker.expect(Cancel) == Cancel(handles=(victim,))
    await worker.step(finished=(finished(bystander, 1), finished(bystander, 1), finished(victim)))
    assert await bystander_sink.end() == ("finished", finished(bystander, 1))
    await until(lambda: pool.stats.late_outputs == 1)
    assert dict(pool.stats.protocol_errors) == {"token_out_of_range": 1, "unknown_handle": 1, "after_end": 1}
    assert [view.in_flight for view in pool.workers()] == [0]


async def test_another_worker_cannot_speak_for_ours(pool: WorkerPool, dial: Dial) -> None:
    ours, rogue = dial("w0"), dial("w1")
    await ours.join(pool)
    handle, sink = open_one(pool)
    await rogue.join(pool)
    await rogue.step([(handle, 1)])
    await until(lambda: pool.stats.protocol_errors["foreign_handle"] == 1)
    rogue.epoch, rogue.seq = ours.epoch, 0
    await rogue.step([(handle, 2)])
    await ours.step([(handle, 3)], finished=(finished(handle, 1),))
    await sink.end()
    await until(lambda: pool.stats.stale_messages == 1)
    assert sink.tokens == [3]
    assert dict(pool.stats.protocol_errors) == {"foreign_handle": 1}


async def test_a_bad_bundle_is_counted_and_asked_for_again(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.send(worker.register)
    await worker.expect(Welcome)
    await worker.expect(NeedTokenizer)
    digest = card().tokenizer_digest
    for files in ({"tokenizer.json": b"other"}, {"../../etc/passwd": b"{}"}, {}):
        await worker.send(TokenizerBundle(epoch=worker.epoch, digest=digest, files=files))
    await until(lambda: pool.stats.protocol_errors["bundle"] == 3)
    assert pool.cards() == {}
    await worker.send(worker.register)
    await worker.expect(Welcome)
    await worker.expect(NeedTokenizer)


async def test_ten_thousand_garbage_frames_leave_it_serving(pool: WorkerPool, dial: Dial, tmp_path: Path) -> None:
    worker, hostile = dial(), dial("hostile")
    await worker.join(pool)
    handle, sink = open_one(pool)
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(canary), "w")

    proper = encode(Heartbeat(epoch="x" * 32, num_steps=1, has_work=False))
    rng = np.random.default_rng(0)
    for number in range(2_000):
        await hostile.send_frames(rng.bytes(number % 64))
        await hostile.send_frames(b"\x01" + rng.bytes(number % 64))
        await hostile.send_frames(pickle.dumps(Bomb()))
        await hostile.send_frames(proper[: number % len(proper)])
        await hostile.send_frames(proper, b"", b"and more")
    await until(lambda: pool.stats.undecodable_frames == 10_000, timeout_s=20.0)
    assert not canary.exists()
    await worker.step([(handle, 1)], finished=(finished(handle, 1),))
    assert await sink.end() == ("finished", finished(handle, 1))
    assert dict(pool.stats.protocol_errors) == {}


# ---------------------------------------------------------------- sockets and folders


async def test_an_open_run_directory_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(RunDirError, match="chmod 700"):
        await WorkerPool(pool_config(tmp_path)).start()


async def test_a_second_gateway_on_the_same_socket_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="in use"):
        await WorkerPool(pool_config(tmp_path)).start()
    assert pool.bound_endpoints


async def test_tcp_beyond_loopback_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="CURVE"):
        await WorkerPool(pool_config(tmp_path, endpoints=("tcp://0.0.0.0:0",))).start()


async def test_a_socket_that_vanished_is_bound_again_and_running_streams_do_not_notice(
    pool: WorkerPool, dial: Dial
) -> None:
    worker = dial()
    await worker.join(pool)
    handle, sink = open_one(pool)
    os.unlink(pool.bound_endpoints[0].removeprefix("ipc://"))
    await until(lambda: pool.stats.rebinds == 1)
    await dial("w1").join(pool)
    await worker.step([(handle, 1)], finished=(finished(handle, 1),))
    assert (await sink.end())[0] == "finished"
    assert len(pool.workers()) == 2


async def test_closing_removes_the_socket(pool: WorkerPool, tmp_path: Path) -> None:
    assert os.listdir(tmp_path / "run") == ["gateway-0.sock"]
    await pool.close()
    assert os.listdir(tmp_path / "run") == []
