"""Texts are cut where their pieces have the tokens of the whole, and the fewest tokens of a text are known."""

import copy
import json
import random
import re
import unicodedata
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from octavo.gateway.text.errors import TooManyTokens
from octavo.gateway.text.model_text import Bounds, ModelText, finish
from octavo.gateway.text.pieces import DIGITS, LETTERS, NFC_SHRINKS, QWEN2_WORDS, SIGNS, TextPieces
from tests.support.gateway.tokenizers_tiny import tiny_files

EVERY = [chr(code) for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF]
WORDS = [
    *(
        "Hello",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "it's",
        "中文字",
        "，",
        "。",
        "é",
        "e\u0301",
        "\u0301",
        "\u212b",
    ),
    *(
        "12",
        "3",
        "٣",
        "½",
        "...",
        "!?",
        "<|",
        "|>",
        "im_end",
        "<|im_end|>",
        "<|im_start|>",
        "<tool_call>",
        "<tool_",
        "call>",
    ),
    *(
        "\u1100\u1161",
        "\u11a8",
        "각",
        "ß",
        "ſ",
        "\u00a0",
        "\u3000",
        "🦙",
        "\u200d",
        "a b",
        "-",
        "_",
        "X1",
        "\x00",
        "\u0378",
    ),
]


def of_class(characters: str) -> list[str]:
    return [each for each in EVERY[:0x10000] if re.fullmatch(f"[{characters}]", each)]


def gpt2_config() -> dict[str, Any]:
    config = json.loads(tiny_files()["tokenizer.json"])
    config["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return dict(config)


def test_what_cuts_are_made_of_is_left_alone_by_nfc_whatever_stands_before_it() -> None:
    seconds = set()
    for each in EVERY:
        parts = unicodedata.decomposition(each).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            seconds.add(chr(int(parts[1], 16)))
    seconds |= {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A7, 0x11C3))}  # Hangul composes by arithmetic
    for each in [*of_class(LETTERS), *of_class(DIGITS), *of_class(SIGNS), *" \t\r\n"]:
        assert unicodedata.normalize("NFC", each) == each
        assert unicodedata.combining(each) == 0
        assert each not in seconds


def test_what_cuts_are_made_of_is_what_the_regular_expressions_take_it_for() -> None:
    for pattern, characters in (
        (r"\p{L}", of_class(LETTERS)),
        (r"\p{N}", of_class(DIGITS)),
        (r"[^\s\p{L}\p{N}]", of_class(SIGNS)),
        (r"\s", list(" \t\r\n")),
    ):
        split = pre_tokenizers.Split(Regex(pattern), "removed")
        assert not [each for each in characters if split.pre_tokenize_str(each)]


def test_nfc_makes_no_text_shorter_than_it_is_said() -> None:
    longest_of: dict[str, int] = {}  # by decomposition, the most bytes of a character that has it
    for each in EVERY:
        decomposed = unicodedata.normalize("NFD", each)
        longest_of[decomposed] = max(longest_of.get(decomposed, 0), len(each.encode()))
    for each in EVERY:
        if unicodedata.normalize("NFC", each) == each:
            decomposed, most = unicodedata.normalize("NFD", each), [0]
            for end in range(1, len(decomposed) + 1):
                most.append(max(most[s] + longest_of.get(decomposed[s:end], -99) for s in range(end)))
            assert most[-1] <= NFC_SHRINKS * len(each.encode()), each


def cut_everywhere(pieces: TextPieces, text: str) -> list[str]:
    found = list(pieces.split(text, size=1))
    assert "".join(found) == text
    return found


@pytest.mark.parametrize("kind", ["qwen2", "qwen2 without NFC", "gpt2"])
def test_pieces_have_the_tokens_of_the_whole(kind: str) -> None:
    config = gpt2_config() if kind == "gpt2" else json.loads(tiny_files()["tokenizer.json"])
    if kind == "qwen2 without NFC":
        config["normalizer"] = None
    tokenizer, plain = (Tokenizer.from_str(json.dumps(config)) for _ in range(2))
    plain.encode_special_tokens = True
    rng, num_pieces = random.Random(kind), 0
    cutters = [(tokenizer, TextPieces.of(config)), (plain, TextPieces.of_plain(config))]
    for _ in range(4000):
        text = "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
        for each, pieces in cutters:
            assert pieces is not None
            found = cut_everywhere(pieces, text)
            ids = [token for piece in found for token in each.encode(piece, add_special_tokens=False).ids]
            assert ids == each.encode(text, add_special_tokens=False).ids, found
            num_pieces += len(found)
    assert num_pieces > 20_000


