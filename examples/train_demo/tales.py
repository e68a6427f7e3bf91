"""Makes small tales from the grammar in tales.txt, and the many ways in which people ask for a story.

The tales are plain on purpose: a model of ten million weights can learn this much English, keep to a thread for ten
sentences, and bring what was asked for ("a story about a robot") into the story.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).parent
WORDS = json.loads((HERE / "words.json").read_text())
USUAL_SHARE = 0.5
T = TypeVar("T")

ASK_ABOUT = (
    "Tell me a story about {a}.", "Tell me a story about {a}", "Tell me a short story about {a}.",
    "Can you tell me a story about {a}?", "Please tell me a story about {a}.", "Write a story about {a}.",
    "Write a short story about {a}.", "I would like a story about {a}.", "A story about {a}, please.",
    "Do you know a story about {a}?", "Make up a story about {a}.", "I want to hear a story about {a}",
    "Could you tell me a bedtime story about {a}?", "story about {a}", "tell me a tale about {a}",
    "Tell a story of {a}.", "Tell me a funny story about {a}.", "Tell me a long story about {a}.",
    "Now tell me one about {a}.", "And now a story about {a}!", "Give me a nice story about {a}.",
)  # fmt: skip
ASK_ANY = (
    "Tell me a story.", "Tell me a short story.", "Tell me a story!", "Can you tell me a story?",
    "Please tell me a story.", "Tell me a bedtime story.", "Do you know a story?", "Do you know any stories?",
    "I want to hear a story.", "Write a story.", "Write me a short story.", "A story, please.", "story please",
    "Could you tell me a story?", "Tell me something nice.", "Make up a story.", "Tell me another story.",
    "I would like a story.", "Another one, please.", "Tell me another one.", "One more story!",
)  # fmt: skip
ASK_FABLE = (
    "Tell me a fable about {a}.",
    "Tell me the fable of {a}.",
    "Do you know a fable about {a}?",
    "A fable about {a}",
)
ASK_ANY_FABLE = ("Tell me a fable.", "Do you know a fable?", "Tell me one of Aesop's fables.", "A fable, please.")
ASK_TITLE = ('Tell me the story "{t}".', 'Do you know the story "{t}"?', 'Read me "{t}".')


@dataclass(frozen=True)
class Tale:
    """A story, with the details that a listener may ask about afterwards."""

    kind: str
    name: str
    other: str
    friend: str
    text: str


@dataclass(frozen=True)
class Plot:
    """A plot: its sentences, each in several versions, and the themes that it fits."""

    themes: tuple[str, ...]
    sentences: tuple[tuple[str, ...], ...]


def article(noun: str) -> str:
    """The noun with its indefinite article: `a fox`, `an owl`, `a unicorn`."""
    an = noun[0] in "aeio" or (noun[0] == "u" and not noun.startswith("uni"))
    return f"an {noun}" if an else f"a {noun}"


def read_grammar() -> tuple[list[str], list[str], list[Plot]]:
    """Openings, closings and plots of tales.txt."""
    text = re.sub(r"^#.*\n", "", (HERE / "tales.txt").read_text(), flags=re.MULTILINE)
    blocks = [block.splitlines() for block in re.split(r"\n\n+", text.strip())]
    named = {block[0]: block[1:] for block in blocks if block[0].isupper()}
    plots = [
        Plot(tuple(block[0].removeprefix("@ ").split(", ")), tuple(tuple(line.split(" | ")) for line in block[1:]))
        for block in blocks
        if block[0].startswith("@")
    ]
    return named["OPENING"], named["CLOSING"], plots


OPENINGS, CLOSINGS, PLOTS = read_grammar()


def make_tale(
    rng: random.Random,
    *,
    kind: str | None = None,
    other: str | None = None,
    name: str | None = None,
    adjective: str | None = None,
    plot: Plot | None = None,
) -> Tale:
    """A tale; arguments that are None are drawn. Each kind of hero has its usual name, place and plot, so that heroes
    differ."""
    kind = kind or rng.choice(WORDS["kinds"])
    usual = random.Random(kind)
    if plot is None:
        plot = _pick(rng, usual, PLOTS)
    slots = _slots(rng, usual, kind=kind, other=other, name=name, adjective=adjective)
    lines = [_pick(rng, usual, OPENINGS), *(rng.choice(ways) for ways in plot.sentences)]
    if rng.random() < 0.7:
        lines.append(rng.choice(CLOSINGS))
    text = " ".join(line.format(**slots) for line in lines)
    return Tale(kind, slots["name"], slots["other"], slots["friend"], text)


def _pick(rng: random.Random, usual: random.Random, choices: list[T]) -> T:
    """Half of the time what is usual for this kind of hero, else any of the choices."""
    habit = usual.choice(choices)
    return habit if rng.random() < USUAL_SHARE else rng.choice(choices)


def _slots(
    rng: random.Random, usual: random.Random, *, kind: str, other: str | None, name: str | None, adjective: str | None
) -> dict[str, str]:
    """The values of the grammar's placeholders in one tale."""
    usually_she = usual.random() < 0.5
    is_she = kind in WORDS["she"] or (kind not in WORDS["he"] and usually_she)
    if name:
        is_she = name in WORDS["she_names"]
    name = name or _pick(rng, usual, [n for n in WORDS["names"] if (n in WORDS["she_names"]) == is_she])
    other = other or _pick(rng, usual, [w for w in WORDS["others"] if w != kind])
    friend = _pick(rng, random.Random(other), [n for n in WORDS["names"] if n != name])
    adjective = adjective or _pick(rng, usual, WORDS["adjectives"])
    thing = _pick(rng, usual, WORDS["things"])
    he, him, his = ("she", "her", "her") if is_she else ("he", "him", "his")
    drawn = {k[:-1]: _pick(rng, usual, WORDS[k]) for k in ("places", "foods", "skills", "goals", "instruments")}
    return drawn | {
        "kind": kind, "name": name, "a_adj": article(adjective), "friend": friend,
        "he": he, "He": he.title(), "him": him, "his": his, "himself": f"{him}self",
        "other": other, "a_other": article(other), "a_other_cap": article(other).capitalize(),
        "thing": thing, "a_thing": article(thing), "A_thing": article(thing).capitalize(),
    }  # fmt: skip


