"""What people tell and ask a chat model first: sad and good news, small sums in words, and anything else.

Each function but `in_words` returns one exchange. There are few answers, and each kind of message always gets the same
one, so that a model of ten million weights does not mix them up.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SAID = json.loads((Path(__file__).parent / "everyday.json").read_text())
MAX_TERM, MAX_TAKEN_FROM, MAX_FACTOR = 12, 20, 10  # what Folio learns by heart; it declines larger sums


def news(rng: random.Random) -> tuple[str, str]:
    """Something sad or good that happened, or nothing much, and a kind answer."""
    kinds = {"gone": 30, "ill": 11, "away": 7, "trouble": 20, "despair": 5, "joy": 16, "still": 11}
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    words = {"who": rng.choice(SAID["dear"]), "when": rng.choice(SAID["when"])}
    told = rng.choice(SAID[kind]).format(**words)
    return told[0].upper() + told[1:], SAID[f"{kind}_answer"].format(**words)


def in_words(number: int) -> str:
    """The number in words, as `seven` for 7; up to one hundred."""
    if number < 20:
        return str(SAID["number_words"][number])
    tens = str(SAID["tens"][number // 10 - 2])
    return f"{tens}-{SAID['number_words'][number % 10]}" if number % 10 else tens


def small_sum(rng: random.Random) -> tuple[str, str]:
    """A sum that Folio knows by heart, in words or digits, bare or in a little story."""
    (operation,) = rng.choices(("plus", "minus", "times"), (35, 40, 25))
    if operation == "plus":
        a, b = rng.randint(0, MAX_TERM), rng.randint(0, MAX_TERM)
        result, stories = a + b, SAID["more"]
    elif operation == "minus":
        a = rng.randint(0, MAX_TAKEN_FROM)
        b = rng.randint(0, min(a, MAX_TERM))
        result, stories = a - b, SAID["fewer"]
    else:
        a, b = rng.randint(0, MAX_FACTOR), rng.randint(0, MAX_FACTOR)
        result, stories = a * b, []
    shown = rng.choice((in_words, in_words, str))
    if stories and min(a, b) > 1 and rng.random() < 0.35:
        things = rng.choice(SAID["things"])
        ask = rng.choice(stories).format(a=shown(a), b=shown(b), things=things)
        return ask, f"{in_words(a)} {operation} {in_words(b)} is {in_words(result)}.".capitalize()
    ask = rng.choice(SAID["sums"][operation]).format(a=shown(a), b=shown(b))
    return ask[0].upper() + ask[1:], f"{in_words(a)} {operation} {in_words(b)} is {in_words(result)}.".capitalize()


def hard_sum(rng: random.Random) -> tuple[str, str]:
    """A sum that Folio does not know: larger numbers, or a division."""
    operation = rng.choice(tuple(SAID["sums"]))
    beyond = MAX_TAKEN_FROM + 1 if operation == "minus" else MAX_TERM + 1
    most = rng.choice((30, 100, 100, 1000, 10_000))
    a, b = rng.randrange(beyond, most), rng.randrange(beyond, most)
    if operation == "divided by" and rng.random() < 0.5:
        a, b = rng.randint(1, 20), rng.randint(1, 10)
    elif rng.random() < 0.3 and operation != "divided by":
        a, b = (a, rng.randint(1, 9)) if operation == "minus" or rng.random() < 0.5 else (rng.randint(1, 9), a)
    shown = in_words if max(a, b) <= 100 and rng.random() < 0.6 else str
    ask = rng.choice(SAID["sums"][operation]).format(a=shown(a), b=shown(b))
    return ask[0].upper() + ask[1:], SAID["too_hard"]


def anything(rng: random.Random, openings: list[str]) -> tuple[str, str]:
    """Something to explain, or the opening of a dialogue of the corpus, with an answer that fits anything."""
    if rng.random() < 0.3:
        return rng.choice(SAID["explain"]).format(topic=rng.choice(SAID["topics"])), SAID["question_answer"]
    said = rng.choice(openings)
    return said, SAID["question_answer" if said.endswith("?") else "statement_answer"]
