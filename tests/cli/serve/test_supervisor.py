import pytest

from octavo.cli.serve.parent import EXIT_DRAINED
from octavo.cli.serve.supervisor import Drained, GiveUp, Restart, RestartHistory, RestartPolicy, ending

POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=5.0, fast_death_s=30.0)


def alive(*, ready: bool = True) -> RestartHistory:
    history = RestartHistory(name="worker-0", policy=POLICY)
    history.on_start(100.0)
    if ready:
        history.on_ready()
    return history


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("code", [0, -15, -2])
def test_a_process_that_an_operator_asked_to_end_is_started_again(code: int, ready: bool) -> None:
    history = alive(ready=ready)
    assert history.on_exit(code, 101.0) == Restart(delay_s=1.0)
    history.on_start(102.0)
    assert history.on_exit(code, 103.0) == Restart(delay_s=2.0)


@pytest.mark.parametrize("ready", [True, False])
def test_a_gateway_that_an_operator_drained_stays_away(ready: bool) -> None:
    assert alive(ready=ready).on_exit(EXIT_DRAINED, 101.0) == Drained()


def test_a_process_that_dies_before_it_was_ready_is_given_up_at_once() -> None:
    decision = alive(ready=False).on_exit(1, 101.0)
    assert decision == GiveUp(why="worker-0 ended with exit code 1 before it was ready")


def test_fast_deaths_wait_twice_as_long_each_time_up_to_the_limit_and_never_end_what_has_served() -> None:
    history, decisions = alive(), []
    for start_s in (100.0, 110.0, 120.0, 130.0, 140.0):
        history.on_start(start_s)
        decisions.append(history.on_exit(-9, start_s + 5))
    assert decisions == [Restart(delay_s=delay) for delay in (1.0, 2.0, 4.0, 5.0, 5.0)]
    assert {history.on_exit(-9, 145.0) for _ in range(100)} == {Restart(delay_s=5.0)}


def test_a_long_life_makes_the_deaths_before_it_forgotten() -> None:
    history = alive()
    for _ in range(4):
        history.on_start(100.0)
        history.on_exit(-11, 101.0)
    history.on_start(200.0)
    assert history.on_exit(-11, 300.0) == Restart(delay_s=1.0)
    history.on_start(400.0)
    assert history.on_exit(-11, 401.0) == Restart(delay_s=1.0)


def test_a_life_of_exactly_the_limit_is_not_fast() -> None:
    history = alive()
    assert history.on_exit(1, 130.0) == Restart(delay_s=1.0)
    assert history.num_fast_deaths == 0


@pytest.mark.parametrize(("code", "words"), [(-9, "was killed by signal 9"), (3, "ended with exit code 3")])
def test_an_ending_is_told_in_words(code: int, words: str) -> None:
    assert ending(code) == words
