"""Compiled grammars that a worker keeps: within both bounds, and the ones that are asked for."""

from typing import Any, cast

import pytest

from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.grammar.compiler import GrammarCache, estimated_bytes
from octavo.worker.grammar.matcher import GrammarMatcher

SIZE = estimated_bytes(Grammar(kind=GrammarKind.REGEX, source="a"))


class Compiled:
    """Stands for a matcher at its beginning."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fork(self) -> "Compiled":
        """One for another output."""
        return Compiled(self.name)


def regex(name: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, source=name)


def put(cache: GrammarCache, *names: str) -> None:
    for name in names:
        cache.put(regex(name), cast(GrammarMatcher, Compiled(name)))


def kept(cache: GrammarCache, names: str) -> str:
    return "".join(name for name in names if cache.get(regex(name)) is not None)


def test_every_request_gets_a_matcher_of_its_own() -> None:
    cache = GrammarCache(max_entries=2, max_bytes=10 * SIZE)
    put(cache, "a")
    found: list[Any] = [cache.get(regex("a")), cache.get(regex("a")), cache.get(regex("b"))]
    assert [each and each.name for each in found] == ["a", "a", None]
    assert found[0] is not found[1]
    assert (cache.num_hits, cache.num_misses) == (2, 1)


def test_the_least_recently_used_goes_first() -> None:
    cache = GrammarCache(max_entries=3, max_bytes=100 * SIZE)
    put(cache, "a", "b", "c")
    cache.get(regex("a"))
    put(cache, "d")
    assert kept(cache, "abcd") == "acd"
    assert (len(cache), cache.num_bytes) == (3, 3 * SIZE)


def test_bytes_bound_it_too_and_are_given_back() -> None:
    cache = GrammarCache(max_entries=100, max_bytes=3 * SIZE)
    for turn in range(3):
        put(cache, *"abcdef")
        assert (kept(cache, "abcdef"), cache.num_bytes) == ("def", 3 * SIZE), turn


def test_a_grammar_that_two_requests_compiled_at_once_counts_once() -> None:
    cache = GrammarCache(max_entries=100, max_bytes=3 * SIZE)
    put(cache, "a", "a", "b")
    assert (len(cache), cache.num_bytes) == (2, 2 * SIZE)


@pytest.mark.parametrize(("max_entries", "max_bytes"), [(0, 10 * SIZE), (10, SIZE - 1)])
def test_what_does_not_fit_at_all_is_not_kept(max_entries: int, max_bytes: int) -> None:
    cache = GrammarCache(max_entries=max_entries, max_bytes=max_bytes)
    put(cache, "a")
    assert (len(cache), cache.num_bytes, kept(cache, "a")) == (0, 0, "")


def test_a_large_grammar_pushes_no_others_out_if_it_cannot_be_kept() -> None:
    cache = GrammarCache(max_entries=10, max_bytes=2 * SIZE)
    put(cache, "a", "b" * SIZE, "c")
    assert kept(cache, "ac") == "ac"
