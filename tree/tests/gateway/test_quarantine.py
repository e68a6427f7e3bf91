"""Whoever kills workers is found after the second one, and nobody else is blamed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.quarantine import Quarantine, Verdict


def test_suspects_take_turns_on_a_worker_and_the_queued_do_not_wait() -> None:
    quarantine = Quarantine()
    assert [quarantine.lost(name, "w1", was_begun=True) for name in "abc"] == [Verdict.SUSPECT] * 3
    assert quarantine.lost("q", "w1", was_begun=False) is Verdict.FREE
    assert quarantine.next_for("w2") == "a"
    assert quarantine.next_for("w2") is None
    assert quarantine.next_for("w3") == "b"
    assert quarantine.passed("a")
    assert not quarantine.passed("a")
    assert quarantine.next_for("w2") == "c"
    assert quarantine.num_waiting == 0


def test_an_output_is_guilty_where_its_worker_dies_during_probation_and_not_after_it() -> None:
    quarantine = Quarantine()
    quarantine.lost("a", "w1", was_begun=True)
    quarantine.lost("b", "w1", was_begun=True)
    quarantine.next_for("w2")
    quarantine.passed("a")
    quarantine.next_for("w2")
    assert quarantine.lost("a", "w2", was_begun=True) is Verdict.SUSPECT
    assert quarantine.lost("b", "w2", was_begun=True) is Verdict.GUILTY
    assert quarantine.next_for("w3") == "a"


def test_what_a_worker_could_not_take_is_first_again_and_not_blamed() -> None:
    quarantine = Quarantine()
    for name in "ab":
        quarantine.lost(name, "w1", was_begun=True)
    assert quarantine.next_for("w2") == "a"
    quarantine.send_back("a")
    assert quarantine.next_for("w3") == "a"
    assert quarantine.next_for("w2") == "b"


def test_one_that_is_put_out_before_it_could_show_anything_is_still_a_suspect() -> None:
    quarantine = Quarantine()
    for name in "ab":
        quarantine.lost(name, "w1", was_begun=True)
    assert quarantine.next_for("w2") == "a"
    assert quarantine.is_tried("w2")
    assert quarantine.lost("a", "w2", was_begun=False) is Verdict.SUSPECT
    assert not quarantine.is_tried("w2")
    assert quarantine.next_for("w3") == "a"
    assert quarantine.lost("a", "w3", was_begun=True) is Verdict.GUILTY


def test_what_ends_otherwise_gives_its_place_away() -> None:
    quarantine = Quarantine()
    for name in "abc":
        quarantine.lost(name, "w1", was_begun=True)
    quarantine.next_for("w2")
    for name in ("a", "b", "b"):
        quarantine.forget(name)
    assert quarantine.next_for("w2") == "c"
    quarantine.forget("c")
    assert len(quarantine) == 0


@settings(max_examples=200)
@given(data=st.data(), num_outputs=st.integers(1, 12), num_workers=st.integers(1, 3))
def test_one_poison_kills_two_workers_at_most_and_everybody_else_comes_through(
    data: st.DataObject, num_outputs: int, num_workers: int
) -> None:
    """A whole service of names: outputs finish after a few tokens, the poison kills whatever worker steps it."""
    poison = data.draw(st.integers(0, num_outputs - 1))
    steps_to_kill = data.draw(st.integers(0, 3))  # tokens it gives before, in its first life
    left = {output: data.draw(st.integers(1, 5)) for output in range(num_outputs)}
    left[poison] = steps_to_kill + 1
    quarantine, lives, killed, guilty = Quarantine(), num_workers, 0, set()
    on = {worker: [o for o in left if o % num_workers == worker] for worker in range(num_workers)}
    for _ in range(200):
        if not left:
            break
        for worker in sorted(on):
            while (output := quarantine.next_for(worker)) is not None:
                on[worker].append(output)
            steps = list(on[worker])
            if poison in steps and left.get(poison) == 1:
                killed += 1
                del on[worker]
                on[lives] = []
                lives += 1
                for output in steps:
                    if quarantine.lost(output, worker, was_begun=True) is Verdict.GUILTY:
                        guilty.add(output)
                        del left[output]
                continue
            for output in steps:
                quarantine.passed(output)
                left[output] -= 1
                if not left[output]:
                    del left[output]
                    on[worker].remove(output)
    assert not left
    assert guilty == {poison}
    assert killed == 2
