"""The pool over real sockets: registration, requests, routes, and what is too much for a worker."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from octavo.gateway.workers.errors import NoWorker, WorkerBusy, WorkerGone
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import WorkerState
from octavo.wire.messages import (
    AdminQuery,
    AdminReply,
    Cancel,
    Drain,
    Heartbeat,
    HostBlocks,
    KvEvent,
    KvEventKind,
    KvEvents,
    Leaving,
    ModelCard,
    NeedTokenizer,
    Run,
    SamplingParams,
    TokenizerBundle,
    Welcome,
    WireFinishReason,
)
from tests.support.gateway.workers import (
    FILES,
    PROMPT,
    Dial,
    FakeWorker,
    RecordingSink,
    capacity,
    card,
    finished,
    open_one,
    open_pool,
    pool_config,
    request,
    submit,
)
from tests.support.waiting import until


def stop_the_loop(for_s: float) -> None:
    """Block as a long callback does."""
    time.sleep(for_s)


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
    handle = submit(pool, pool.choose("tiny", PROMPT, ""), asked, sink)
    assert await worker.expect(Run) == Run(
        handle=handle,
        request_id="r1",
        prompt_ids=np.array([7, 8, 9], "<i4").tobytes(),
        sampling=SamplingParams(temperature=0.0, max_tokens=2, seed=5),
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
    worker, heart, told = dial(), dial(), list[bool]()
    await worker.join(pool)
    pool.on_change(lambda: told.append(bool(pool.cards())))
    beat = Heartbeat(
        epoch=worker.epoch,
        num_steps=9,
        has_work=True,
        num_running=2,
        num_waiting=1,
        num_free_blocks=5,
        is_draining=True,
    )
    sent_s = time.monotonic()
    await heart.send(beat)
    await until(lambda: pool.workers()[0].num_steps == 9)
    (view,), seen_s = pool.workers(), time.monotonic()
    assert (view.num_running, view.num_waiting, view.num_free_blocks) == (2, 1, 5)
    assert (view.state, told) == (WorkerState.DRAINING, [False])  # nobody can be served, which health says
    assert 0 <= view.heartbeat_age_s <= seen_s - sent_s
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
    await quick.send(AdminReply(epoch=quick.epoch, query_id=query.query_id + 1))  # another's question
    await quick.send(reply)
    assert await asked == [("w1", reply)]
    assert await pool.query(audit=True, flush=False, timeout_s=0.05, model="none") == []


@pytest.mark.parametrize(
    ("host", "is_believed"),
    [
        (HostBlocks(num_blocks=5, num_free=3, num_swapped=2, blocks_per_cell=2, cells=bytes([1, 4, 3])), True),
        (HostBlocks(num_blocks=5, num_free=6, blocks_per_cell=2, cells=bytes([1, 1, 1])), False),
        (HostBlocks(num_blocks=5, num_cached=-1, blocks_per_cell=2, cells=bytes([1, 1, 1])), False),
        (HostBlocks(num_blocks=5, blocks_per_cell=1, cells=bytes([1] * 5)), False),  # more cells than asked for
        (HostBlocks(num_blocks=5, blocks_per_cell=2, cells=bytes([1, 1])), False),
        (HostBlocks(num_blocks=5, blocks_per_cell=2, cells=bytes([1, 5, 1])), False),
        (HostBlocks(num_blocks=-5, blocks_per_cell=2, cells=bytes([1, 1, 1])), False),
        (HostBlocks(num_blocks=2**40, blocks_per_cell=2**39, cells=bytes([1, 1])), False),
        (HostBlocks(num_blocks=0), False),
    ],
)
async def test_a_second_tier_is_told_of_where_it_can_be_true(
    pool: WorkerPool, dial: Dial, host: HostBlocks, is_believed: bool
) -> None:
    worker = dial("w1")
    await worker.join(pool)
    asked = asyncio.create_task(pool.query_details(max_cells=3, max_outputs=0, timeout_s=5.0))
    query = await worker.expect(AdminQuery)
    await worker.send(AdminReply(epoch=worker.epoch, query_id=query.query_id, host=host))
    (details,) = await asked
    assert details.host == (host if is_believed else None)


async def test_a_worker_can_be_asked_to_drain(pool: WorkerPool, dial: Dial) -> None:
    worker = dial()
    await worker.join(pool)
    pool.drain("w0", grace_s=3.0)
    assert await worker.expect(Drain) == Drain(grace_s=3.0)
    assert pool.cards() == {}
    with pytest.raises(WorkerGone):
        pool.drain("nobody", grace_s=1.0)


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
    refusals: list[WorkerBusy] = []  # one: what was in the queue moves on into the sockets, so the next may find room
    while not refusals and len(waits_s) < 20_000:
        started_s = loop.time()
        try:
            submit(pool, view, asked, RecordingSink())
        except WorkerBusy as error:
            refusals.append(error)
        waits_s.append(loop.time() - started_s)
    assert ["queue towards it is full" in str(error) for error in refusals] == [True]
    assert pool.stats.busy_sends == 1
    assert len(waits_s) > 1_000
    assert sorted(waits_s)[len(waits_s) // 2] < 0.01  # the median: this machine may take the processor away
    handle, sink = open_one(pool, "other")
    await other.expect(Run)
    await other.step(finished=(finished(handle),))
    assert (await sink.end())[0] == "finished"
