"""Reads the public corpus and cleans it into documents: plain stories and chats.

A document carries text only. Tokens, and how often each document is shown, are decided elsewhere (`tokenizer.py`,
`prepare.py`, `train.py`).
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CURLY = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": " - ", "–": "-", "…": "...", "\r": " ", "\t": " "})
JUNK = re.compile(
    r"gutenberg|illustration|copyright|https?:|www\.|transcriber|isbn|^contents|^chapter|\|", re.IGNORECASE
)
FABLE_START = re.compile(r"^(An?|The|There (was|were)|Once|One|Two|Some)\b")
UNFIT = re.compile(r"breast|naughty fingers|avengers|^god$", re.IGNORECASE)
NOT_AN_OPENING = re.compile(r"\b(you|your|u|hi|hello|hey|name|we|song|story)\b|[\[(\"]|user ?[12]", re.IGNORECASE)
NO_NOUNS = {
    "god",
    "heathen",
    "coffin",
    "bier",
    "death",
    "babe",
    "wild",
    "poor",
    "strange",
    "large",
    "while",
    "bit",
    "little",
    "few",
    "long",
    "good",
    "great",
    "second",
    "third",
    "lot",
    "hundred",
    "thousand",
    "dozen",
}
SENTENCE_END = ('."', '!"', '?"', ".", "!", "?")


@dataclass(frozen=True)
class Document:
    """One text to learn. `turns` alternate between user and assistant; a plain story has only `text`."""

    source: str
    turns: tuple[str, ...] = ()
    text: str = ""
    system: str | None = None


def read_records(archive: Path) -> dict[str, list[dict]]:
    """The records of the archive's JSONL files, by file name without the extension."""
    records = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None and member.name.endswith(".jsonl"):
                lines = file.read().decode().splitlines()
                records[Path(member.name).stem] = [json.loads(line) for line in lines]
    return records


def clean(text: str) -> str:
    """The text with plain quotes and dashes and single spaces, without markup or footnote marks."""
    text = text.translate(CURLY).replace("--", " - ")
    text = re.sub(r"\[[^\]]*\]|[_*#]", "", text)
    return re.sub(r"\s+", " ", text).strip()


def paragraphs(text: str) -> list[str]:
    """The cleaned paragraphs that are prose: no headings, pictures, tables or licence text."""
    kept = []
    for raw in re.split(r"\n\s*\n", text):
        paragraph = clean(raw)
        letters = sum(map(str.isalpha, paragraph))
        is_prose = letters > 0.6 * len(paragraph) and sum(map(str.islower, paragraph)) > 0.7 * letters
        if is_prose and len(paragraph) > 20 and not JUNK.search(raw):
            kept.append(paragraph)
    return kept


def passages(text: str, *, max_words: int) -> Iterator[str]:
    """Consecutive paragraphs joined up to about `max_words` words; one line break between paragraphs."""
    held: list[str] = []
    for paragraph in paragraphs(text):
        if held and sum(len(p.split()) for p in [*held, paragraph]) > max_words:
            yield "\n".join(held)
            held = []
        held.append(paragraph)
    if held:
        yield "\n".join(held)


def books(records: dict[str, list[dict]]) -> Iterator[Document]:
    """Long stories and novels for children, cut into passages, from which the model learns English."""
    for name in ("stories_gutenberg_fairytales", "stories_standardebooks", "stories_fairytaleqa"):
        for record in records[name]:
            if "Rhyme" in record["title"] or "Introduction" in record["title"]:
                continue
            for passage in passages(record["text"], max_words=450):
                yield Document("books", text=passage)


def fables(records: dict[str, list[dict]]) -> Iterator[tuple[list[str], str]]:
    """Aesop's one-paragraph fables with their morals: (the animals and things it is about, text)."""
    (record,) = (r for r in records["stories_standardebooks"] if "aesop" in r["source"] and r["title"] == "Fables")
    parts = paragraphs(record["text"])
    for index, part in enumerate(parts[:-2]):
        if not FABLE_START.match(part) or len(part.split()) < 50 or not part.endswith(SENTENCE_END):
            continue
        moral = parts[index + 1] if len(parts[index + 1].split()) < 30 and '"' not in parts[index + 1] else ""
        if FABLE_START.match(parts[index + 2 if moral else index + 1]):
            yield characters(part), f"{part}\n{moral}".strip()


def characters(fable: str) -> list[str]:
    """The nouns that the fable capitalises inside a sentence (a Fox, the Grapes), most frequent first."""
    found = re.findall(r"(?<=[a-z,] )([A-Z][a-z]{2,})\b", fable)
    counts = {word.lower(): found.count(word) for word in found}
    return sorted(counts, key=lambda word: -counts[word])


