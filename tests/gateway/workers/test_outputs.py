"""Live outputs: every claim of a worker is checked, and a lie costs only the output that it is about."""

import pytest

from octavo.gateway.workers.outputs import Output, Outputs
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import LostReason
from octavo.wire.messages import TokenLogprobs, WireFinishReason
from tests.support.gateway.workers import RecordingSink, finished, request, step_output

OURS, OTHER = 1, 2  # incarnations


class Bench:
    """Two outputs of one worker, one of another."""

    def __init__(self) -> None:
        self.stats = PoolStats()
        self.outputs = Outputs(self.stats)
        self.sinks = [RecordingSink() for _ in range(3)]
        self.handles = [self.add(sink, worker) for sink, worker in zip(self.sinks, (OURS, OURS, OTHER), strict=True)]

    def add(self, sink: RecordingSink, incarnation: int, **fields: object) -> int:
        plain: dict[str, object] = {"vocab_size": 1000, "max_tokens": 4, "wants_logprobs": False}
        (handle,) = self.outputs.draw_handles(1)
        plain |= {"name": handle, "handle": handle, "fingerprint": "f1", "run": request()}
        output = Output(incarnation=incarnation, sink=sink, **(plain | fields))  # type: ignore[arg-type]
        self.outputs.add(output)
        return handle

    def take(self, rows: list[tuple[int, int]] | None = None, **fields: object) -> list[int]:
        return [each.handle for each in self.outputs.take(OURS, step_output("e", 1, rows, **fields))]


def test_tokens_go_to_their_streams_in_order() -> None:
    bench = Bench()
    assert bench.take([(1, 10), (2, 20)], started=(1, 2)) == []
    assert bench.take([(1, 11)], finished=(finished(1, 2),)) == [1]
    assert bench.sinks[0].calls == [("started",), ("tokens", 10), ("tokens", 11), ("finished", finished(1, 2))]
    assert bench.sinks[1].calls == [("started",), ("tokens", 20)]


def test_several_tokens_of_one_step_keep_their_order_and_their_logprobs() -> None:
    bench = Bench()
    sink = RecordingSink()
    handle = bench.add(sink, OURS, wants_logprobs=True)
    rows = [TokenLogprobs(logprob=-float(n), top_ids=(), top_logprobs=()) for n in (1, 2)]
    bench.take([(handle, 5), (1, 7), (handle, 6)], logprobs={handle: rows})
    assert sink.calls == [("tokens", 5, rows[0]), ("tokens", 6, rows[1])]


def test_a_cancelled_output_gets_no_more_tokens_but_its_end() -> None:
    bench = Bench()
    output = bench.outputs.get(1)
    assert output is not None
    output.is_cancelled = True
    end = finished(1, 9, reason=WireFinishReason.CANCELLED)
    assert bench.take([(1, 10)], started=(1,), finished=(end,)) == [1]
    assert bench.sinks[0].calls == [("finished", end)]


def test_news_of_outputs_that_ended_before_is_late_and_not_a_lie() -> None:
    bench = Bench()
    bench.take([(1, 1)], finished=(finished(1, 1),))
    assert bench.take([(1, 2)], finished=(finished(1, 2),)) == []
    assert (bench.stats.late_outputs, dict(bench.stats.protocol_errors)) == (2, {})
    assert len(bench.sinks[0].ends) == 1


LOST = [("lost", "INTERNAL")]


@pytest.mark.parametrize(
    ("rows", "fields", "kind", "victim"),
    [
        ([(99, 1)], {}, "unknown_handle", None),
        ([(0, 1)], {}, "unknown_handle", None),
        ([(-1, 1)], {}, "unknown_handle", None),
        ([(2**63 - 1, 1)], {}, "unknown_handle", None),
        ([(3, 1)], {}, "foreign_handle", None),
        (None, {"finished": (finished(3),)}, "foreign_handle", None),
        (None, {"started": (99,)}, "unknown_handle", None),
        ([(1, 1000)], {}, "token_out_of_range", 1),
        ([(1, -1)], {}, "token_out_of_range", 1),
        ([(1, 5)] * 5, {}, "too_many_tokens", 1),
        (None, {"finished": (finished(1, 1),)}, "wrong_count", 1),
        (None, {"finished": (finished(1), finished(1))}, "after_end", None),
    ],
)
def test_a_lie_is_counted_and_costs_only_its_victim(
    rows: list[tuple[int, int]] | None, fields: dict[str, object], kind: str, victim: int | None
) -> None:
    bench = Bench()
    ended = bench.take(rows, **fields)
    assert dict(bench.stats.protocol_errors) == {kind: 1}
    if victim is not None:
        assert ended == [victim]
        assert bench.sinks[victim - 1].ends == LOST
    assert bench.sinks[1].calls == bench.sinks[2].calls == []
    bench.take([(2, 20)])
    assert bench.sinks[1].calls == [("tokens", 20)]


def test_missing_logprobs_end_the_output_that_asked_for_them() -> None:
    bench = Bench()
    sink = RecordingSink()
    handle = bench.add(sink, OURS, wants_logprobs=True)
    assert bench.take([(handle, 5), (1, 6)]) == [handle]
    assert sink.calls == LOST
    assert bench.sinks[0].calls == [("tokens", 6)]


@pytest.mark.parametrize("method", ["on_started", "on_tokens", "on_finished"])
def test_a_sink_that_raises_ends_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(bench.sinks[0], method, fail)
    ended = bench.take([(1, 10), (2, 20)], started=(1, 2), finished=(finished(1, 1),))
    assert ended == [1]
    assert bench.sinks[1].calls == [("started",), ("tokens", 20)]
    assert bench.stats.sink_errors == 1
    assert bench.outputs.get(1) is None


def test_a_lost_output_is_told_once() -> None:
    bench = Bench()
    output = bench.outputs.get(1)
    assert output is not None
    bench.outputs.lose(output, LostReason.WORKER_LOST, "gone")
    bench.outputs.lose(output, LostReason.DRAINING, "again")
    assert bench.sinks[0].calls == [("lost", "WORKER_LOST")]


@pytest.mark.parametrize("end", ["token", "finish", "lose", "detach", "fault"])
def test_a_worker_is_awaited_until_the_first_token_or_the_end(end: str) -> None:
    bench = Bench()
    first, second = (output for output in map(bench.outputs.get, (1, 2)) if output is not None)
    bench.outputs.await_first_token(first, 100)
    bench.outputs.await_first_token(second, 30)
    assert bench.outputs.waiting_tokens == {OURS: 130}
    for _ in range(2):
        if end == "token":
            bench.take([(1, 10)])
        elif end == "finish":
            bench.take(finished=(finished(1, 0, reason=WireFinishReason.CANCELLED),))
        elif end == "lose":
            bench.outputs.lose(first, LostReason.WORKER_LOST, "")
        elif end == "detach":
            bench.outputs.detach(first)
        else:
            bench.take([(1, 1000)])
        assert bench.outputs.waiting_tokens == {OURS: 30}
    bench.take([(2, 10)])
    assert bench.outputs.waiting_tokens == {}


def test_handles_are_never_used_again() -> None:
    bench = Bench()
    bench.take(finished=(finished(1), finished(2)))
    assert bench.outputs.draw_handles(2) == [4, 5]
