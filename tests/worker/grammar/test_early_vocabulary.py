"""A vocabulary that was read while kernels were compiled is not read again."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.grammar.errors import GrammarRefused
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.worker.grammar import manager
from octavo.worker.grammar.manager import EarlyVocabulary
from octavo.worker.loading.model_card import Described, describe


@pytest.fixture
def described() -> Described:
    return describe(resolve_checkpoint("folio-chat"))


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read, counts = manager.load_vocabulary, list[int]()

    def count(files: dict[str, bytes], **named: Any) -> Any:
        counts.append(len(files))
        return read(files, **named)

    monkeypatch.setattr(manager, "load_vocabulary", count)
    return counts


def loaded_of(described: Described) -> Any:
    card = SimpleNamespace(vocab_size=described.vocab_size, eos_token_ids=described.eos_token_ids)
    return SimpleNamespace(tokenizer_files=described.files, card=card)


def test_what_was_read_early_is_the_vocabulary_of_that_model(described: Described, num_read: list[int]) -> None:
    early = EarlyVocabulary()
    early.read(described)
    vocabulary = early.of(loaded_of(described))
    assert vocabulary.vocab_size == described.vocab_size
    assert len(num_read) == 1
    early.of(loaded_of(replace(described, files=dict(described.files))))
    assert len(num_read) == 2, "another model's, or one that was not read early"


def test_a_tokenizer_that_is_not_supported_stops_no_start(described: Described, num_read: list[int]) -> None:
    bad = replace(described, files=described.files | {"tokenizer.json": b"[]"})
    early = EarlyVocabulary()
    early.read(bad)
    with pytest.raises(GrammarRefused):
        early.of(loaded_of(bad))
    assert len(num_read) == 2
