"""The processor against decoding and searching the whole output at once."""

import codecs
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.streams.output_processor import OutputFormat, OutputProcessor, Piece, StopText
from octavo.gateway.text.pieces import ByteTable
from octavo.gateway.text.stop_matcher import StopStrings
from octavo.wire.messages import TokenLogprobs

# One token a byte for some, several characters or parts of one for others; 0 is an end token, 9 is special.
ROWS = [b"<end>", b"a", b"b", b"ab", b"ba", "é".encode()[:1], "é".encode()[1:], "🦙".encode(), b"\n", b"<special>"]
TABLE = ByteTable(tuple(ROWS), tuple(b"" if index in (0, 9) else row for index, row in enumerate(ROWS)))


def naive(ids: list[int], stops: list[str], min_tokens: int, rows: tuple[bytes, ...]) -> tuple[str, int, str | None]:
    """(text, tokens of the output, stop string): token by token over the whole text, again and again."""
    free = b"".join(rows[token_id] for token_id in ids[:min_tokens])
    for count in range(min_tokens, len(ids) + 1):
        done = b"".join(rows[token_id] for token_id in ids[:count])
        is_last = count == len(ids)
        text = done.decode("utf-8", "replace") if is_last else complete(done)
        start = len(complete(free))
        for end in range(start + 1, len(text) + 1):
            for stop in sorted(stops, key=len, reverse=True):
                if text[start:end].endswith(stop):
                    return text[: end - len(stop)], count, stop
    return b"".join(rows[token_id] for token_id in ids).decode("utf-8", "replace"), len(ids), None


def complete(data: bytes) -> str:
    """The text without an unfinished character at its end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def run(processor: OutputProcessor, ids: list[int], seed: int, stop_token_id: int | None) -> list[Piece]:
    """Feed in random cuts, take at random moments."""
    rng, pieces, start = random.Random(seed), list[Piece | None](), 0
    while start < len(ids):
        size = rng.choice([1, 1, 2, 4])
        processor.feed(ids[start : start + size], None)
        start += size
        if rng.random() < 0.6:
            pieces.append(processor.take())
    if processor.match is None:
        processor.finish(stop_token_id)
    pieces += [processor.take(), processor.take()]
    assert pieces[-1] is None
    return [piece for piece in pieces if piece is not None]


IDS = st.lists(st.integers(1, 9), max_size=20)
STOPS = st.lists(st.sampled_from(["a", "ab", "aba", "bé", "é🦙", "\n\n", "abab", "\ufffd"]), max_size=3)


@settings(max_examples=500)
@given(ids=IDS, stops=STOPS, min_tokens=st.integers(0, 5), seed=st.integers(0, 9999), skips=st.booleans())
def test_pieces_join_to_the_text_of_the_whole_output(
    ids: list[int], stops: list[str], min_tokens: int, seed: int, skips: bool
) -> None:
    rows = TABLE.visible_bytes if skips else TABLE.all_bytes
    processor = OutputProcessor(
        OutputFormat(
            bytes_by_id=rows,
            wants_ids=True,
            stop_strings=StopStrings(stops) if stops else None,
            min_tokens=min_tokens,
        )
    )
    pieces = run(processor, ids, seed, None)
    text, num_tokens, match = naive(ids, stops, min(min_tokens, len(ids)), rows)
    assert "".join(piece.text for piece in pieces) == text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == ids[:num_tokens]
    assert (processor.num_tokens, processor.match) == (num_tokens, match)
    assert sum(piece.num_tokens for piece in pieces) == num_tokens
    assert processor.num_pending == 0


@settings(max_examples=300)
@given(ids=IDS, stops=st.sampled_from([[], ["ab"]]), seed=st.integers(0, 9999))
def test_the_text_of_the_token_that_ended_the_output_is_left_out(ids: list[int], stops: list[str], seed: int) -> None:
    """Whether it arrives in the step of the end or before it, with a piece taken in between or not."""
    stop_ids = frozenset({0, 8})
    ids = [token_id for token_id in ids if token_id not in stop_ids] + [8]
    processor = OutputProcessor(
        OutputFormat(
            bytes_by_id=TABLE.all_bytes,
            wants_ids=False,
            stop_strings=StopStrings(stops) if stops else None,
            stop_ids=stop_ids,
        )
    )
    pieces = run(processor, ids, seed, 8)
    text, _, match = naive(ids[:-1], stops, 0, TABLE.all_bytes)
    assert ("".join(piece.text for piece in pieces), processor.match) == (text, match)


def test_a_possible_end_token_that_was_none_keeps_its_text() -> None:
    processor = OutputProcessor(OutputFormat(bytes_by_id=TABLE.all_bytes, wants_ids=False, stop_ids=frozenset({8})))
    processor.feed([1, 8], None)
    first = processor.take()
    assert first is not None
    assert first.text == "a"
    processor.feed([2], None)
    processor.finish(None)
    last = processor.take()
    assert last is not None
    assert last.text == "\nb"


def test_ids_only_makes_no_text() -> None:
    processor = OutputProcessor(OutputFormat(bytes_by_id=None, wants_ids=True))
    processor.feed([1, 2], None)
    piece = processor.take()
    assert piece is not None
    assert (piece.text, piece.token_ids, piece.num_tokens) == ("", [1, 2], 2)
    assert not processor.gives_text
    processor.finish(None)
    assert processor.take() is None


def test_logprobs_stop_with_the_output() -> None:
    positions = [TokenLogprobs(-float(index), (), ()) for index in range(3)]
    processor = OutputProcessor(
        OutputFormat(bytes_by_id=TABLE.all_bytes, wants_ids=False, stop_strings=StopStrings(["b"]))
    )
    processor.feed([1, 2, 1], positions)
    piece = processor.take()
    assert piece is not None
    assert piece.logprobs == [(1, positions[0]), (2, positions[1])]
    assert (piece.text, processor.match) == ("a", "b")
    processor.feed([1], [positions[0]])
    assert (processor.take(), processor.num_tokens) == (None, 2)


@pytest.mark.parametrize(
    ("stop_text", "stops", "text", "match"),
    [
        (StopText.INCLUDED, ["ba"], "aba", "ba"),  # the stop token's own text completes it
        (StopText.INCLUDED, ["abab"], "aba", None),
        (StopText.LEFT_OUT, ["ba"], "a", None),
    ],
)
def test_a_stop_string_that_the_stop_token_completes_is_in_the_text_where_that_is_wanted(
    stop_text: StopText, stops: list[str], text: str, match: str | None
) -> None:
    output_format = OutputFormat(
        bytes_by_id=ROWS,
        wants_ids=False,
        stop_strings=StopStrings(stops),
        stop_ids=frozenset({4}),
        stop_text=stop_text,
    )
    processor = OutputProcessor(output_format)
    pieces = run(processor, [1, 4], seed=0, stop_token_id=4)
    assert ("".join(piece.text for piece in pieces), processor.match) == (text, match)
