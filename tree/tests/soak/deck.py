"""Which faults come, and when: a shuffled deck, so that every kind has its turn whatever the seed. Pure."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.soak.faults import Fault, Takes

CARDS = 4  # of a fault of weight 1
MOST_A_ROUND = 3


@dataclass(slots=True, kw_only=True)
class Deck:
    """One of at most one fault a round takes processes."""

    faults: Sequence[Fault]
    drawn: random.Random
    cards: list[Fault] = field(default_factory=list)

    def deal(self, may_take: Callable[[Takes], bool]) -> list[Fault]:
        """The faults of a round. may_take: whether those processes have lived long enough."""
        wanted = self.drawn.randrange(1, MOST_A_ROUND + 1)
        hand, aside = list[Fault](), list[Fault]()
        for _ in range(2 * len(self.faults)):
            if len(hand) == wanted:
                break
            card = self._next()
            is_free = card.takes is Takes.NOTHING
            if not is_free and (any(each.takes is not Takes.NOTHING for each in hand) or not may_take(card.takes)):
                aside.append(card)
            else:
                hand.append(card)
        self.cards += aside
        return hand

    def _next(self) -> Fault:
        if not self.cards:
            self.cards = [each for each in self.faults for _ in range(max(1, round(each.weight * CARDS)))]
            self.drawn.shuffle(self.cards)
        return self.cards.pop(0)
