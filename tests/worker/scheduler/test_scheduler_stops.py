"""The vectorised stop check against its obvious reference, and the small pieces around it."""

from enum import Enum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.wire.messages import Finished, Run, SamplingParams, TokenLogprobs, WireFinishReason
from octavo.worker.scheduler.plan import GatewayIndex, GatewayOutput, OutputBuffer, Slot
from octavo.worker.scheduler.request import Phase, Request, token_ids_of
from octavo.worker.scheduler.request_queue import RequestQueue, TenantFairness
from octavo.worker.scheduler.slot_state import SlotState, find_ends, stop_ids
from tests.support.worker.scheduling import key

EOS = (2, 3)


class TokenVerdict(Enum):
    """What one token does to its output."""

    GOES_ON = 0
    STOPS = 1
    FILLS = 2  # the last one that fits


def judge(
    sampling: SamplingParams, eos_token_ids: tuple[int, ...], *, num_prompt_tokens: int, output: list[int], limit: int
) -> TokenVerdict:
    """The reference of `find_ends`: what the last token of ``output`` does. limit: tokens of prompt and output."""
    is_stop = output[-1] in sampling.stop_token_ids or (not sampling.ignore_eos and output[-1] in eos_token_ids)
    if is_stop and len(output) > sampling.min_tokens:
        return TokenVerdict.STOPS
    return TokenVerdict.FILLS if num_prompt_tokens + len(output) >= limit else TokenVerdict.GOES_ON


def make_request(order: int, prompt: list[int], *, priority: int = 0, limit: int = 20, **sampling: object) -> Request:
    """A request as the scheduler makes it."""
    run = Run(
        handle=order,
        request_id=str(order),
        prompt_ids=np.asarray(prompt, "<i4").tobytes(),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        priority=priority,
    )
    return Request(
        run=run,
        key=key(order),
        sampling=run.sampling,
        order=order,
        arrival_s=0.0,
        deadline_s=None,
        max_total_tokens=limit,
        token_ids_T=token_ids_of(run),
    )


cases = st.fixed_dictionaries(
    {
        "num_prompt": st.integers(1, 3),
        "tokens": st.lists(st.integers(0, 6), min_size=1, max_size=8),
        "stops": st.lists(st.integers(0, 6), max_size=5).map(tuple),
        "min_tokens": st.integers(0, 4),
        "ignore_eos": st.booleans(),
        "room": st.integers(1, 8),
    }
)


@given(rows_of=st.lists(cases, min_size=1, max_size=6))
@settings(max_examples=200)
def test_the_vectorised_check_agrees_with_its_reference_token_by_token(rows_of: list[dict]) -> None:
    rows = SlotState(num_slots=len(rows_of), max_total_tokens=16)
    requests = []
    for slot, case in enumerate(rows_of):
        request = make_request(
            slot,
            [9] * case["num_prompt"],
            limit=case["num_prompt"] + case["room"],
            stop_token_ids=case["stops"],
            min_tokens=case["min_tokens"],
            ignore_eos=case["ignore_eos"],
        )
        ids = stop_ids(request.sampling, EOS)
        rows.join(Slot(slot), request, num_cached_tokens=0, stop_ids=ids)
        requests.append(request)
    alive = list(range(len(rows_of)))
    for index in range(8):
        alive = [slot for slot in alive if index < len(rows_of[slot]["tokens"])]
        slots = np.asarray(alive, np.intp)
        tokens = np.asarray([rows_of[slot]["tokens"][index] for slot in alive], np.int32)
        rows.append(slots, tokens, rows.num_known_S[slots], 0.0)
        is_stop, is_end = find_ends(rows, slots, tokens)
        verdicts = [
            judge(
                requests[slot].sampling,
                EOS,
                num_prompt_tokens=rows_of[slot]["num_prompt"],
                output=rows_of[slot]["tokens"][: index + 1],
                limit=requests[slot].max_total_tokens,
            )
            for slot in alive
        ]
        assert is_stop.tolist() == [verdict is TokenVerdict.STOPS for verdict in verdicts]
        assert is_end.tolist() == [verdict is not TokenVerdict.GOES_ON for verdict in verdicts]
        alive = [slot for slot, verdict in zip(alive, verdicts, strict=True) if verdict is TokenVerdict.GOES_ON]


def test_a_row_with_many_stop_tokens_makes_room_and_leaves_nothing_behind() -> None:
    rows = SlotState(num_slots=2, max_total_tokens=8)
    rows.join(Slot(0), make_request(0, [9]), num_cached_tokens=0, stop_ids=(1,))
    former = make_request(1, [9])
    rows.join(Slot(1), former, num_cached_tokens=0, stop_ids=(1, 2, 3, 4, 5))
    rows.leave(Slot(1), former)
    rows.join(Slot(1), make_request(2, [9]), num_cached_tokens=0, stop_ids=(6,))
    assert sorted({*rows.stops_KS[:, 0].tolist()} - {-1}) == [1]
    assert sorted({*rows.stops_KS[:, 1].tolist()} - {-1}) == [6]


