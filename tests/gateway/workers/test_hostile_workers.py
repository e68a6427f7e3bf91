"""Workers that lie, and strangers who send garbage, over real sockets: what it costs whom."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from octavo.gateway.workers.pool import WorkerPool
from octavo.wire.codec import encode
from octavo.wire.messages import AdminReply, Cancel, Heartbeat, NeedTokenizer, Run, TokenizerBundle, Welcome
from tests.support.gateway.workers import Dial, card, finished, open_one
from tests.support.waiting import until


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


@pytest.mark.parametrize("lie", [{"num_free_blocks": -5}, {"num_running": 2**40}, {"num_steps": -1}])
async def test_figures_that_no_answer_could_tell_are_dropped(pool: WorkerPool, dial: Dial, lie: dict[str, int]) -> None:
    worker = dial()
    await worker.join(pool)
    before = pool.workers()[0]
    await worker.send(Heartbeat(epoch=worker.epoch, **({"num_steps": 3, "has_work": False} | lie)))
    await worker.send(AdminReply(epoch=worker.epoch, query_id=1, num_active_blocks=-1))
    await until(lambda: pool.stats.undecodable_frames == 2)
    assert pool.workers()[0].num_steps == before.num_steps
    assert pool.workers()[0].num_free_blocks == before.num_free_blocks


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
