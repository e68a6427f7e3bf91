"""Outputs go on at another worker behind what they have given, and an output that kills workers is found out."""

import asyncio
import os
import subprocess
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.gateway.workers.decisions import Peer
from octavo.gateway.workers.link import PeerFull
from octavo.gateway.workers.migration import Migration
from octavo.gateway.workers.outputs import Output, Outputs, new_output
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.registry import Registry, RegistryLimits, WorkerRecord
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import LostReason, WorkerState
from octavo.wire.host import pid_namespace
from octavo.wire.messages import Cancel, Heartbeat, Leaving, Run, TokenLogprobs, WireFinishReason
from tests.support.gateway.workers import (
    FakeWorker,
    RecordingSink,
    card,
    finished,
    open_pool,
    register,
    request,
    submit,
)
from tests.support.waiting import until

Served = tuple[WorkerPool, list[FakeWorker]]


def served(folder: Path, *names: str, **changes: object) -> AbstractAsyncContextManager[Served]:
    """A pool whose outputs may move."""
    return open_pool(folder, *names, **({"max_migrations": 2, "migration_timeout_s": 5.0} | changes))


def open_on(
    pool: WorkerPool,
    worker: FakeWorker,
    request_id: str = "r",
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    **sampling: object,
) -> RecordingSink:
    """One output on this worker; the sink knows its name."""
    (view,) = (view for view in pool.workers() if view.epoch == worker.epoch)
    sink = RecordingSink()
    sink.name = submit(pool, view, request(request_id, prompt=prompt, **sampling), sink)  # type: ignore[attr-defined]
    return sink


def ids(run: Run) -> list[int]:
    return np.frombuffer(run.prompt_ids, "<i4").tolist()


async def die(pool: WorkerPool, worker: FakeWorker) -> None:
    """As a crash looks: its connection breaks, which the next send or a gap in its numbers shows."""
    worker.seq += 5
    await worker.step()
    await until(lambda: all(view.epoch != worker.epoch for view in pool.workers()))


