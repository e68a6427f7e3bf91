"""Admission: whole states, before and after what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import Admission, AdmissionCounts
from gateway.errors import DuplicateRequest, QueueFull


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
    assert admission.counts() == AdmissionCounts(num_entered=3, num_placed=2)


def test_leaving_twice_or_never_having_entered_is_nothing() -> None:
    admission = Admission(max_requests=1)
    admission.leave("ghost")
    admission.enter("a")
    admission.place("a", "w0", max_on_worker=1)
    admission.leave("a")
    admission.leave("a")
    assert state(admission) == (AdmissionCounts(num_entered=0, num_placed=0), (), 0, 0)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "w0", "w1", "leave"]), st.sampled_from("abcde")), max_size=60
)  # fmt: skip


@settings(max_examples=300)
@given(actions=ACTIONS)
def test_counts_are_what_a_recount_says(actions: list[tuple[str, str]]) -> None:
    admission, shadow = Admission(max_requests=4), dict[str, str | None]()
    for action, request_id in actions:
        try:
            if action == "enter":
                admission.enter(request_id)
                shadow[request_id] = None
            elif action == "leave":
                admission.leave(request_id)
                shadow.pop(request_id, None)
            elif request_id in shadow:
                admission.place(request_id, action, max_on_worker=2)
                shadow[request_id] = action
        except (DuplicateRequest, QueueFull):
            pass
        workers = list(shadow.values())
        assert set(admission.request_ids()) == set(shadow)
        assert [admission.on_worker(worker) for worker in ("w0", "w1")] == [workers.count("w0"), workers.count("w1")]
        assert max(workers.count("w0"), workers.count("w1")) <= 2
        assert len(shadow) <= 4


def test_a_request_that_moved_counts_at_its_new_worker_only_and_leaves_it() -> None:
    admission = Admission(max_requests=10)
    admission.enter("a")
    admission.place("a", "w0", max_on_worker=1)
    admission.move("a", "w1")
    assert (admission.on_worker("w0"), admission.on_worker("w1")) == (0, 1)
    admission.leave("a")
    admission.move("a", "w0")
    assert (admission.on_worker("w0"), admission.on_worker("w1"), admission.counts().num_placed) == (0, 0, 0)
