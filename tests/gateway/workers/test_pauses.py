"""Outputs whose readers are behind: who is told, what moves with them, and that waiting for a reader is no stall."""

from pathlib import Path

from octavo.gateway.workers.decisions import Peer
from octavo.gateway.workers.registry import WorkerRecord
from octavo.gateway.workers.views import WorkerState
from octavo.wire.messages import Cancel, Heartbeat, Pause, Resume, Run, WireFinishReason
from tests.support.gateway.workers import (
    FakeWorker,
    RecordingSink,
    finished,
    open_pool,
    register,
    request,
    submit,
)
from tests.support.waiting import until

EPOCH = "e" * 32


async def test_pauses_and_resumes_of_one_turn_go_in_one_message_each_and_the_last_wish_counts(tmp_path: Path) -> None:
    async with open_pool(tmp_path, "w0") as (pool, (worker,)):
        (view,) = pool.workers()
        names = [submit(pool, view, request(f"r{n}"), RecordingSink()) for n in range(3)]
        for _ in names:
            await worker.expect(Run)
        for name in names:
            pool.pause(name)
            pool.pause(name)
        pool.resume(names[2])
        pool.resume(12345)
        assert await worker.expect(Pause) == Pause(handles=(names[0], names[1]))
        assert await worker.expect(Resume) == Resume(handles=(names[2],))
        pool.resume(names[0])
        pool.resume(names[0])
        assert await worker.expect(Resume) == Resume(handles=(names[0],))
        assert await worker.hears_nothing()
        assert pool.stats.pauses == 3


async def test_an_output_that_has_ended_is_paused_no_more(tmp_path: Path) -> None:
    async with open_pool(tmp_path, "w0") as (pool, (worker,)):
        (view,) = pool.workers()
        sink = RecordingSink()
        name = submit(pool, view, request(), sink)
        run = await worker.expect(Run)
        pool.pause(name)
        await worker.expect(Pause)
        await worker.step([], finished=(finished(run.handle),))
        await sink.end()
        pool.resume(name)
        pool.pause(name)
        assert await worker.hears_nothing()


async def test_a_cancel_of_a_paused_output_is_all_that_its_worker_hears(tmp_path: Path) -> None:
    async with open_pool(tmp_path, "w0") as (pool, (worker,)):
        (view,) = pool.workers()
        name = submit(pool, view, request(), RecordingSink())
        await worker.expect(Run)
        pool.pause(name)
        await worker.expect(Pause)
        pool.cancel(name)
        pool.resume(name)
        assert await worker.expect(Cancel) == Cancel(handles=(name,))
        assert await worker.hears_nothing()


async def begun(worker: FakeWorker, sink: RecordingSink) -> Run:
    run = await worker.expect(Run)
    await worker.step([(run.handle, 10)], started=(run.handle,))
    await until(lambda: sink.tokens == [10])
    return run


async def test_a_pause_goes_with_an_output_that_moves_once_a_token_has_shown_that_it_kills_nobody(
    tmp_path: Path,
) -> None:
    async with open_pool(tmp_path, "w0", "w1", max_migrations=2) as (pool, (first, second)):
        view = next(view for view in pool.workers() if view.epoch == first.epoch)
        sink = RecordingSink()
        name = submit(pool, view, request(), sink)
        await begun(first, sink)
        pool.pause(name)
        await first.expect(Pause)
        first.seq += 5  # a gap: it is given up
        await first.step()
        again = await second.expect(Run)
        assert await second.hears_nothing()
        await second.step([(again.handle, 11)], started=(again.handle,))
        assert await second.expect(Pause) == Pause(handles=(again.handle,))
        pool.resume(name)
        assert await second.expect(Resume) == Resume(handles=(again.handle,))
        await second.step([(again.handle, 12)], finished=(finished(again.handle, 3),))
        await sink.end()
        assert sink.tokens == [10, 11, 12]


async def test_an_output_that_a_draining_worker_puts_out_is_paused_at_its_next_one_at_once(tmp_path: Path) -> None:
    async with open_pool(tmp_path, "w0", "w1", max_migrations=2) as (pool, (first, second)):
        view = next(view for view in pool.workers() if view.epoch == first.epoch)
        sink = RecordingSink()
        name = submit(pool, view, request(), sink)
        run = await begun(first, sink)
        pool.pause(name)
        await first.expect(Pause)
        await first.send(Heartbeat(epoch=first.epoch, num_steps=1, has_work=False, is_draining=True))
        put_out = finished(run.handle, 1, reason=WireFinishReason.ERROR, error="DRAINING")
        await first.step([], finished=(put_out,))
        again = await second.expect(Run)
        assert await second.expect(Pause) == Pause(handles=(again.handle,))


def test_a_worker_that_only_waits_for_readers_makes_no_steps_and_is_not_stalled() -> None:
    record = WorkerRecord.of(
        register(epoch=EPOCH), incarnation=1, peer=Peer(0, b"p"), state=WorkerState.READY, now_s=0.0
    )
    record.in_flight = 2
    record.take_heartbeat(Heartbeat(epoch=EPOCH, num_steps=7, has_work=False, num_paused=2), 10.0)
    record.take_heartbeat(Heartbeat(epoch=EPOCH, num_steps=7, has_work=False, num_paused=2), 50.0)
    assert (record.last_progress_s, record.has_our_work, record.num_requests) == (50.0, False, 2)
    record.take_heartbeat(Heartbeat(epoch=EPOCH, num_steps=7, has_work=False, num_paused=1), 60.0)
    assert (record.last_progress_s, record.has_our_work) == (50.0, True)