def storybooks(records: dict[str, list[dict]]) -> Iterator[tuple[str, str]]:
    """Title and text of the short modern picture-book stories (at most 330 words, ending as a story ends)."""
    for record in records["stories_storybooks_ccby"]:
        text = "\n".join(paragraphs(record["text"]))
        is_story = re.search(r"\b(one day|once|long ago|there was|there lived)\b", text[:200], re.IGNORECASE)
        if (
            is_story
            and text.count('"') % 2 == 0
            and not UNFIT.search(record["title"])
            and 60 <= len(text.split()) <= 330
            and text.endswith(SENTENCE_END)
        ):
            yield clean(re.sub(r"\(.*?\)", "", record["title"])), text


def picture_books(records: dict[str, list[dict]]) -> Iterator[Document]:
    """All modern picture books as plain text, the long ones in passages."""
    for record in records["stories_storybooks_ccby"]:
        for passage in passages(record["text"], max_words=450):
            yield Document("picture_books", text=passage)


def dialogues(records: dict[str, list[dict]]) -> Iterator[Document]:
    """Conversations between two people. A system turn says who speaks, so that the model's own voice stays distinct."""
    for record in records["chat_self_dialogue"]:
        system = f"Two friends talk about {record['topic'].replace('_', ' ')}."
        yield from _dialogue("dialogues", record["turns"], system)
    for record in records["chat_synthetic_persona"]:
        yield from _dialogue("dialogues", record["turns"], record["persona"])
    for record in records["chat_taskmaster4"]:
        yield from _dialogue("dialogues", record["turns"], "You work in a coffee shop.")


def _dialogue(source: str, turns: Iterable[str], system: str) -> Iterator[Document]:
    """One dialogue, ending with an answer; nothing if it has a placeholder for a name or an empty turn."""
    cleaned = [clean(turn) for turn in turns]
    cleaned = cleaned[: len(cleaned) // 2 * 2]
    if cleaned and all(cleaned) and not re.search(r"[\[\(]?user ?[12]|\[", " ".join(turns), re.IGNORECASE):
        yield Document(source, turns=tuple(cleaned), system=system)


def reading_questions(records: dict[str, list[dict]]) -> Iterator[Document]:
    """A passage of a fairy tale, a question about it and its answer."""
    for record in records["chat_fairytaleqa"]:
        passage, _, question = record["turns"][0].partition("Question:")
        answer = clean(record["turns"][1]).rstrip(".")
        if question and len(answer.split()) >= 2 and len(passage.split()) < 400:
            answer = answer[0].upper() + answer[1:] + "."
            yield Document("reading", turns=(f"{clean(passage)}\n{clean(question)}", answer))


def chitchat(records: dict[str, list[dict]], replace: dict[str, str]) -> Iterator[Document]:
    """Small talk in one style (caring), some answers replaced by Folio's own."""
    for record in records["chat_chitchat_msft"]:
        ask, answer = map(clean, record["turns"])
        if record["style"] == "caring" and ask and not ask.startswith("editorial"):
            yield Document("chitchat", turns=(ask, replace.get(answer, answer)))


def hard_questions(records: dict[str, list[dict]]) -> Iterator[tuple[str, str]]:
    """Questions that the model cannot answer, as (topic, question): school sums, trivia and programming."""
    for record in records["chat_gsm8k_train"]:
        if len(record["turns"][0].split()) < 40:
            yield "sums", clean(record["turns"][0])
    for record in records["chat_chatterbot"]:
        if record["topic"] in ("trivia", "coding"):
            yield record["topic"], clean(record["turns"][0])


def openings(records: dict[str, list[dict]]) -> Iterator[str]:
    """First turns of dialogues that say or ask something that is not about the listener."""
    for name in ("chat_self_dialogue", "chat_synthetic_persona"):
        for record in records[name]:
            said = clean(record["turns"][0])
            if 4 <= len(said.split()) <= 18 and not NOT_AN_OPENING.search(said):
                yield said


def nouns(records: dict[str, list[dict]]) -> list[str]:
    """Words that the corpus uses at least four times as "a ___.", which people might want a story about."""
    counts: dict[str, int] = {}
    for name in ("stories_gutenberg_fairytales", "stories_standardebooks", "stories_storybooks_ccby"):
        for record in records[name]:
            for word in re.findall(r"\ban? ([a-z]{3,11})[.,;!?]", record["text"]):
                counts[word] = counts.get(word, 0) + 1
    return sorted(word for word, count in counts.items() if count >= 4 and word not in NO_NOUNS)
