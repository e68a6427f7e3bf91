"""Which faults a soak deals, and how it counts outages."""

import random
from collections import Counter

import grpc

from octavo import OctavoError
from tests.soak.config import FAULTS
from tests.soak.deck import Deck
from tests.soak.faults import Takes
from tests.soak.probes import outages
from tests.support.faults.callers import Call


def dealt(seed: int, rounds: int, may_take: bool = True) -> list[list[str]]:
    deck = Deck(faults=FAULTS, drawn=random.Random(seed))
    return [[each.name for each in deck.deal(lambda _: may_take)] for _ in range(rounds)]


def test_a_seed_always_deals_the_same_and_every_kind_has_its_turn() -> None:
    hands = dealt(1, 60)
    assert hands == dealt(1, 60)
    assert hands != dealt(2, 60)
    assert set(Counter(name for hand in hands for name in hand)) == {each.name for each in FAULTS}


def test_one_fault_a_round_takes_processes_and_none_where_all_are_young() -> None:
    takers = {each.name for each in FAULTS if each.takes is not Takes.NOTHING}
    assert max(len(takers & set(hand)) for hand in dealt(3, 200)) == 1
    assert takers & {name for hand in dealt(3, 200, may_take=False) for name in hand} == set()


def probe(sent_s: float, *, is_served: bool, took_s: float = 0.05) -> Call:
    error = None if is_served else OctavoError("no", code=grpc.StatusCode.UNAVAILABLE)
    return Call(prompt=[3], max_tokens=3, sent_s=sent_s, ended_s=sent_s + took_s, error=error)


def test_an_outage_lasts_from_the_first_call_that_failed_to_the_answer_of_the_next_that_did_not() -> None:
    calls = [probe(n / 10, is_served=n not in (3, 4, 5, 9)) for n in range(10)]
    assert [round(each, 3) for each in outages(calls)] == [0.35, 0.05]
    assert outages([]) == outages([probe(0, is_served=True)]) == []
