"""Stop strings against the naive reading of the whole text."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.gateway.text.stop_matcher import StopMatcher, StopStrings


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The contract, word for word: the stop that is complete first; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def cut(text: str, seed: int) -> list[str]:
    rng, chunks = random.Random(seed), []
    while text:
        size = rng.choice([0, 1, 1, 2, 3, 7])
        chunks.append(text[:size])
        text = text[size:]
    return chunks


def streamed(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher, sent, whole = StopMatcher(StopStrings(stops)), "", ""
    for chunk in chunks:
        whole += chunk
        sent += matcher.feed(chunk)
        expected, match = naive(whole, stops)
        assert matcher.match == match
        if match is not None:
            assert sent == expected
        else:
            assert whole.startswith(sent)
            held = len(whole) - len(sent)
            assert held <= max(map(len, stops)) - 1
            # exactly what could still become a stop string is held back
            assert held == max((n for stop in stops for n in range(len(stop)) if whole.endswith(stop[:n])), default=0)
    return sent + matcher.flush(), matcher.match


ALPHABET = st.text(alphabet="abé🦙", max_size=30)
STOPS = st.lists(st.text(alphabet="abé🦙", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=600)
@given(text=ALPHABET, stops=STOPS, seed=st.integers(0, 10_000))
@example(text="xabcd", stops=["abcd", "bc"], seed=0)
@example(text="ababab", stops=["abab", "bab"], seed=1)
@example(text="aaab", stops=["aab"], seed=2)
def test_streaming_equals_reading_the_whole_text_and_never_holds_back_more_than_it_must(
    text: str, stops: list[str], seed: int
) -> None:
    assert streamed(cut(text, seed), stops) == naive(text, stops)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one STOP two", ["STOP"], ("one ", "STOP")),
        ("one STO", ["STOP"], ("one STO", None)),
        ("abcd", ["abcd", "bc"], ("a", "bc")),  # complete first
        ("xab", ["ab", "xab", "b"], ("", "xab")),  # of those that end there, the longest
        ("你好世界", ["好世"], ("你", "好世")),
        ("👨‍👩‍👧", ["👩"], ("👨‍", "👩")),
        ("STOP", ["STOP"], ("", "STOP")),
    ],
)
def test_cases_that_people_ask_about(text: str, stops: list[str], expected: tuple[str, str | None]) -> None:
    for seed in range(20):
        assert streamed(cut(text, seed), stops) == expected


def test_after_a_match_nothing_more_comes() -> None:
    matcher = StopMatcher(StopStrings(["b"]))
    assert [matcher.feed("abc"), matcher.feed("abc"), matcher.flush()] == ["a", "", ""]
    assert matcher.match == "b"


def test_sixty_four_long_stops_are_matched_in_one_pass() -> None:
    stops = ["x" * 255 + chr(0x4E00 + index) for index in range(64)]
    text = "x" * 1000 + stops[40] + "tail"
    assert streamed([text], stops) == ("x" * 1000, stops[40])


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])
