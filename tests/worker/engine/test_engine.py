"""The engine loop over lists: messages in, messages out, steps in flight."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.wire.messages import (
    AdminQuery,
    AdminReply,
    Cancel,
    Drain,
    HostBlocks,
    KvEventKind,
    KvEvents,
    Leaving,
    OutputPhase,
    Pause,
    Resume,
    Run,
    SamplingParams,
    WireFinishReason,
)
from octavo.worker.engine import kv_events
from octavo.worker.engine.interfaces import GatewayJoined, GatewayLost
from octavo.worker.runners.interface import RunnerError
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import OracleModel, oracle_tokens
from octavo.worker.scheduler.plan import StepPlan
from tests.support.worker.engine_rig import Rig, run_message
from tests.support.worker.scheduling import WorldConfig

MODEL = OracleModel(vocab_size=50, eos_token_ids=(2,))


def expected(prompt: list[int], handle: int, max_tokens: int = 4) -> list[int]:
    sampling = SamplingParams(seed=handle, max_tokens=max_tokens)
    return oracle_tokens(prompt, sampling, model=MODEL, max_total_tokens=33)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_runs_become_packed_outputs_with_tokens_and_one_end(max_in_flight: int) -> None:
    rig = Rig(WorldConfig(model=MODEL, max_in_flight=max_in_flight))
    rig.inbox.put(run_message(7, [3, 4, 5]))
    rig.inbox.put(run_message(8, [3, 4]), gateway=1)
    rig.steps()
    assert rig.outbox.tokens_of(7) == expected([3, 4, 5], 7)
    assert rig.outbox.tokens_of(8, gateway=1) == expected([3, 4], 8)
    assert rig.outbox.finished()[7].reason is WireFinishReason.LENGTH
    assert [output.seq for output in rig.outbox.steps_for(0)] == list(range(1, len(rig.outbox.steps_for(0)) + 1))
    assert rig.outbox.steps_for(0)[0].started == (7,)
    assert {output.epoch for output in rig.outbox.steps_for(0)} == {"e1"}
    assert [end.handle for end in rig.watcher.ends] == [8, 7] or [end.handle for end in rig.watcher.ends] == [7, 8]
    assert not rig.engine.stats.has_work


def test_two_steps_are_in_flight_while_there_is_work() -> None:
    rig = Rig(WorldConfig(model=MODEL, max_in_flight=2))
    rig.inbox.put(run_message(1, [3, 4, 5], max_tokens=8))
    rig.engine.step()
    assert rig.engine.stats.num_in_flight == 1  # two launched, the older one collected
    assert rig.engine.num_steps == 1


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("max_tokens", [4, 30])
def test_tokens_are_sent_before_their_prompts_are_indexed_and_told(max_in_flight: int, max_tokens: int) -> None:
    """What indexing takes depends on the prompts that end in a step: between the tokens of all streams it would come
    and go."""
    rig = Rig(WorldConfig(model=MODEL, max_in_flight=max_in_flight, num_blocks=64, max_model_len=64))
    happened: list[str] = []
    extend, put, put_all = rig.blocks._index.extend, rig.outbox.put, rig.outbox.put_all

    def seen(name: str, method: object) -> object:
        def call(*args: object) -> object:
            happened.append(name)
            return method(*args)  # type: ignore[operator]

        return call

    rig.blocks._index.extend = seen("indexed", extend)  # type: ignore[method-assign,assignment]
    rig.outbox.put = seen("sent", put)  # type: ignore[method-assign,assignment]
    rig.outbox.put_all = seen("told", put_all)  # type: ignore[method-assign,assignment]
    rig.inbox.put(run_message(1, [5, 6, 7] * 4, max_tokens=max_tokens))
    while not rig.outbox.tokens_of(1):
        happened.clear()
        rig.engine.step()
    assert happened == ["sent", "indexed", "told"]
    rig.inbox.put(run_message(2, [5, 6, 7] * 4, max_tokens=2))
    rig.steps()
    assert rig.outbox.finished()[2].cached_tokens > 0


def test_watchers_see_that_there_is_work_before_the_first_step_can_hang() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    seen: list[bool] = []
    launch = rig.runner.launch

    def watched_launch(plan: StepPlan) -> None:
        seen.append(rig.engine.stats.has_work)
        launch(plan)

    rig.runner.launch = watched_launch  # type: ignore[method-assign]
    rig.inbox.put(run_message(1, [3, 4], max_tokens=1))
    rig.engine.step()
    assert seen == [True]


def test_a_prompt_that_is_no_int32_is_refused() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.inbox.put(Run(handle=3, request_id="r", prompt_ids=b"\x01\x02\x03", sampling=SamplingParams()))
    rig.engine.step()
    assert rig.outbox.finished()[3].error == "INVALID_FIELD"


def test_a_cancel_ends_its_handles_and_ignores_unknown_ones() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.inbox.put(run_message(1, [3, 4, 5], max_tokens=30))
    rig.engine.step()
    rig.inbox.put(Cancel(handles=(1, 99)))
    rig.steps(2)
    assert rig.outbox.finished()[1].reason is WireFinishReason.CANCELLED
    assert rig.blocks.num_active == 0


def test_a_lost_gateway_is_forgotten_and_its_successor_counts_from_one() -> None:
    rig = Rig(WorldConfig(model=MODEL, max_in_flight=2))
    rig.inbox.put(run_message(1, [3, 4, 5], max_tokens=30))
    rig.steps(3)
    rig.inbox.put(GatewayLost())
    rig.inbox.put(run_message(1, [6, 7], max_tokens=3))
    rig.outbox.sent.clear()
    rig.steps()
    assert rig.outbox.tokens_of(1) == expected([6, 7], 1, 3)
    assert rig.outbox.steps_for(0)[0].seq == 1
    assert rig.blocks.num_active == 0


def test_admin_queries_are_answered_with_counts_audit_and_flush() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.inbox.put(run_message(1, [3, 4, 5, 6]))
    rig.steps()
    num_cached = rig.blocks.num_cached
    assert num_cached > 0
    rig.inbox.put(AdminQuery(query_id=5, audit=True, flush_prefix_cache=True))
    rig.engine.step()
    replies = [message for _, message in rig.outbox.sent if isinstance(message, AdminReply)]
    assert replies == [
        AdminReply(epoch="e1", query_id=5, num_blocks=16, num_free_blocks=16, num_flushed_blocks=num_cached)
    ]


def test_a_gateway_that_looks_is_told_of_the_blocks_and_of_its_own_outputs() -> None:
    rig = Rig(WorldConfig(model=MODEL, block_size=2))
    rig.inbox.put(run_message(7, [3, 4, 5], max_tokens=30))
    rig.steps(2)
    rig.inbox.put(run_message(8, [3, 4, 5, 6, 7], max_tokens=30))
    rig.inbox.put(run_message(9, [8], max_tokens=30), gateway=1)
    rig.steps(2)
    rig.inbox.put(Pause(handles=(8,)))
    rig.inbox.put(AdminQuery(query_id=5, max_cells=8, max_outputs=10))
    rig.engine.step()
    (reply,) = [message for _, message in rig.outbox.sent if isinstance(message, AdminReply)]
    assert np.frombuffer(reply.handles, "<i8").tolist() == [7, 8]
    assert list(reply.phases) == [OutputPhase.DECODE, OutputPhase.PAUSED]
    held = np.frombuffer(reply.held_blocks, "<i4").tolist()
    assert held[0] > 0
    assert (reply.blocks_per_cell, len(reply.cells)) == (2, 8)
    assert reply.num_shared_blocks == 1  # both prompts begin with the same two tokens
    rig.inbox.put(AdminQuery(query_id=6, max_outputs=1))
    rig.engine.step()
    latest = [message for _, message in rig.outbox.sent if isinstance(message, AdminReply)][-1]
    assert np.frombuffer(latest.handles, "<i8").tolist() == [7]
    assert latest.cells == b""
    assert (reply.host, latest.host) == (None, None)


def test_a_gateway_that_looks_is_told_of_the_second_tier() -> None:
    rig = Rig(WorldConfig(model=MODEL, block_size=2, num_host_blocks=6))
    rig.inbox.put(AdminQuery(query_id=5, max_cells=4))
    rig.inbox.put(AdminQuery(query_id=6, max_outputs=4))
    rig.engine.step()
    looked, other = [message for _, message in rig.outbox.sent if isinstance(message, AdminReply)]
    assert looked.host == HostBlocks(num_blocks=6, num_free=6, blocks_per_cell=2, cells=bytes([1, 1, 1]))
    assert other.host is None


def test_looks_at_an_idle_engine_cause_no_audits() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.engine._checks.is_audit_due = False
    rig.inbox.put(AdminQuery(query_id=5, max_cells=8))
    rig.engine.step()
    assert not rig.engine._checks.is_audit_due


def test_audits_take_an_idle_engine_a_fiftieth_of_its_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(WorldConfig(model=MODEL), audit_every_steps=1000)
    audit, audited_s = rig.blocks.audit, list[float]()

    def slow() -> object:
        rig.now_s += 1.0
        audited_s.append(rig.now_s)
        return audit()

    monkeypatch.setattr(rig.blocks, "audit", slow)
    seen = list[int]()
    for idle_s in (0.3, 0.3, 45.0, 55.0):
        rig.inbox.put(run_message(1, [3, 4], max_tokens=1))
        rig.steps(3)
        rig.now_s += idle_s
        rig.engine.step()
        seen.append(len(audited_s))
    assert seen == [1, 1, 1, 2]


def test_requests_of_one_step_each_are_work_and_audited_once_they_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(WorldConfig(model=MODEL), audit_every_steps=1000)
    audit, audited_s = rig.blocks.audit, list[float]()
    monkeypatch.setattr(rig.blocks, "audit", lambda: audited_s.append(rig.now_s) or audit())
    for handle in range(20):
        rig.inbox.put(run_message(handle, [3, 4], max_tokens=1))
        rig.engine.step()  # it is planned, computed and ended in here
        assert rig.scheduler.is_empty
        rig.now_s += 0.1
    assert audited_s == []
    rig.now_s += 0.3
    rig.engine.step()
    assert len(audited_s) == 1


def test_last_tokens_are_sent_before_blocks_are_indexed_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, order = Rig(WorldConfig(model=MODEL, block_size=2)), list[str]()

    def note(plain: Callable[..., object]) -> Callable[..., object]:
        return lambda *values: order.append(plain.__name__) or plain(*values)

    for owner, method in ((rig.blocks, "commit"), (rig.blocks, "release"), (rig.outbox, "put")):
        monkeypatch.setattr(owner, method, note(getattr(owner, method)))
    rig.inbox.put(run_message(1, [3, 4, 5], max_tokens=1))
    rig.engine.step()
    assert order == ["put", "commit", "release"]
    assert (rig.blocks.num_active, rig.blocks.num_cached) == (0, 1)


def test_stored_blocks_are_told_to_every_gateway() -> None:
    rig = Rig(WorldConfig(model=MODEL, block_size=2))
    rig.inbox.put(run_message(1, [3, 4, 5, 6], max_tokens=1))
    rig.steps()
    events = [event for message in rig.outbox.sent_to_all if isinstance(message, KvEvents) for event in message.events]
    assert [event.kind for event in events] == [KvEventKind.STORED, KvEventKind.STORED]
    assert np.frombuffer(events[0].token_ids, "<i4").tolist() == [3, 4]
    assert (events[0].parent_hash, events[1].parent_hash) == (b"", events[0].block_hash)


def test_a_gateway_that_joins_late_hears_the_whole_cache_a_part_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_PART_BLOCKS", 2)
    rig = Rig(WorldConfig(model=MODEL, block_size=2))
    rig.inbox.put(run_message(1, [3, 4, 5, 6, 7, 8], max_tokens=1))
    rig.steps()
    early = [event for message in rig.outbox.sent_to_all if isinstance(message, KvEvents) for event in message.events]
    rig.inbox.put(GatewayJoined(), gateway=1)
    sizes: list[list[int]] = []
    while not sizes or rig.engine.has_kv_events:
        num_sent = len(rig.outbox.sent)
        rig.engine.step()
        sizes.append([len(told.events) for _, told in rig.outbox.sent[num_sent:] if isinstance(told, KvEvents)])
    assert sizes == [[1, 2], [1]]
    late = [message for to, message in rig.outbox.sent if to == 1 and isinstance(message, KvEvents)]
    events = [event for message in late for event in message.events]
    assert [events[0].kind, *events[1:]] == [KvEventKind.CLEARED, *early]
    assert len(early) == 3


def test_a_gateway_that_is_lost_hears_no_more_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_PART_BLOCKS", 1)
    rig = Rig(WorldConfig(model=MODEL, block_size=2))
    rig.inbox.put(run_message(1, [3, 4, 5, 6, 7, 8], max_tokens=1))
    rig.steps()
    rig.inbox.put(GatewayJoined(), gateway=1)
    rig.engine.step()
    rig.inbox.put(GatewayLost(), gateway=1)
    rig.engine.step()
    assert not rig.engine.has_kv_events
    assert sum(len(told.events) for to, told in rig.outbox.sent if to == 1 and isinstance(told, KvEvents)) == 2


def test_an_idle_engine_tells_its_cache_without_resting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_PART_BLOCKS", 1)
    rig = Rig(WorldConfig(model=MODEL, block_size=2))
    rig.inbox.put(run_message(1, [3, 4, 5, 6, 7, 8], max_tokens=1))
    rig.steps()
    rig.inbox.waits.clear()
    rig.inbox.put(GatewayJoined(), gateway=1)
    rig.inbox.on_wait = rig.engine.request_stop
    rig.engine.run()
    assert rig.inbox.waits == [0.25]
    assert sum(len(told.events) for to, told in rig.outbox.sent if to == 1 and isinstance(told, KvEvents)) == 4


def test_a_gateway_that_joins_an_empty_worker_hears_nothing() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.inbox.put(GatewayJoined())
    rig.steps()
    assert (rig.outbox.sent, rig.outbox.sent_to_all) == ([], [])


@pytest.mark.parametrize("where", ["launch_errors", "collect_errors"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_failed_step_is_reported_and_the_engine_goes_on(where: str, max_in_flight: int) -> None:
    faults = OracleFaults(**{where: {2: RunnerError("broken")}})  # type: ignore[arg-type]
    rig = Rig(WorldConfig(model=MODEL, max_in_flight=max_in_flight, faults=faults))
    rig.inbox.put(run_message(1, [3, 4, 5]))
    rig.steps(10)
    rig.inbox.put(run_message(2, [3, 4, 5]))
    rig.steps(10)
    assert (rig.outbox.finished()[1].error, rig.outbox.finished()[1].detail) == ("ENGINE_ERROR", "broken")
    assert rig.outbox.tokens_of(1) == expected([3, 4, 5], 1)[:1]
    assert rig.outbox.tokens_of(2) == expected([3, 4, 5], 2)
    assert [report.failed for report in rig.watcher.reports if report.failed] == ["RunnerError"]
    assert rig.engine.stats.num_violations == 0


def test_a_pause_stops_the_steps_of_an_output_and_a_resume_goes_on() -> None:
    rig = Rig(WorldConfig(model=MODEL, max_in_flight=2))
    rig.inbox.put(run_message(7, [3, 4, 5], max_tokens=20))
    rig.steps(4)
    rig.inbox.put(Pause(handles=(7, 99)))
    rig.steps(20)
    num_tokens, num_steps = len(rig.outbox.tokens_of(7)), rig.engine.num_steps
    rig.steps(20)
    assert (len(rig.outbox.tokens_of(7)), rig.engine.num_steps) == (num_tokens, num_steps)
    assert not rig.engine.stats.has_work
    assert (rig.engine.stats.num_paused, rig.engine.stats.num_pauses) == (1, 1)
    rig.inbox.put(Resume(handles=(7, 99)))
    rig.steps()
    assert rig.outbox.tokens_of(7) == expected([3, 4, 5], 7, max_tokens=20)
    assert rig.engine.stats.num_paused == 0


def test_a_drain_waits_for_a_paused_output_as_long_as_its_grace_and_no_longer() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.inbox.put(run_message(7, [3, 4, 5], max_tokens=20))
    rig.steps(4)
    rig.inbox.put(Pause(handles=(7,)))
    rig.engine.request_drain(grace_s=1.0)
    rig.steps(20)
    assert not rig.engine.is_done
    rig.now_s += 1.0
    rig.steps(2)
    assert rig.engine.is_done
    assert rig.outbox.finished()[7].error == "DRAINING"


def test_a_drain_refuses_new_requests_finishes_the_others_and_says_goodbye() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.inbox.put(run_message(1, [3, 4, 5]))
    rig.engine.step()
    rig.inbox.put(Drain(grace_s=60.0))
    rig.engine.step()
    rig.inbox.put(run_message(2, [3, 4, 5]))
    rig.engine.run()
    ends = rig.outbox.finished()
    assert (ends[1].reason, ends[2].error) == (WireFinishReason.LENGTH, "DRAINING")
    assert rig.outbox.sent_to_all[-1] == Leaving(epoch="e1", reason="DRAINED")


def test_after_the_grace_what_still_runs_is_ended_with_its_reason() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.inbox.put(run_message(1, [3, 4, 5], max_tokens=25))
    rig.engine.step()
    rig.engine.request_drain(grace_s=0.0)
    rig.engine.run()
    assert rig.outbox.finished()[1].error == "DRAINING"
    assert len(rig.outbox.tokens_of(1)) < 25
    assert rig.blocks.num_active == 0


def test_idle_it_waits_for_messages_with_a_bound() -> None:
    rig = Rig(WorldConfig(model=MODEL))

    def stop_after_three(timeout_s: float) -> None:
        rig.inbox.waits.append(timeout_s)
        if len(rig.inbox.waits) == 3:
            rig.engine.request_stop()

    rig.inbox.wait = stop_after_three  # type: ignore[method-assign]
    rig.engine.run()
    assert rig.inbox.waits == [0.25] * 3
    assert rig.outbox.sent_to_all == [Leaving(epoch="e1", reason="STOPPED")]


def test_reports_tell_what_each_step_computed_and_stats_add_up() -> None:
    rig = Rig(WorldConfig(model=MODEL))
    rig.inbox.put(run_message(1, [3, 4, 5]))
    rig.steps(6)
    seen = [(r.step, r.num_prefill_tokens, r.num_decode_tokens, r.num_sampled) for r in rig.watcher.reports]
    assert seen == [(1, 3, 0, 1), (2, 0, 1, 1), (3, 0, 1, 1), (4, 0, 1, 1)]
    stats = rig.engine.stats
    assert (stats.num_steps, stats.num_prefill_tokens, stats.num_decode_tokens) == (4, 3, 3)
    assert stats.num_generated_tokens == 4
    assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_active_blocks == stats.num_blocks


def test_violations_found_by_the_periodic_audit_are_in_the_stats() -> None:
    rig = Rig(WorldConfig(model=MODEL), audit_every_steps=2)
    rig.blocks._pool.ref_P[9] += 1  # a planted leak
    rig.inbox.put(run_message(1, [3, 4, 5]))
    rig.engine.step()
    assert rig.engine.stats.num_violations == 0
    rig.engine.step()
    assert rig.engine.stats.num_violations > 0


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_every_handle_of_a_cancel_a_pause_and_a_resume_counts(order: tuple[int, ...]) -> None:
    rig = Rig(WorldConfig(model=MODEL, num_blocks=64, max_num_seqs=3))
    for handle in (1, 2, 3):
        rig.inbox.put(run_message(handle, [3, 4, handle + 5], max_tokens=20, min_tokens=20))
    rig.steps(4)
    rig.inbox.put(Pause(handles=order))
    rig.engine.step()
    assert rig.engine.stats.num_paused == 3
    rig.inbox.put(Resume(handles=order))
    rig.engine.step()
    assert (rig.engine.stats.num_paused, rig.engine.stats.num_running) == (0, 3)
    rig.inbox.put(Cancel(handles=order))
    rig.engine.step()
    assert rig.scheduler.is_empty or not list(rig.scheduler.requests)
    assert {handle: end.reason for handle, end in rig.outbox.finished().items()} == dict.fromkeys(
        (1, 2, 3), WireFinishReason.CANCELLED
    )