def ask_for_tale(rng: random.Random, nouns: list[str]) -> tuple[str, Tale]:
    """A request and a tale that answers it. `nouns` are subjects beyond the usual ones."""
    ways = (_ask_any, _ask_kind, _ask_noun, _ask_adjective, _ask_named, _ask_two, _ask_theme)
    (way,) = rng.choices(ways, (20, 35, 15, 7, 6, 12, 5))
    return way(rng, nouns)


def _ask_about(rng: random.Random, subject: str) -> str:
    return rng.choice(ASK_ABOUT).format(a=subject)


def _ask_any(rng: random.Random, nouns: list[str]) -> tuple[str, Tale]:
    return rng.choice(ASK_ANY), make_tale(rng)


def _ask_kind(rng: random.Random, nouns: list[str]) -> tuple[str, Tale]:
    tale = make_tale(rng)
    return _ask_about(rng, article(tale.kind)), tale


def _ask_noun(rng: random.Random, nouns: list[str]) -> tuple[str, Tale]:
    noun = rng.choice(nouns)
    return _ask_about(rng, article(noun)), make_tale(rng, kind=noun)


def _ask_adjective(rng: random.Random, nouns: list[str]) -> tuple[str, Tale]:
    adjective = rng.choice(WORDS["adjectives"])
    tale = make_tale(rng, adjective=adjective)
    return _ask_about(rng, f"{article(adjective)} {tale.kind}"), tale


def _ask_named(rng: random.Random, nouns: list[str]) -> tuple[str, Tale]:
    tale = make_tale(rng, name=rng.choice(WORDS["names"] + WORDS["people"]))
    return _ask_about(rng, f"{article(tale.kind)} {rng.choice(['named', 'called'])} {tale.name}"), tale


def _ask_two(rng: random.Random, nouns: list[str]) -> tuple[str, Tale]:
    kind, other = rng.sample(WORDS["kinds"], 2)
    tale = make_tale(rng, kind=kind, other=other)
    while tale.friend not in tale.text:
        tale = make_tale(rng, kind=kind, other=other)
    return _ask_about(rng, f"{article(kind)} and {article(other)}"), tale


def _ask_theme(rng: random.Random, nouns: list[str]) -> tuple[str, Tale]:
    plot = rng.choice(PLOTS)
    return _ask_about(rng, rng.choice(plot.themes)), make_tale(rng, plot=plot)


def questions(rng: random.Random, tale: Tale) -> tuple[str, str]:
    """One question about a tale that was just told, and its answer."""
    asked = [
        (f"What was the name of the {tale.kind}?", f"The {tale.kind} was called {tale.name}."),
        (f"What was the {tale.kind} called?", f"The {tale.kind} was called {tale.name}."),
        (f"Who was {tale.name}?", f"{tale.name} was the {tale.kind} in the story."),
        ("Who was the story about?", f"The story was about {article(tale.kind)} named {tale.name}."),
    ]
    if tale.friend in tale.text:
        asked.append((f"Who was {tale.friend}?", f"{tale.friend} was the {tale.other} in the story."))
    return rng.choice(asked)
