"""Routing: prefix, then load, and a guard against hot prefixes."""

from octavo.gateway.workers.router import Candidate, RouteReason, choose


def worker(incarnation: int, load: float = 0.0, cached: int = 0) -> Candidate:
    return Candidate(incarnation=incarnation, load=load, cached_tokens=cached)


def test_the_only_worker_is_chosen_however_busy() -> None:
    assert choose([worker(1, load=9.0)], turn=5) == (worker(1, load=9.0), RouteReason.ONLY)


def test_the_longest_prefix_wins_over_less_load() -> None:
    candidates = [worker(1, 0.2, cached=64), worker(2, 0.0, cached=32), worker(3)]
    assert choose(candidates, turn=0) == (candidates[0], RouteReason.PREFIX)


def test_without_a_prefix_the_least_load_wins() -> None:
    candidates = [worker(1, 0.2), worker(2, 0.1), worker(3, 0.3)]
    assert choose(candidates, turn=0) == (candidates[1], RouteReason.LOAD)


def test_among_equal_prefixes_the_least_load_wins() -> None:
    candidates = [worker(1, 0.2, cached=64), worker(2, 0.1, cached=64), worker(3)]
    assert choose(candidates, turn=0) == (candidates[1], RouteReason.PREFIX)


def test_equals_take_turns() -> None:
    candidates = [worker(1), worker(2), worker(3)]
    assert [choose(candidates, turn=turn)[0].incarnation for turn in range(6)] == [1, 2, 3, 1, 2, 3]


def test_a_hot_prefix_does_not_pin_its_traffic_to_a_busy_worker() -> None:
    hot, idle = worker(1, 0.26, cached=1024), worker(2, 0.0)
    assert choose([hot, idle], turn=0) == (idle, RouteReason.BALANCE)
    assert choose([worker(1, 0.25, cached=1024), idle], turn=0)[0].incarnation == 1


def test_where_all_are_busy_the_prefix_counts_again() -> None:
    candidates = [worker(1, 1.7, cached=1024), worker(2, 1.0)]
    assert choose(candidates, turn=0) == (candidates[0], RouteReason.PREFIX)


def test_the_second_best_prefix_is_better_than_none() -> None:
    candidates = [worker(1, 2.0, cached=1024), worker(2, 0.1, cached=512), worker(3, 0.0)]
    assert choose(candidates, turn=0) == (candidates[1], RouteReason.BALANCE)


def test_a_stream_of_one_hot_prompt_spreads_by_itself() -> None:
    loads, cached = {1: 0, 2: 0, 3: 0, 4: 0}, {1: 64}
    for turn in range(400):
        candidates = [worker(each, loads[each] / 64, cached.get(each, 0)) for each in loads]
        chosen = choose(candidates, turn=turn)[0].incarnation
        loads[chosen] += 1
        cached[chosen] = 64  # it has computed the prefix now
    assert max(loads.values()) <= 1.5 * min(loads.values()) + 0.25 * 64
