"""Workers that end, fall silent, stall or come back, over real sockets: what their streams see."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from octavo.gateway.workers.errors import NoWorker, WorkerGone
from octavo.gateway.workers.pool import WorkerPool
from octavo.wire.codec import encode
from octavo.wire.host import pid_namespace
from octavo.wire.messages import Heartbeat, Leaving, Refused, Run, Welcome
from tests.support.gateway.workers import PROMPT, Dial, RecordingSink, open_one, open_pool, request, submit
from tests.support.waiting import until

Sleeper = subprocess.Popen[bytes]


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
        submit(pool, view, request(), RecordingSink())
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
    second = dial()
    await second.send(second.register)
    assert "in use by the running process" in (await second.expect(Refused)).reason
    assert [view.epoch for view in pool.workers()] == [former.epoch]


async def test_a_restarted_worker_is_taken_at_once(pool: WorkerPool, dial: Dial, sleeper: Sleeper) -> None:
    await dial(pid=sleeper.pid, pid_namespace=pid_namespace()).join(pool)
    _, sink = open_one(pool)
    second = dial()
    sleeper.kill()
    sleeper.wait()  # the pool has no turn of the loop between the end of the process and the registration
    await second.send(second.register)
    assert await second.expect(Welcome) == Welcome(gateway_id=pool.gateway_id, epoch=second.epoch)
    assert sink.calls == [("lost", "WORKER_LOST")]


async def test_a_registration_that_waits_when_the_end_of_its_former_life_is_noticed_is_taken(
    pool: WorkerPool, dial: Dial, sleeper: Sleeper
) -> None:
    former, second = dial(pid=sleeper.pid, pid_namespace=pid_namespace()), dial()
    await former.join(pool)
    await second.send(Heartbeat(epoch=second.epoch, num_steps=0, has_work=False))
    await until(lambda: pool.stats.stale_messages == 1)  # it is connected
    sleeper.kill()
    sleeper.wait()
    second.socket.send(encode(second.register))
    assert pool._link._sockets[0]._socket.poll(30_000)  # no turn of the loop: it waits there when the end is seen
    (record,) = pool._registry
    pool._executor.watch.check(record.incarnation)
    assert await second.expect(Welcome) == Welcome(gateway_id=pool.gateway_id, epoch=second.epoch)
    assert [view.epoch for view in pool.workers()] == [second.epoch]


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
        submit(pool, view, request(), RecordingSink())
    with pytest.raises(WorkerGone):
        submit(pool, view, request(), RecordingSink())
    assert (pool.workers(), pool.num_outputs) == ((), 0)


async def test_a_view_of_a_former_life_is_not_served(pool: WorkerPool, dial: Dial) -> None:
    first = dial()
    await first.join(pool)
    view = pool.choose("tiny", PROMPT, "")
    _, sink = open_one(pool)
    await dial().join(pool)
    assert sink.calls == [("lost", "WORKER_LOST")]
    with pytest.raises(WorkerGone):
        submit(pool, view, request(), RecordingSink())
