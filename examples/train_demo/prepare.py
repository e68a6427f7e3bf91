"""Corpus in, tokens out: cleans, trains the tokenizer, and writes what `train.py` reads.

    python -m examples.train_demo.prepare --corpus corpus.tar.xz --out build/folio

Writes a folder `tokenizer/` and two archives, train.npz and heldout.npz, with the documents end to end: `tokens`
(uint16), `percent` (uint8, how much each token counts in the loss: 100 for the model's words, 20 for the user's, 0 for
the system turn and the ChatML frame), `ends` (int64, where each document ends) and `sources` (uint8, each document's
index in `names`).
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.train_demo import chats, corpus
from examples.train_demo.corpus import Document
from examples.train_demo.tokenizer import END_OF_TEXT, TURN_END, TURN_START, save_tokenizer, train_tokenizer

VOCAB_SIZE = 6144
CONTEXT_TOKENS = 1024
HELDOUT_EVERY = 50
SOURCES = ("books", "picture_books", "dialogues", "reading", "folio")
SPEAKER_PERCENT = {"system": 0, "user": 20, "assistant": 100}
Piece = tuple[str, int]


def all_documents(archive: Path, *, num_conversations: int, shares: dict[str, int]) -> Iterator[Document]:
    """Every document, in a fixed order. shares: weights of the kinds of exchanges in chats."""
    records = corpus.read_records(archive)
    library = chats.Library(records)
    return itertools.chain(
        corpus.books(records), corpus.picture_books(records), corpus.dialogues(records),
        corpus.reading_questions(records),
        chats.conversations(library, random.Random(7), num_conversations=num_conversations, shares=shares),
    )  # fmt: skip


def pieces(document: Document) -> Iterator[Piece]:
    """The document's text in pieces, each with its percentage in the loss; chats are written as ChatML."""
    if not document.turns:
        yield f"{document.text}{END_OF_TEXT}", 100
        return
    speakers = [("user", "assistant")[i % 2] for i in range(len(document.turns))]
    turns = list(zip(speakers, document.turns, strict=True))
    if document.system:
        turns.insert(0, ("system", document.system))
    for speaker, text in turns:
        yield f"{TURN_START}{speaker}\n", 0
        yield f"{text}{TURN_END}", SPEAKER_PERCENT[speaker]
        yield "\n", 0
    yield END_OF_TEXT, 0


def encode(documents: list[Document], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The arrays of one archive; longer documents are cut to CONTEXT_TOKENS + 1 tokens."""
    tokens, percents, ends, total = [], [], [], 0
    for document in documents:
        texts, weights = zip(*pieces(document), strict=True)
        ids = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch_fast(list(texts))]
        row = np.concatenate(ids)[: CONTEXT_TOKENS + 1]
        percents.append(np.repeat(np.array(weights, np.uint8), [len(i) for i in ids])[: CONTEXT_TOKENS + 1])
        tokens.append(row)
        total += len(row)
        ends.append(total)
    sources = np.array([SOURCES.index(d.source) for d in documents], np.uint8)
    return {
        "tokens": np.concatenate(tokens), "percent": np.concatenate(percents),
        "ends": np.array(ends, np.int64), "sources": sources, "names": np.array(SOURCES),
    }  # fmt: skip


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents: every fiftieth is held out."""
    train: list[Document] = []
    heldout: list[Document] = []
    for index, document in enumerate(documents):
        (heldout if index % HELDOUT_EVERY == 0 else train).append(document)
    return train, heldout


def tokenizer_texts(documents: list[Document]) -> Iterator[str]:
    """The texts that the tokenizer learns from: a third of the documents but a twelfth of Folio's own chats, so that
    these do not outweigh the others."""
    for index, document in enumerate(documents):
        if index % (12 if document.source == "folio" else 3) == 0:
            yield document.text or "\n".join(document.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=110_000)
    parser.add_argument("--start", type=Path, help="a checkpoint to train on: its tokenizer, and mostly short chats")
    args = parser.parse_args()
    shares = chats.SHORT_SHARES if args.start else chats.SHARES
    train, heldout = split(all_documents(args.corpus, num_conversations=args.conversations, shares=shares))
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(tokenizer_texts(train), vocab_size=VOCAB_SIZE)
    save_tokenizer(tokenizer, args.out / "tokenizer", max_len=2 * CONTEXT_TOKENS)
    for name, documents in (("train", train), ("heldout", heldout)):
        arrays = encode(documents, tokenizer)
        np.savez_compressed(args.out / f"{name}.npz", allow_pickle=False, **arrays)
        lens = np.diff(arrays["ends"], prepend=0)
        counts = {source: int(lens[arrays["sources"] == i].sum()) for i, source in enumerate(SOURCES)}
        print(name, len(documents), "documents, tokens by source:", counts)


if __name__ == "__main__":
    main()