async def test_an_output_goes_on_behind_what_it_has_given_and_counts_it(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        sink = open_on(pool, first, seed=9)
        run = await first.expect(Run)
        await first.step([(run.handle, 10), (run.handle, 11)], started=(run.handle,))
        await until(lambda: sink.tokens == [10, 11])
        await die(pool, first)
        again = await second.expect(Run)
        assert (ids(again), again.num_resumed_tokens) == ([1, 2, 3, 10, 11], 2)
        assert again.sampling == run.sampling
        assert again.handle != run.handle
        await second.step([(again.handle, 12)], started=(again.handle,), finished=(finished(again.handle, 3),))
        await sink.end()
        assert sink.calls == [
            ("started",), ("tokens", 10), ("tokens", 11), ("moved", "w1"), ("tokens", 12),
            ("finished", finished(again.handle, 3)),
        ]  # fmt: skip
        assert (pool.stats.moved_outputs, pool.num_outputs) == (1, 0)
        assert all(view.in_flight == 0 for view in pool.workers())


async def test_an_output_has_moved_when_it_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new worker's times are counted from there: it may have begun before the gateway goes on."""
    sent_s = list[float]()
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        send = pool._migration._send

        def note(*sent: Any) -> None:
            sent_s.append(time.monotonic())
            send(*sent)

        monkeypatch.setattr(pool._migration, "_send", note)
        sink = open_on(pool, first)
        await first.expect(Run)
        await die(pool, first)
        await second.expect(Run)
    assert sink.moved_s <= sent_s[0]


async def test_it_waits_for_its_own_worker_to_come_back(tmp_path: Path) -> None:
    async with served(tmp_path, "w0") as (pool, workers):
        sink = open_on(pool, workers[0])
        await workers[0].expect(Run)
        await die(pool, workers[0])
        assert (sink.calls, pool.num_outputs) == ([], 1)
        workers.append(FakeWorker(pool.bound_endpoints[0], "w0"))
        await workers[1].join(pool)
        run = await workers[1].expect(Run)
        await workers[1].step([(run.handle, 5)], finished=(finished(run.handle, 1),))
        await sink.end()
        assert sink.tokens == [5]


async def test_another_models_worker_may_be_lost_while_a_place_is_looked_for() -> None:
    registry, outputs, stats, sent = Registry(RegistryLimits()), Outputs(PoolStats()), PoolStats(), list[str]()
    for number, (name, model) in enumerate((("w0", "tiny"), ("w1", "tiny"), ("w2", "other"))):
        theirs = register(name, f"{number}" * 32, card=card(name=model, fingerprint=f"of {model}"))
        registry.on_register(Peer(0, name.encode()), theirs, 0.0)
    lost, spare, other = registry
    lost.state = spare.state = other.state = WorkerState.READY

    def opened(record: WorkerRecord) -> Output:
        run = msgspec.structs.replace(request(), handle=outputs.draw_handles(1)[0])
        outputs.add(output := new_output(run, 0, record, RecordingSink(), 0.0))
        return output

    def notice_more(incarnation: int) -> None:
        migration.lost(last, LostReason.WORKER_LOST, "its process ended")

    output, last = opened(lost), opened(other)
    migration = Migration(
        registry,
        outputs,
        stats,
        send=lambda record, run, output: sent.append(record.worker_id),
        check=notice_more,
        drains=lambda record: None,
        max_moves=2,
        timeout_s=5.0,
    )
    registry.give_up(lost, LostReason.WORKER_LOST, "its process ended")
    migration.lost(output, LostReason.WORKER_LOST, "its process ended")
    migration.place()
    assert (sent, output.incarnation, migration.is_waiting(last)) == (["w1"], spare.incarnation, True)


async def test_without_a_worker_in_time_it_ends_with_the_reason_of_the_loss(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", migration_timeout_s=0.2) as (pool, (worker,)):
        sink = open_on(pool, worker)
        await die(pool, worker)
        assert await sink.end() == ("lost", "WORKER_LOST")
        assert pool.num_outputs == 0


async def test_suspects_take_turns_and_the_one_that_kills_is_not_sent_to_a_third(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1", "w2") as (pool, (first, second, third)):
        sinks = [open_on(pool, first, f"r{n}") for n in range(3)]
        runs = [await first.expect(Run) for _ in sinks]
        second_view, third_view = (view for view in pool.workers() if view.worker_id != "w0")
        await die(pool, first)
        poison, innocent = await second.expect(Run), await third.expect(Run)
        assert (poison.request_id, innocent.request_id) == ("r0", "r1")
        assert await second.hears_nothing()
        await third.step([(innocent.handle, 7)])
        waiting = await third.expect(Run)
        assert waiting.request_id == "r2"
        await die(pool, second)
        assert await sinks[0].end() == ("lost", "WORKER_LOST")
        await third.step([(waiting.handle, 8)])
        await until(lambda: [sink.tokens for sink in sinks] == [[], [7], [8]])
        assert [sink.ends for sink in sinks[1:]] == [[], []]
        assert (len(runs), second_view.worker_id, third_view.worker_id) == (3, "w1", "w2")


async def test_what_was_lost_twice_may_be_tried_once_more_alone_and_is_poison_after_that(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1", "w2", "w3") as (pool, (first, second, third, fourth)):
        sink = open_on(pool, first, prompt=(6, 6, 6))
        await first.expect(Run)
        await die(pool, first)
        await second.expect(Run)
        await die(pool, second)
        assert await sink.end() == ("lost", "WORKER_LOST")
        other = open_on(pool, fourth, "other", prompt=(6, 6, 7))
        again = open_on(pool, fourth, "again", prompt=(6, 6, 6))
        assert (await fourth.expect(Run)).request_id == "other"
        assert (await third.expect(Run)).request_id == "again"  # on probation: where others are not
        assert pool.choose("tiny", np.asarray([6, 6, 6], np.int32), "").epoch == fourth.epoch
        await die(pool, third)
        assert await again.end() == ("lost", "POISONED")
        assert await fourth.hears_nothing()
        assert other.ends == []


async def test_what_was_lost_twice_by_chance_is_served_when_it_is_tried_again(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1", "w2") as (pool, (first, second, third)):
        sink = open_on(pool, first)
        await first.expect(Run)
        await die(pool, first)
        await second.expect(Run)
        await die(pool, second)
        assert await sink.end() == ("lost", "WORKER_LOST")
        for n in range(2):  # its own token clears it
            again = open_on(pool, third, f"again {n}")
            run = await third.expect(Run)
            await third.step([(run.handle, 5)], finished=(finished(run.handle, 1),))
            assert (await again.end())[0] == "finished"
            assert again.tokens == [5]
            assert [call[0] for call in again.calls].count("moved") == 1 - n
        assert (pool.num_outputs, [view.in_flight for view in pool.workers()]) == (0, [0])


async def test_a_stream_that_was_well_before_survives_two_workers_that_die_one_after_the_other(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1", "w2", "w3") as (pool, (first, second, third, fourth)):
        sink = open_on(pool, first)
        run = await first.expect(Run)
        await first.step([(run.handle, 10)])
        await until(lambda: sink.tokens == [10])
        await die(pool, first)
        await second.expect(Run)
        await die(pool, second)
        again = await third.expect(Run)
        assert (ids(again), sink.ends) == ([1, 2, 3, 10], [])
        await die(pool, third)
        assert await sink.end() == ("lost", "POISONED")
        assert await fourth.hears_nothing()


async def test_a_worker_that_died_together_with_the_first_accuses_nobody(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]"
) -> None:
    """The loop hears of the second death only after the first one's outputs have looked for places."""
    async with served(tmp_path, "w0") as (pool, workers):
        workers.append(FakeWorker(pool.bound_endpoints[0], "w1", pid=sleeper.pid, pid_namespace=pid_namespace()))
        await workers[1].join(pool)
        sinks = [open_on(pool, workers[0], f"r{n}") for n in range(3)]
        for _ in sinks:
            await workers[0].expect(Run)
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  (the loop must not have a turn)
        (first,) = (record for record in pool._registry if record.worker_id == "w0")
        pool._executor.carry_out(pool._registry.give_up(first, LostReason.WORKER_LOST, "killed"))
        pool._migration.place()
        await until(lambda: not pool.workers())
        assert [sink.ends for sink in sinks] == [[], [], []]
        workers.append(FakeWorker(pool.bound_endpoints[0], "w2"))
        await workers[2].join(pool)
        for n in range(3):
            run = await workers[2].expect(Run)
            assert run.request_id == f"r{n}"
            await workers[2].step([(run.handle, 5)], finished=(finished(run.handle, 1),))
        assert [(await sink.end())[0] for sink in sinks] == ["finished"] * 3


async def test_a_worker_that_drains_blames_nobody_and_its_outputs_move_together(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        sinks = [open_on(pool, first, f"r{n}") for n in range(3)]
        runs = [await first.expect(Run) for _ in sinks]
        ended = finished(runs[0].handle, reason=WireFinishReason.ERROR, error="DRAINING", detail="its grace is over")
        await first.step(finished=(ended,))
        assert (await second.expect(Run)).request_id == "r0"
        await first.send(Leaving(epoch=first.epoch, reason="DRAINED"))
        assert {(await second.expect(Run)).request_id for _ in range(2)} == {"r1", "r2"}
        assert [sink.ends for sink in sinks] == [[], [], []]


async def test_a_worker_that_turned_an_output_away_because_it_drains_is_not_asked_again(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        for n in range(3):
            open_on(pool, second, f"other{n}")
            await second.expect(Run)
        sink = open_on(pool, first)
        run = await first.expect(Run)
        refused = finished(run.handle, reason=WireFinishReason.ERROR, error="DRAINING")
        await first.step(finished=(refused,))  # before any heartbeat says so, and with less to do than the other
        assert (await second.expect(Run)).request_id == "r"
        assert (await first.hears_nothing(), sink.ends) == (True, [])


async def test_what_the_only_worker_turns_away_waits_for_the_next_one(tmp_path: Path) -> None:
    async with served(tmp_path, "w0") as (pool, workers):
        sink = open_on(pool, workers[0])
        run = await workers[0].expect(Run)
        await workers[0].step(finished=(finished(run.handle, reason=WireFinishReason.ERROR, error="DRAINING"),))
        await until(lambda: not pool.cards())
        await workers[0].send(Leaving(epoch=workers[0].epoch))
        workers.append(FakeWorker(pool.bound_endpoints[0], "w0"))
        await workers[1].join(pool)
        assert ((await workers[1].expect(Run)).request_id, sink.ends) == ("r", [])


async def test_a_full_worker_is_asked_again_later(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        sink = open_on(pool, first)
        await first.expect(Run)
        await first.send(Leaving(epoch=first.epoch))
        run = await second.expect(Run)
        refused = finished(run.handle, reason=WireFinishReason.ERROR, error="QUEUE_FULL", detail="full")
        await second.step(finished=(refused,))
        assert await second.hears_nothing()  # or its moves would be spent before a place is free
        await second.send(Heartbeat(epoch=second.epoch, num_steps=2, has_work=True, num_running=8, num_waiting=8))
        assert await second.hears_nothing()
        await second.send(Heartbeat(epoch=second.epoch, num_steps=3, has_work=True, num_running=8, num_waiting=7))
        again = await second.expect(Run)
        assert (again.request_id, sink.ends) == ("r", [])


async def test_new_requests_stay_away_from_a_worker_that_may_be_killed_while_there_is_another(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1", "w2") as (pool, (first, second, third)):
        open_on(pool, first)
        await first.expect(Run)
        await die(pool, first)
        run = await second.expect(Run)
        tried = {pool.choose("tiny", np.asarray([n, n + 1], np.int32), "").epoch for n in range(20)}
        assert tried == {third.epoch}
        open_on(pool, third, "other")
        await second.step([(run.handle, 10)])
        await until(lambda: pool.choose("tiny", np.asarray([1, 2], np.int32), "").epoch == second.epoch)


async def test_a_suspect_that_is_turned_away_is_still_one(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1", "w2") as (pool, (first, second, third)):
        sink = open_on(pool, first)
        await first.expect(Run)
        await die(pool, first)
        run = await second.expect(Run)
        await second.send(Leaving(epoch=second.epoch))
        assert (await third.expect(Run)).request_id == run.request_id
        await die(pool, third)
        assert await sink.end() == ("lost", "WORKER_LOST")


async def test_a_suspect_with_which_its_worker_broke_the_protocol_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        broken, next_one = open_on(pool, first, "broken"), open_on(pool, first, "next")
        await die(pool, first)
        run = await second.expect(Run)
        await second.step([(run.handle, -1)])
        assert await broken.end() == ("lost", "INTERNAL")
        again = await second.expect(Run)
        assert again.request_id == "next"
        assert (await second.expect(Cancel)).handles == (run.handle,)
        await second.step([(again.handle, 7)], finished=(finished(again.handle, 1),))
        await next_one.end()
        assert (next_one.tokens, pool.num_outputs, pool._migration.on_probation) == ([7], 0, {})


class ScoredSink(RecordingSink):
    """Takes the prompt's log-probabilities too."""

    def on_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        self.calls.append(("scores", *[each.logprob for each in logprobs]))


@pytest.mark.parametrize("num_scored", [0, 1, 2])
async def test_a_prompt_that_is_told_in_part_moves_nowhere_and_one_that_is_told_is_not_told_again(
    tmp_path: Path, num_scored: int
) -> None:
    scores = [TokenLogprobs(-1.0, (), ()), TokenLogprobs(-2.0, (), ())]
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        (view,) = (view for view in pool.workers() if view.epoch == first.epoch)
        sink = ScoredSink()
        submit(pool, view, request(num_prompt_logprobs=0), sink)
        run = await first.expect(Run)
        if num_scored:
            await first.step([], prompt_logprobs={run.handle: scores[:num_scored]})
            await until(lambda: sink.calls)
        await die(pool, first)
        if num_scored == 1:
            assert await sink.end() == ("lost", "WORKER_LOST")
            assert await second.hears_nothing()
            return
        again = await second.expect(Run)
        assert again.sampling.num_prompt_logprobs == (None if num_scored else 0)
        told = {} if num_scored else {again.handle: scores}
        await second.step([(again.handle, 7)], prompt_logprobs=told, finished=(finished(again.handle, 1),))
        assert (await sink.end())[0] == "finished"
        assert [call for call in sink.calls if call[0] == "scores"] == [("scores", -1.0, -2.0)]


async def test_it_moves_so_often_and_no_more(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1", max_migrations=1) as (pool, (first, second)):
        sink = open_on(pool, first)
        await first.send(Leaving(epoch=first.epoch))
        await second.expect(Run)
        await second.send(Leaving(epoch=second.epoch))
        assert await sink.end() == ("lost", "DRAINING")


async def test_a_cancel_ends_it_wherever_it_is(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        moved, waiting = open_on(pool, first, "moved"), open_on(pool, first, "waiting")
        await die(pool, first)
        run = await second.expect(Run)
        assert run.request_id == "moved"
        for sink in (moved, waiting):
            pool.cancel(sink.name)  # type: ignore[attr-defined]
        assert (await second.expect(Cancel)).handles == (run.handle,)
        assert await waiting.end() == ("lost", "WORKER_LOST")
        await second.step(finished=(finished(run.handle, reason=WireFinishReason.CANCELLED),))
        await moved.end()
        assert pool.num_outputs == 0


async def test_each_output_of_a_request_moves_alone_with_its_own_seed(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        (view,) = (view for view in pool.workers() if view.epoch == first.epoch)
        handle, fork = pool.draw_handles(2)
        run = msgspec.structs.replace(request(seed=(1 << 64) - 1), handle=handle, fork_handles=(fork,))
        pool.submit(view, run, [RecordingSink(), RecordingSink()])
        await first.send(Leaving(epoch=first.epoch))
        runs = [await second.expect(Run) for _ in range(2)]
        assert [(run.sampling.seed, run.fork_handles) for run in runs] == [((1 << 64) - 1, ()), (0, ())]


async def test_another_model_takes_nothing_and_closing_ends_all(tmp_path: Path) -> None:
    async with served(tmp_path, "w0") as (pool, workers):
        sink = open_on(pool, workers[0])
        await die(pool, workers[0])
        card = workers[0].register.card
        other = msgspec.structs.replace(card, fingerprint="f2")
        workers.append(FakeWorker(pool.bound_endpoints[0], "w0", card=other))
        await workers[1].join(pool)
        assert await workers[1].hears_nothing(0.3)
        await pool.close()
        assert sink.ends == [("lost", "DRAINING")]


async def test_what_was_cancelled_moves_nowhere_when_its_worker_dies(tmp_path: Path) -> None:
    async with served(tmp_path, "w0", "w1") as (pool, (first, second)):
        kept, gone = open_on(pool, first, "kept"), open_on(pool, first, "gone")
        for _ in range(2):
            await first.expect(Run)
        pool.cancel(gone.name)  # type: ignore[attr-defined]
        assert (await first.expect(Cancel)).handles == (gone.name,)  # type: ignore[attr-defined]
        await die(pool, first)
        assert await gone.end() == ("lost", "WORKER_LOST")
        run = await second.expect(Run)
        assert run.request_id == "kept"
        await second.step([(run.handle, 5)], finished=(finished(run.handle, 1),))
        await kept.end()
        assert await second.hears_nothing()
        assert (pool.num_outputs, pool.stats.moved_outputs) == (0, 1)


async def test_a_worker_that_is_gone_holds_up_no_cancel_for_another(tmp_path: Path) -> None:
    """The first was given up while its Cancel was on its way out: the second's goes out in its own turn, not with the
    next tick."""
    async with served(tmp_path, "w0", "w1", max_migrations=0, tick_s=3600.0) as (pool, (first, second)):
        lost, other = open_on(pool, first, "lost"), open_on(pool, second, "other")
        run = await second.expect(Run)
        post, record = pool._outbox, pool._registry.get(pool._outputs.get(lost.name).incarnation)  # type: ignore[attr-defined,union-attr]
        assert record is not None
        real = pool._link.send

        def send(peer: Any, message: Any) -> None:
            if peer == record.peer:
                raise PeerFull
            real(peer, message)

        pool._link.send = send  # type: ignore[method-assign]
        pool.cancel(lost.name)  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert post._cancels  # it could not be said yet
        pool.cancel(other.name)  # type: ignore[attr-defined]
        assert (await second.expect(Cancel)).handles == (run.handle,)
