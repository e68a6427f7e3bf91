"""What kills workers is found after the second one, nothing else is blamed, and chance is not final."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.workers.migration import Quarantine, Verdict


def test_suspects_take_turns_on_a_worker_and_the_queued_do_not_wait() -> None:
    quarantine = Quarantine()
    assert [quarantine.lost(name, "w1", was_begun=True, has_given=False) for name in "abc"] == [Verdict.SUSPECT] * 3
    assert quarantine.lost("q", "w1", was_begun=False, has_given=False) is Verdict.FREE
    assert quarantine.next_for("w2") == "a"
    assert quarantine.next_for("w2") is None
    assert quarantine.next_for("w3") == "b"
    assert quarantine.passed("a")
    assert not quarantine.passed("a")
    assert quarantine.next_for("w2") == "c"
    assert quarantine.num_waiting == 0


def test_an_output_is_accused_where_its_worker_dies_during_probation_and_not_after_it() -> None:
    quarantine = Quarantine()
    quarantine.lost("a", "w1", was_begun=True, has_given=False)
    quarantine.lost("b", "w1", was_begun=True, has_given=False)
    quarantine.next_for("w2")
    quarantine.passed("a")
    quarantine.next_for("w2")
    assert quarantine.lost("a", "w2", was_begun=True, has_given=False) is Verdict.SUSPECT
    assert quarantine.lost("b", "w2", was_begun=True, has_given=False) is Verdict.ACCUSED
    assert quarantine.next_for("w3") == "a"


def test_whose_prompt_has_given_tokens_gets_a_second_probation_behind_the_others_and_no_third() -> None:
    quarantine = Quarantine()
    for name in "ab":
        quarantine.lost(name, "w1", was_begun=True, has_given=True)
    assert quarantine.next_for("w2") == "a"
    assert quarantine.lost("a", "w2", was_begun=True, has_given=True) is Verdict.SUSPECT
    assert [quarantine.next_for("w3"), quarantine.next_for("w4")] == ["b", "a"]
    assert quarantine.lost("a", "w4", was_begun=True, has_given=True) is Verdict.GUILTY
    assert quarantine.lost("b", "w3", was_begun=True, has_given=True) is Verdict.SUSPECT
    assert quarantine.next_for("w5") == "b"
    assert quarantine.passed("b")
    assert quarantine.lost("b", "w5", was_begun=True, has_given=True) is Verdict.SUSPECT  # its slate is clean
    assert quarantine.next_for("w6") == "b"
    assert quarantine.lost("b", "w6", was_begun=True, has_given=True) is Verdict.SUSPECT


def test_what_was_accused_before_starts_on_probation_and_is_guilty_after_it() -> None:
    quarantine = Quarantine()
    quarantine.hold("a")
    assert quarantine.next_for("w1") == "a"
    quarantine.send_back("a")
    assert quarantine.next_for("w1") == "a"
    assert quarantine.lost("a", "w1", was_begun=False, has_given=False) is Verdict.SUSPECT
    assert quarantine.next_for("w2") == "a"
    assert quarantine.lost("a", "w2", was_begun=True, has_given=False) is Verdict.GUILTY
    quarantine.hold("b")
    quarantine.forget("b")
    assert (len(quarantine), quarantine.next_for("w3")) == (0, None)


def test_what_a_worker_could_not_take_is_first_again_and_not_blamed() -> None:
    quarantine = Quarantine()
    for name in "ab":
        quarantine.lost(name, "w1", was_begun=True, has_given=False)
    assert quarantine.next_for("w2") == "a"
    quarantine.send_back("a")
    assert quarantine.next_for("w3") == "a"
    assert quarantine.next_for("w2") == "b"


def test_one_that_is_put_out_before_it_could_show_anything_is_still_a_suspect() -> None:
    quarantine = Quarantine()
    for name in "ab":
        quarantine.lost(name, "w1", was_begun=True, has_given=False)
    assert quarantine.next_for("w2") == "a"
    assert quarantine.next_for("w2") is None  # while "a" is on trial there
    assert quarantine.lost("a", "w2", was_begun=False, has_given=False) is Verdict.SUSPECT
    assert quarantine.next_for("w3") == "a"
    assert quarantine.lost("a", "w3", was_begun=True, has_given=False) is Verdict.ACCUSED


def test_what_ends_otherwise_gives_its_place_away() -> None:
    quarantine = Quarantine()
    for name in "abc":
        quarantine.lost(name, "w1", was_begun=True, has_given=False)
    quarantine.next_for("w2")
    for name in ("a", "b", "b"):
        quarantine.forget(name)
    assert quarantine.next_for("w2") == "c"
    quarantine.forget("c")
    assert len(quarantine) == 0


@settings(max_examples=200)
@given(data=st.data(), num_outputs=st.integers(1, 12), num_workers=st.integers(1, 3))
def test_one_poison_kills_two_workers_or_three_and_everybody_else_comes_through(
    data: st.DataObject, num_outputs: int, num_workers: int
) -> None:
    """A whole service of names: outputs finish after a few tokens, the poison kills whatever worker steps it; a third
    one only where it gave tokens before."""
    poison = data.draw(st.integers(0, num_outputs - 1))
    steps_to_kill = data.draw(st.integers(0, 3))  # tokens it gives before, in its first life
    left = {output: data.draw(st.integers(1, 5)) for output in range(num_outputs)}
    left[poison] = steps_to_kill + 1
    has_given = set[int]()
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
                    verdict = quarantine.lost(output, worker, was_begun=True, has_given=output in has_given)
                    if verdict in (Verdict.GUILTY, Verdict.ACCUSED):
                        guilty.add(output)
                        del left[output]
                continue
            for output in steps:
                quarantine.passed(output)
                has_given.add(output)
                left[output] -= 1
                if not left[output]:
                    del left[output]
                    on[worker].remove(output)
    assert not left
    assert guilty == {poison}
    assert killed == (3 if steps_to_kill else 2)


@settings(max_examples=200)
@given(data=st.data(), num_outputs=st.integers(1, 8))
def test_two_workers_that_are_killed_from_outside_condemn_nobody_for_good(
    data: st.DataObject, num_outputs: int
) -> None:
    """The second dies at any moment of the trials that follow the first one's death."""
    has_given = {output: data.draw(st.booleans()) for output in range(num_outputs)}
    quarantine, verdicts = Quarantine(), list[Verdict]()
    for output in range(num_outputs):
        quarantine.lost(output, "w0", was_begun=True, has_given=has_given[output])
    on = list[int]()
    for _ in range(data.draw(st.integers(0, num_outputs))):
        if (tried := quarantine.next_for("w1")) is not None:
            on.append(tried)  # type: ignore[arg-type]
            if data.draw(st.booleans()):
                quarantine.passed(tried)
                has_given[tried] = True  # type: ignore[index]
    for output in on:
        verdicts.append(quarantine.lost(output, "w1", was_begun=True, has_given=has_given[output]))
    assert set(verdicts) <= {Verdict.SUSPECT, Verdict.ACCUSED}
    assert verdicts.count(Verdict.ACCUSED) <= 1
    while (output := quarantine.next_for("w2")) is not None:  # type: ignore[assignment]
        quarantine.passed(output)
    assert len(quarantine) == 0
