"""Admission: whole states, before and after what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.errors import DuplicateRequest, ExceedsCapacity, QueueFull
from octavo.gateway.requests.admission import Admission, AdmissionCounts


def state(admission: Admission) -> tuple[object, ...]:
    return admission.counts(), admission.request_ids(), admission.on_worker("w0"), admission.on_worker("w1")


def test_an_id_enters_once_until_it_leaves() -> None:
    admission = Admission(max_requests=3)
    admission.enter("a")
    before = state(admission)
    with pytest.raises(DuplicateRequest):
        admission.enter("a")
    assert state(admission) == before
    admission.leave("a")
    admission.enter("a")
    assert admission.holds("a")


def test_the_limit_of_all_is_exact_and_a_refusal_changes_nothing() -> None:
    admission = Admission(max_requests=2)
    admission.enter("a")
    admission.enter("b")
    before = state(admission)
    with pytest.raises(QueueFull):
        admission.enter("c")
    assert state(admission) == before
    admission.leave("b")
    admission.enter("c")


def test_the_limit_of_a_worker_is_exact_and_moving_frees_the_former_place() -> None:
    admission = Admission(max_requests=9)
    for request_id in "abc":
        admission.enter(request_id)
    admission.place("a", "w0", max_on_worker=1)
    before = state(admission)
    with pytest.raises(QueueFull):
        admission.place("b", "w0", max_on_worker=1)
    assert state(admission) == before
    admission.place("a", "w0", max_on_worker=1)  # where it is already
    admission.place("a", "w1", max_on_worker=1)
    assert (admission.on_worker("w0"), admission.on_worker("w1")) == (0, 1)
    admission.place("b", "w0", max_on_worker=1)
    assert admission.counts() == AdmissionCounts(num_entered=3, num_outputs=3, num_placed=2)


def test_leaving_twice_or_never_having_entered_is_nothing() -> None:
    admission = Admission(max_requests=1)
    admission.leave("ghost")
    admission.enter("a")
    admission.place("a", "w0", max_on_worker=1)
    admission.leave("a")
    admission.leave("a")
    assert state(admission) == (AdmissionCounts(num_entered=0, num_outputs=0, num_placed=0), (), 0, 0)


def test_limits_count_outputs_and_what_can_never_fit_is_told_so() -> None:
    admission = Admission(max_requests=8)
    with pytest.raises(ExceedsCapacity):
        admission.enter("a", num_outputs=9)
    admission.enter("a", num_outputs=5)
    before = state(admission)
    with pytest.raises(QueueFull):
        admission.enter("b", num_outputs=4)
    assert state(admission) == before
    admission.enter("b", num_outputs=3)
    admission.place("a", "w0", max_on_worker=5)
    with pytest.raises(QueueFull):
        admission.place("b", "w0", max_on_worker=7)
    assert admission.counts() == AdmissionCounts(num_entered=2, num_outputs=8, num_placed=5)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "w0", "w1", "move", "leave"]), st.sampled_from("abcde"), st.integers(1, 5)),
    max_size=60,
)  # fmt: skip


@settings(max_examples=300)
@given(actions=ACTIONS)
def test_counts_are_what_a_recount_says(actions: list[tuple[str, str, int]]) -> None:
    """The shadow has a list of workers for each request, one an output."""
    admission, shadow = Admission(max_requests=6), dict[str, list[str | None]]()
    for action, request_id, number in actions:
        outputs = shadow.get(request_id, [])
        num_all = sum(map(len, shadow.values()))
        elsewhere = [each for name, workers in shadow.items() if name != request_id for each in workers]
        if action == "enter":
            fits = not outputs and num_all + number <= 6
            try:
                admission.enter(request_id, num_outputs=number)
                shadow[request_id] = [None] * number
                assert fits
            except (DuplicateRequest, QueueFull):
                assert not fits
        elif action == "leave":
            admission.leave(request_id)
            shadow.pop(request_id, None)
        elif action == "move":
            if not outputs or number <= len(outputs):
                admission.move(request_id, "w1", number - 1)
                outputs[number - 1 : number] = ["w1"] * bool(outputs)
        elif outputs:
            fits = elsewhere.count(action) + len(outputs) <= 4
            try:
                admission.place(request_id, action, max_on_worker=4)
                shadow[request_id] = [action] * len(outputs)
                assert fits
            except QueueFull:
                assert not fits
        workers = [each for workers in shadow.values() for each in workers]
        assert [admission.on_worker(worker) for worker in ("w0", "w1")] == [workers.count("w0"), workers.count("w1")]
        assert admission.counts() == AdmissionCounts(
            num_entered=len(shadow), num_outputs=len(workers), num_placed=len(workers) - workers.count(None)
        )


def test_a_request_that_moved_counts_at_its_new_worker_only_and_leaves_it() -> None:
    admission = Admission(max_requests=10)
    admission.enter("a")
    admission.place("a", "w0", max_on_worker=1)
    admission.move("a", "w1")
    assert (admission.on_worker("w0"), admission.on_worker("w1")) == (0, 1)
    admission.leave("a")
    admission.move("a", "w0")
    assert (admission.on_worker("w0"), admission.on_worker("w1"), admission.counts().num_placed) == (0, 0, 0)


def test_an_output_that_moves_leaves_the_others_of_its_request_where_they_are() -> None:
    admission = Admission(max_requests=10)
    admission.enter("a", num_outputs=3)
    admission.place("a", "w0", max_on_worker=3)
    admission.move("a", "w1", 2)
    assert (admission.on_worker("w0"), admission.on_worker("w1")) == (2, 1)
    admission.leave("a")
    assert state(admission) == (AdmissionCounts(num_entered=0, num_outputs=0, num_placed=0), (), 0, 0)
