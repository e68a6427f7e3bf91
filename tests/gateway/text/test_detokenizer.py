"""Incremental detokenizing against decoding everything at once, by the tokenizers library itself."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from octavo.gateway.streams.output_processor import Detokenizer
from octavo.gateway.text.errors import UnsupportedTokenizer
from octavo.gateway.text.model_text import ModelText
from octavo.gateway.text.pieces import byte_alphabet, byte_level_config, token_bytes
from tests.support.gateway.tokenizers_tiny import tiny_files

PIECES = [
    *("你好，世界。", "春眠不觉晓，处处闻啼鸟", "日本語のテキスト", "한국어 텍스트", "ภาษาไทย", "हिन्दी", "العربية"),
    *("🦙", "🚀🚀", "👨\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "😶\u200d🌫️", "👍🏽", "e\u0301", "a\u0308\u0301"),
    *("ﷺ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "\U0010ffff", "\u200d", "\ufffd", "☃", "½ Äpfel"),
    *("def f(x):\n    return {x: [i**2 for i in range(x)]}\n", "for (int i = 0; i < n; ++i) { s += a[i]; }"),
    *("\t\t\n\n  \r\n", "<|im_end|>", "<tool_call>", "The quick brown fox", " 3.14159", "'s"),
]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))


def cut(ids: list[int], rng: random.Random) -> list[list[int]]:
    chunks, start = [], 0
    while start < len(ids):
        size = rng.choice([1, 1, 1, 2, 3, 5, 8, 40])
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def streamed(chunks: list[list[int]], table: tuple[bytes, ...]) -> str:
    detokenizer = Detokenizer(table)
    pieces = [detokenizer.feed(chunk) for chunk in chunks]
    return "".join([*pieces, detokenizer.flush()])


def test_two_thousand_texts_stream_as_they_decode_whole_however_they_are_cut(
    qwen_text: ModelText, qwen_files: dict[str, bytes]
) -> None:
    tokenizer, rng = Tokenizer.from_buffer(qwen_files["tokenizer.json"]), random.Random(2)
    for _ in range(2000):
        ids = tokenizer.encode(random_text(rng), add_special_tokens=False).ids
        for skip, table in ((False, qwen_text.table.all_bytes), (True, qwen_text.table.visible_bytes)):
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            assert streamed([[token_id] for token_id in ids], table) == whole
            assert streamed(cut(ids, rng), table) == whole
            assert streamed([ids], table) == whole


def test_every_way_of_cutting_a_short_text(qwen_text: ModelText, qwen_files: dict[str, bytes]) -> None:
    tokenizer = Tokenizer.from_buffer(qwen_files["tokenizer.json"])
    ids = tokenizer.encode("a👨\u200d👩\u200d👧 ½𝔘", add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert 8 <= len(ids) <= 16
    for mask in range(2 ** (len(ids) - 1)):
        chunks = [[ids[0]]]
        for index, token_id in enumerate(ids[1:]):
            if mask >> index & 1:
                chunks.append([token_id])
            else:
                chunks[-1].append(token_id)
        assert streamed(chunks, qwen_text.table.all_bytes) == whole


def test_no_piece_ever_has_a_part_of_a_character(qwen_text: ModelText) -> None:
    rng = random.Random(3)
    for _ in range(200):
        text = random_text(rng).replace("\ufffd", "")
        detokenizer = Detokenizer(qwen_text.table.all_bytes)
        pieces = [detokenizer.feed([token_id]) for token_id in qwen_text.encode(text, max_bytes=1 << 20).ids_T.tolist()]
        assert not any("\ufffd" in piece for piece in pieces)
        assert detokenizer.flush() == ""


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 151_700), max_size=30), seed=st.integers(0, 1000))
def test_any_ids_at_all_decode_as_the_library_does(
    qwen_text: ModelText, qwen_tokenizer: Tokenizer, ids: list[int], seed: int
) -> None:
    ids = [token_id for token_id in ids if token_id < len(qwen_text.table.all_bytes)]
    for skip, table in ((False, qwen_text.table.all_bytes), (True, qwen_text.table.visible_bytes)):
        assert streamed(cut(ids, random.Random(seed)), table) == qwen_tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300)
@given(data=st.binary(max_size=24), seed=st.integers(0, 1000))
def test_any_bytes_at_all_are_replaced_as_the_library_does(tiny_text: ModelText, data: bytes, seed: int) -> None:
    tokenizer = Tokenizer.from_buffer(tiny_files()["tokenizer.json"])
    of_byte = {byte: tokenizer.token_to_id(character) for character, byte in byte_alphabet().items()}
    ids = [of_byte[byte] for byte in data]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert streamed(cut(ids, random.Random(seed)), tiny_text.table.all_bytes) == whole
    assert whole == data.decode("utf-8", "replace")


def test_a_text_that_ends_inside_a_character_is_flushed_as_one_replacement(tiny_text: ModelText) -> None:
    table = tiny_text.table.all_bytes
    of_byte = {row[0]: token_id for token_id, row in enumerate(table) if len(row) == 1}
    detokenizer = Detokenizer(table)
    pieces = [detokenizer.feed([of_byte[byte]]) for byte in "é".encode() + "🦙".encode()[:3]]
    assert pieces == ["", "é", "", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_added_tokens_outside_the_alphabet_keep_their_own_bytes() -> None:
    assert token_bytes("Ġa") == b" a"
    assert token_bytes("<|im_end|>") == b"<|im_end|>"
    assert token_bytes("two words") == b"two words"
    assert token_bytes("é") == b"\xe9"  # as the library does: é stands for a byte
    assert len(byte_alphabet()) == 256 == len(set(byte_alphabet().values()))


@pytest.mark.parametrize(
    "source",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"model": {"type": "WordPiece"}, "decoder": {"type": "WordPiece"}}',
        b'{"model": {"type": "BPE", "byte_fallback": true}, "decoder": {"type": "ByteLevel"}}',
        b'{"model": {"type": "BPE"}, "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}',
        b'{"model": {"type": "BPE"}, "decoder": null}',
        b'{"model": [], "decoder": {"type": "ByteLevel"}}',
        b'{"model": {"type": "BPE"}, "decoder": "ByteLevel"}',
        b'{"model": {"type": "BPE"}, "decoder": {"type": "Sequence", "decoders": ["ByteLevel"]}}',
        b'{"model": {"type": "BPE"}, "decoder": {"type": "Sequence", "decoders": null}}',
        b'{"model": {"type": "BPE", "continuing_subword_prefix": "##"}, "decoder": {"type": "ByteLevel"}}',
    ],
)
def test_tokenizers_that_are_not_byte_level_are_refused(source: bytes) -> None:
    with pytest.raises(UnsupportedTokenizer):
        byte_level_config(source)


def test_a_bundle_without_or_with_a_broken_tokenizer_is_refused() -> None:
    for files in ({}, {"tokenizer.json": b'{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}'}):
        with pytest.raises(UnsupportedTokenizer):
            ModelText(files, num_ids=10)