def test_the_real_tokenizer_too_and_long_texts(qwen_text: ModelText, qwen_tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    for _ in range(6):
        text = "".join(rng.choice(WORDS) for _ in range(12_000))
        assert qwen_text.encode(text, max_bytes=1 << 20).ids_T.tolist() == qwen_tokenizer.encode(text).ids
        whole = qwen_text.encode(text, max_bytes=1 << 20).ids_T
        for keep in (1, 100, 9_000, len(whole), len(whole) + 1):
            kept = finish(qwen_text.encoding(text, Bounds(max_bytes=1 << 20, keep=keep))).ids_T
            assert kept[-keep:].tolist() == whole[-keep:].tolist()
            assert (len(kept) > keep) == (len(whole) > keep)


def test_a_text_without_a_place_to_be_cut_stays_whole() -> None:
    pieces = TextPieces.of(json.loads(tiny_files()["tokenizer.json"]))
    assert pieces is not None
    for text in ("a" * 50_000, "^" * 50_000, " " * 50_000, "中" * 50_000):
        assert list(pieces.split(text, size=100)) == [text]
    assert max(map(len, pieces.split("<|im_end|>" * 5_000, size=100))) <= 110
    assert max(map(len, pieces.split("7" * 50_000, size=100))) == 100
    assert max(map(len, pieces.split("word " * 50_000, size=100))) < 110


def test_nothing_is_claimed_of_tokenizers_that_nothing_is_known_of() -> None:
    good = json.loads(tiny_files()["tokenizer.json"])
    assert TextPieces.of(good) is not None
    changes: list[dict[str, Any]] = [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**gpt2_config()["pre_tokenizer"], "add_prefix_space": True}},
        *({"added_tokens": [{**good["added_tokens"][0], each: True}]} for each in ("lstrip", "rstrip", "single_word")),
        {"added_tokens": [{**good["added_tokens"][0], "normalized": True}]},
        *(
            {"model": {**good["model"], each: value}}
            for each, value in (("dropout", 0.1), ("end_of_word_suffix", "</w>"))
        ),
        {"model": {**good["model"], "vocab": {k: v for k, v in good["model"]["vocab"].items() if k != "Ġ"}}},
    ]
    for key, value in (("pattern", {"Regex": QWEN2_WORDS + "|x"}), ("behavior", "Removed"), ("invert", True)):
        other = copy.deepcopy(good["pre_tokenizer"])
        other["pretokenizers"][0][key] = value
        changes.append({"pre_tokenizer": other})
    for change in changes:
        assert TextPieces.of(good | change) is None, change


def test_no_text_has_fewer_tokens_than_its_bytes_say() -> None:
    files = tiny_files()
    config = json.loads(files["tokenizer.json"])
    config["added_tokens"].append({**config["added_tokens"][0], "id": 600, "content": "é" * 40, "special": False})
    pieces = TextPieces.of(config)
    assert pieces is not None
    assert pieces.max_token_bytes == 80 * NFC_SHRINKS
    text = ModelText({**files, "tokenizer.json": json.dumps(config).encode()}, num_ids=601)
    assert len(text.encode("é" * 40, max_bytes=99).ids_T) == 1
    with pytest.raises(TooManyTokens, match=r"more than 2 prompt tokens .* context of 3 tokens"):
        text.encoding("x" * (2 * 320 + 1), Bounds(max_bytes=1 << 20, max_tokens=2))  # before any step
    steps = text.encoding("x" * (2 * 320), Bounds(max_bytes=1 << 20, max_tokens=2))
    with pytest.raises(TooManyTokens):
        finish(steps)
