"""The oracle's own tokenizer: real libraries read it, and every text survives it."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from octavo.worker.runners.oracle.tokenizer import END_TOKEN_ID, MIN_VOCAB_SIZE, oracle_tokenizer_files

TOKENIZER = Tokenizer.from_str(oracle_tokenizer_files(1000)["tokenizer.json"].decode())


@given(st.text(max_size=40))
@settings(max_examples=100)
def test_every_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_the_marks_of_a_chat_are_single_ids() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>").ids
    assert (ids[0], ids[-1], len(ids)) == (1, END_TOKEN_ID, 1 + len("user\nhi") + 1)


def test_it_has_as_many_ids_as_the_oracle() -> None:
    assert TOKENIZER.get_vocab_size() == 1000
    small = json.loads(oracle_tokenizer_files(10)["tokenizer.json"])
    assert len(small["model"]["vocab"]) == MIN_VOCAB_SIZE


def test_ids_past_the_bytes_are_words() -> None:
    assert TOKENIZER.decode([MIN_VOCAB_SIZE, MIN_VOCAB_SIZE + 1]) == " w0 w1"