@given(
    events=st.lists(
        st.tuples(st.integers(0, 3), st.none() | st.lists(st.integers(0, 70), max_size=64, unique=True)), max_size=12
    )
)
def test_a_stop_check_costs_what_the_present_requests_need_and_finds_what_a_set_does(
    events: list[tuple[int, list[int] | None]],
) -> None:
    rows, held = SlotState(num_slots=4, max_total_tokens=8), dict[int, tuple[Request, set[int]]]()
    for slot, ids in events:
        if slot in held:
            rows.leave(Slot(slot), held.pop(slot)[0])
        if ids is not None:
            held[slot] = make_request(slot, [9]), {*ids}
            rows.join(Slot(slot), held[slot][0], num_cached_tokens=0, stop_ids=tuple(sorted(ids)))
        assert len(rows.stops_KS) == max((len(stops) for _, stops in held.values()), default=0)
        slots = np.asarray(sorted(held), np.intp)
        rows.num_known_S[slots] = 2
        for token in range(71):
            is_stop, _ = find_ends(rows, slots, np.full(len(slots), token, np.int32))
            assert is_stop.tolist() == [token in held[each][1] for each in sorted(held)]
        rows.num_known_S[slots] = 1


def test_leaving_and_joining_change_the_generation() -> None:
    rows = SlotState(num_slots=1, max_total_tokens=8)
    seen = [int(rows.generation_S[0])]
    for order in range(2):
        request = make_request(order, [9])
        rows.join(Slot(0), request, num_cached_tokens=0, stop_ids=())
        seen.append(int(rows.generation_S[0]))
        rows.leave(Slot(0), request)
        seen.append(int(rows.generation_S[0]))
    assert len(set(seen)) == len(seen)


def test_the_queue_is_by_priority_then_arrival_and_forgets_who_left() -> None:
    queue = RequestQueue(aging_s=100.0, fairness=TenantFairness(SlotState(num_slots=1, max_total_tokens=8)))
    requests = [make_request(order, [9], priority=priority) for order, priority in enumerate([0, 1, 0, 1])]
    for request in requests:
        queue.push(request, now_s=0.0)
    order = []
    while head := queue.head(1.0):
        queue.remove(head, 1.0)
        order.append(head.order)
    assert (order, len(queue)) == ([1, 3, 0, 2], 0)


def test_time_waited_counts_over_all_spells_and_makes_aged() -> None:
    queue = RequestQueue(aging_s=10.0, fairness=TenantFairness(SlotState(num_slots=1, max_total_tokens=8)))
    old, important = make_request(0, [9], priority=-5), make_request(1, [9], priority=5)
    queue.push(old, now_s=0.0)
    queue.remove(old, now_s=6.0)
    assert old.waited_s == 6.0
    queue.push(important, now_s=50.0)
    queue.push(old, now_s=50.0)
    assert queue.head(53.9) is important
    assert queue.head(54.0) is old
    assert (old.is_aged, old.phase) == (True, Phase.WAITING)
    assert old.rank < important.rank


@pytest.mark.parametrize("gateways", [[0, 0, 0], [1, 0, 1], [2, 0, 1], [0, 5, 5]])
def test_news_are_grouped_by_gateway_in_the_order_of_the_rows(gateways: list[int]) -> None:
    buffer = OutputBuffer()
    handles, tokens = np.asarray([7, 8, 9], np.int64), np.asarray([70, 80, 90], np.int32)
    buffer.put_tokens(np.asarray(gateways, np.int32), handles, tokens)
    outputs = buffer.take()
    for gateway in set(gateways):
        rows = [index for index, of in enumerate(gateways) if of == gateway]
        output = outputs[GatewayIndex(gateway)]
        assert output.handles_N.tolist() == [7 + row for row in rows]
        assert output.tokens_N.tolist() == [70 + 10 * row for row in rows]
    assert buffer.take() == {}


def test_a_forgotten_gateway_gets_nothing_and_the_others_all() -> None:
    buffer = OutputBuffer()
    end = Finished(handle=1, reason=WireFinishReason.STOP)
    for gateway in (0, 1):
        buffer.put_started(key(1, gateway))
        buffer.put_logprobs(key(1, gateway), TokenLogprobs(-1.0, (), ()))
        buffer.put_finished(GatewayIndex(gateway), end)
    buffer.forget(GatewayIndex(0))
    outputs = buffer.take()
    assert outputs.keys() == {1}
    output = outputs[GatewayIndex(1)]
    assert isinstance(output, GatewayOutput)
    assert (output.started, output.finished, list(output.logprobs)) == ((1,), (end,), [1])
