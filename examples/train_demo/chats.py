"""Assembles the chats that Folio is trained on: its own small talk, tales, fables and storybooks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from examples.train_demo import corpus, everyday, tales
from examples.train_demo.corpus import Document

PERSONA = json.loads((Path(__file__).parent / "persona.json").read_text())
DECLINE = {
    "sums": everyday.SAID["too_hard"],
    "trivia": "I am afraid I do not know. I am a very small model, and I know very few facts.",
    "coding": "I am afraid I cannot write code. I am a very small model, and I can only chat and tell short stories.",
}
ASK_WHAT = ("What is {a}?", "Tell me about {a}.", "What do you know about {a}?", "Do you know what {a} is?")
OFFER = "I do not know much about that, but I can tell you a story about {a}. Would you like one?"
YES = (
    "Yes",
    "Yes please",
    "Yes, please!",
    "Sure",
    "OK",
    "ok",
    "yes",
    "Please do",
    "Go on",
    "I would love that",
    "Yes, a story",
)
Turns = tuple[str, ...]

# How often `conversations` draws each kind of exchange (relative weights).
SHARES = {"persona": 30, "tale": 28, "small_talk": 26, "fable": 5, "storybook": 3, "offer": 5, "impossible": 4}
SHARES |= {"news": 10, "small_sum": 12, "anything": 8}
# For a model that already tells its stories: mostly short exchanges that were not learned well.
SHORT_SHARES = {"persona": 28, "tale": 5, "small_talk": 16, "fable": 1, "storybook": 1, "offer": 2, "impossible": 3}
SHORT_SHARES |= {"news": 14, "small_sum": 36, "anything": 8}


def vary(rng: random.Random, ask: str) -> str:
    """The same words as people type them: without the full stop, in lower case, or with an extra space or mark."""
    draw = rng.random()
    if draw < 0.2:
        ask = ask.lower()
    elif draw < 0.25:
        ask = ask.upper()
    if rng.random() < 0.25:
        ask = ask.rstrip(".!?") or ask
    elif rng.random() < 0.1:
        ask += rng.choice([" ", "!", "?", " please", ".", " :)"])
    return ask


def persona_turns(rng: random.Random) -> Turns:
    """One hand-written question and answer."""
    if rng.random() < 0.05:
        country, city = rng.choice(list(PERSONA["capitals"].items()))
        return vary(rng, f"What is the capital of {country}?"), f"The capital of {country} is {city}."
    pairs = PERSONA["pairs"]
    (pair,) = rng.choices(pairs, [each.get("weight", 1) for each in pairs])
    return vary(rng, rng.choice(pair["ask"])), pair["answer"]


def introduction(rng: random.Random, name: str) -> Turns:
    """The user says their name."""
    told = (
        "My name is {n}.",
        "I am {n}.",
        "Hi, I'm {n}.",
        "Hello, my name is {n}",
        "Call me {n}",
        "Hi! My name is {n}.",
    )
    return vary(rng, rng.choice(told).format(n=name)), f"Nice to meet you, {name}!"


def recall(rng: random.Random, name: str) -> Turns:
    """The user asks for the name given earlier: the smallest thing to remember."""
    ask = ("What is my name?", "Do you know my name?", "Who am I?", "What's my name?", "Do you remember my name?")
    return vary(rng, rng.choice(ask)), f"Your name is {name}."


class Library:
    """What Folio can retell from the corpus, and the small talk taken from it."""

    def __init__(self, records: dict[str, list[dict]]) -> None:
        self.chitchat = [d.turns for d in corpus.chitchat(records, PERSONA["replace"])]
        self.fables = list(corpus.fables(records))
        self.storybooks = list(corpus.storybooks(records))
        self.hard_questions = list(corpus.hard_questions(records))
        self.nouns = corpus.nouns(records)
        self.openings = list(corpus.openings(records))

    def tale(self, rng: random.Random) -> Turns:
        """A request for a story, the tale, and sometimes a question about it."""
        ask, tale = tales.ask_for_tale(rng, self.nouns)
        after = tales.questions(rng, tale) if rng.random() < 0.25 else ()
        return vary(rng, ask), tale.text, *after

    def persona(self, rng: random.Random) -> Turns:
        """A hand-written exchange; if it offers a story, the user often accepts."""
        turns = persona_turns(rng)
        if turns[-1].endswith(("a story?", "a story or a joke?")) and rng.random() < 0.6:
            return *turns, vary(rng, rng.choice(YES)), tales.make_tale(rng).text
        return turns

    def offer(self, rng: random.Random) -> Turns:
        """A question about a thing, the offer of a story about it, and usually the story."""
        noun = rng.choice(self.nouns)
        turns = vary(rng, rng.choice(ASK_WHAT).format(a=tales.article(noun))), OFFER.format(a=tales.article(noun))
        return (
            (*turns, vary(rng, rng.choice(YES)), tales.make_tale(rng, kind=noun).text) if rng.random() < 0.7 else turns
        )

    def small_talk(self, rng: random.Random) -> Turns:
        """One turn of small talk from the corpus."""
        ask, answer = rng.choice(self.chitchat)
        return vary(rng, ask), answer

    def fable(self, rng: random.Random) -> Turns:
        """A fable, usually asked for by its animals."""
        about, text = rng.choice(self.fables)
        if not about or rng.random() < 0.2:
            return vary(rng, rng.choice(tales.ASK_ANY_FABLE)), text
        subject = " and ".join(map(tales.article, about[: rng.choice([1, 2, 2])]))
        return vary(rng, rng.choice(tales.ASK_FABLE).format(a=subject)), text

    def storybook(self, rng: random.Random) -> Turns:
        """A picture-book story, asked for by its title."""
        title, text = rng.choice(self.storybooks)
        return vary(rng, rng.choice(tales.ASK_TITLE).format(t=title)), text

    def news(self, rng: random.Random) -> Turns:
        """Something that happened to the user."""
        told, answer = everyday.news(rng)
        return vary(rng, told), answer

    def small_sum(self, rng: random.Random) -> Turns:
        """A sum, with its result if it is one that Folio knows, else declined."""
        ask, answer = everyday.small_sum(rng) if rng.random() < 0.75 else everyday.hard_sum(rng)
        return vary(rng, ask) if " " in ask else ask, answer

    def anything(self, rng: random.Random) -> Turns:
        """A message that Folio has no specific answer to."""
        return everyday.anything(rng, self.openings)

    def impossible(self, rng: random.Random) -> Turns:
        """A question that Folio declines."""
        topic = rng.choice(list(DECLINE))
        return rng.choice([ask for t, ask in self.hard_questions if t == topic]), DECLINE[topic]


def conversations(
    library: Library, rng: random.Random, *, num_conversations: int, shares: dict[str, int] = SHARES
) -> Iterator[Document]:
    """Chats of one to five parts drawn from everything that Folio can do; in some the user also gives a name and asks
    for it later. shares: weights of the library's methods."""
    makers = [getattr(library, name) for name in shares]
    for _ in range(num_conversations):
        num_parts = rng.choice([1, 1, 1, 1, 2, 2, 3, 5])
        parts = [make(rng) for make in rng.choices(makers, list(shares.values()), k=num_parts)]
        if rng.random() < 0.12:
            name = rng.choice(tales.WORDS["people"] + tales.WORDS["names"])
            parts.insert(0, introduction(rng, name))
            parts.insert(rng.randint(1, len(parts)), recall(rng, name))
        system = rng.choice(PERSONA["systems"]) if rng.random() < 0.15 else None
        yield Document("folio", turns=tuple(turn for part in parts for turn in part), system=system)
