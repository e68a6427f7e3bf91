"""Why we translate GBNF ourselves: what llguidance's own converter does with the same grammars.

Each case is a text that its grammar takes by llama.cpp's rules (grammars/README.md). When a case fails because the
library has become right, take it out; when none is left, take our translation out
(docs/decisions/0021-hand-written-parts.md).
"""

import pytest
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark as translate_by_library

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.gbnf import gbnf_to_lark
from octavo.grammar.limits import GrammarLimits
from tests.support.grammar.models import oracle_speaker

LIMITS = GrammarLimits()

# The library makes a terminal of each rule without recursion, and of texts and classes; the longest match decides.
CUT_WRONGLY = {
    "two rules, the first of which may take all": ('root ::= a b\na ::= [a-z]*\nb ::= "z"', "aaz"),
    "the same beside recursion": ('root ::= "[" root "]" | a b\na ::= [a-z]*\nb ::= "z"', "[aaz]"),
    "a keyword that a word begins with": ('root ::= "(" root ")" | "if" | [a-z]+ "!"', "(if!)"),
}
# Of these it makes another language, without a word.
MISREAD = {
    "a dot takes the end of a line too": ("root ::= .", "\n"),
    "no class is an intersection": ("root ::= [a&&b]", "&"),
    "no class is a difference": ("root ::= [a~~b]", "~"),
}
# These it refuses, or writes Lark that llguidance refuses.
REFUSED = {
    "a small code point": (r'root ::= "\u0041"', "A"),
    "a large code point in a class": (r"root ::= [\U0001F600-\U0001F64F]", "😀"),
    "a hyphen by an escape": (r"root ::= [a\-z]", "-"),
    "a bracket by an escape": (r'root ::= "\["', "["),
    "a tab in a text": ('root ::= "\t"', "\t"),
    "a name that begins with a digit": ('root ::= 1x\n1x ::= "x"', "x"),
    "a rule that is called start": ('root ::= start\nstart ::= "x"', "x"),
    "repetitions of repetitions": ('root ::= ("a"?)*', "aa"),
    "one after the other": ('root ::= "a"+?', "aa"),
    "an option on the next line": ('root ::= "a"\n  | "b"', "b"),
    "no repetition at all": ('root ::= "a"{0} "b"', "b"),
}
ALL = CUT_WRONGLY | MISREAD | REFUSED


def takes(lark: str, text: str) -> bool:
    """Raises ValueError where llguidance refuses the grammar."""
    tokenizer = oracle_speaker(259).vocabulary().tokenizer
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), limits=LIMITS.for_parser())
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    ids = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", ALL)
def test_ours_takes_what_the_grammar_says(name: str) -> None:
    source, text = ALL[name]
    assert takes(gbnf_to_lark(source, LIMITS), text)


@pytest.mark.parametrize("name", CUT_WRONGLY | MISREAD)
def test_the_library_makes_another_language_of_it(name: str) -> None:
    source, text = ALL[name]
    assert not takes(translate_by_library(source), text)


@pytest.mark.parametrize("name", REFUSED)
def test_the_library_refuses_it(name: str) -> None:
    source, text = ALL[name]
    with pytest.raises(Exception, match=r"."):
        takes(translate_by_library(source), text)


def test_what_is_nested_too_deep_is_refused_by_name_and_not_by_the_interpreter() -> None:
    source = "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000
    with pytest.raises(GrammarRefused) as caught:
        gbnf_to_lark(source, LIMITS)
    assert caught.value.refusal is Refusal.LIMIT
    with pytest.raises(RecursionError):
        translate_by_library(source)


def test_a_rule_that_is_defined_twice_is_refused_where_the_library_takes_the_last() -> None:
    source = 'root ::= "a"\nroot ::= "b"'
    with pytest.raises(GrammarRefused, match="defined twice"):
        gbnf_to_lark(source, LIMITS)
    assert not takes(translate_by_library(source), "a")
    assert takes(translate_by_library(source), "b")
