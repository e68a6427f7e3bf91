"""Which texts each kind of grammar takes, with a tokenizer of single bytes; the references are Python's re and by
hand."""

import json
import re
import time
from functools import cache

import pytest
from llguidance import LLMatcher

from octavo.grammar.check import check_grammar, refused
from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.limits import GrammarLimits
from octavo.grammar.source import to_llguidance
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.grammar.vocabulary import Vocabulary
from tests.support.grammar.models import oracle_speaker

LIMITS = GrammarLimits()


@cache
def vocabulary() -> Vocabulary:
    return oracle_speaker(259).vocabulary()


def takes(kind: GrammarKind, source: str, text: str) -> bool:
    """Whether the text, and nothing less, is complete."""
    grammar = Grammar(kind=kind, source=source)
    check_grammar(grammar, LIMITS)
    matcher = LLMatcher(vocabulary().tokenizer, to_llguidance(grammar, LIMITS), limits=LIMITS.for_parser())
    ids = vocabulary().tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def refusal_of(kind: GrammarKind, source: str) -> Refusal:
    with pytest.raises(GrammarRefused) as caught:
        check_grammar(Grammar(kind=kind, source=source), LIMITS)
    return caught.value.refusal


TEXTS = (
    "",
    "a",
    "b",
    "ab",
    "ba",
    "abc",
    "aab",
    "abab",
    "a1",
    "12",
    "1",
    "é",
    "a\nb",
    "A",
    "foo",
    "foobar",
    "/",
    "a-b",
    "日本",
)


@pytest.mark.parametrize(
    "pattern",
    [
        "a*b", "(ab)+", "[^a]", "a|ab|abc", r"\d{1,2}", r"\w+", r".", r"(?s:.)", "foo(bar)?", "(?i)a", "é|日本", r"\/",
        r"[\w-]+", "(a|b)*a(a|b){1}", "a?b?", r"[\u65e5-\u672c]+", "^ab$", r"\S\s\S",
    ],
)  # fmt: skip
def test_a_regular_expression_takes_what_pythons_takes(pattern: str) -> None:
    # Rust writes \x{…} where Python writes \u….
    rust = re.sub(r"\\u([0-9a-f]{4})", r"\\x{\1}", pattern)
    expected = {text for text in TEXTS if re.fullmatch(pattern, text, re.ASCII)}
    assert {text for text in TEXTS if takes(GrammarKind.REGEX, rust, text)} == expected


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", r"\bx", "[z-a]", "\\", "a\\", "\\\\\\"])
def test_a_regular_expression_that_cannot_be_followed_is_refused(pattern: str) -> None:
    assert refusal_of(GrammarKind.REGEX, pattern) in (Refusal.SYNTAX, Refusal.UNSUPPORTED)


EQUATIONS = r"""
root  ::= (expr "=" term "\n")+          # one a line
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" expr ")"
ident ::= [a-z] [a-z0-9_]*
num   ::= [0-9]+
"""
AMBIGUOUS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws (
             value ("," ws value)*
           )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    AMBIGUOUS: (("a=b\n", "a =b \n", "a+( b1*2)\n =3\n\n", "x=y\nz=1\n"), ("a=b", "(a=3\n", "a=b\n=")),
    'root ::= (a "b")* a\na ::= "x" a "y" | [ab]*': (("", "abab", "xaby", "xyb"), ("xab", "c")),
    'root ::= ("if" | name) " " (root | "end")\nname ::= [a-z]+': (("if end", "i end", "ifx if end"), ("if", "end")),
    EQUATIONS: (("a=b\n", "a+(b1*2)=3\nx=y\n"), ("a=b", "=b\n", "(a=b\n", "A=b\n")),
    JSON: (('{}', '{"a": [1, -2.5e+3, {"b": null}]}', '{"é": "\\u00e9\\""}'), ("[1]", '{"a" 1}', '{"a": 01}', "{")),
    'root ::= "(" root ")" | ""': (("", "()", "((()))"), ("(", "())")),
    'root ::= a\na ::= "x" a | "y"\n  | "z"': (("y", "xxz"), ("x", "xy z")),
    "root ::= ([ \\t\\n] root)?": (("", " \t\n"), ("x",)),
    'root ::= [ab]* "b"': (("b", "aab", "bb"), ("a", "")),
    r'root ::= [^a-c/\]]{2} .': (("dd\n", "é日😀"), ("ad\n", "d]x", "dd")),
    'root ::= "a"? ("b" | ) "\\x41\\u00e9"{2,}': (("AéAé", "abAéAéAé"), ("Aé", "aaAéAé", "Aéé")),
    'root ::= rule-one | Rule_2\nrule-one ::= "1"\nRule_2 ::= [-x]': (("1", "-", "x"), ("2",)),
}  # fmt: skip


@pytest.mark.parametrize("source", GRAMMARS)
def test_a_grammar_takes_what_it_should_and_nothing_else(source: str) -> None:
    good, bad = GRAMMARS[source]
    assert [text for text in good if not takes(GrammarKind.EBNF, source, text)] == []
    assert [text for text in bad if takes(GrammarKind.EBNF, source, text)] == []


@pytest.mark.parametrize(
    "source",
    ['root ::= "a', "root ::= x", 'x ::= "a"', 'root ::= "a" )', "root = x", "root ::= [b-a]", 'root ::= "a"{3,2}',
     'root ::= "\\q"', 'root ::= "a"\nroot ::= "b"', "root ::= []", 'root ::= "a"{x}', ""],
)  # fmt: skip
def test_a_grammar_that_cannot_be_read_is_refused(source: str) -> None:
    assert refusal_of(GrammarKind.EBNF, source) is Refusal.SYNTAX


def test_a_grammar_without_any_text_is_refused_in_words() -> None:
    """What the library says when it compiles ``root ::= root`` is the name of a state of its own."""
    refusal = refused("NoExtensionBias")
    assert (refusal.refusal, str(refusal)) == (
        Refusal.UNSATISFIABLE,
        "nothing can match: its rules never lead to a text",
    )


def test_groups_may_not_be_nested_without_end() -> None:
    assert refusal_of(GrammarKind.EBNF, "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000) is Refusal.LIMIT


@pytest.mark.parametrize("signs", ["?", "*", "{2}", "+?"])
def test_repetitions_may_not_be_nested_without_end(signs: str) -> None:
    assert refusal_of(GrammarKind.EBNF, 'root ::= "a"' + signs * 2_000) is Refusal.LIMIT
    assert refusal_of(GrammarKind.EBNF, 'root ::= root "b" | "a"' + signs * 2_000) is Refusal.LIMIT


@pytest.mark.parametrize(
    "schema", ['{"not": {"$ref": "#/$defs/%d"}}', '{"if": {"$ref": "#/$defs/%d"}, "then": {"required": ["a"]}}']
)
def test_references_may_not_lead_to_others_without_end(schema: str) -> None:
    chain = ", ".join(f'"{index}": {schema % (index + 1)}' for index in range(400))
    source = f'{{"$ref": "#/$defs/0", "$defs": {{{chain}, "400": {{"type": "string"}}}}}}'
    assert refusal_of(GrammarKind.JSON_SCHEMA, source) is Refusal.LIMIT
    tools = f'{{"tools": [{{"name": "f", "parameters": {source}}}]}}'
    assert refusal_of(GrammarKind.TOOL_CALLS, tools) is Refusal.LIMIT


def test_more_than_the_library_takes_is_a_limit() -> None:
    doubled = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40))
    assert refusal_of(GrammarKind.EBNF, f'root ::= r0\n{doubled}\nr40 ::= "a"') is Refusal.LIMIT
    assert refusal_of(GrammarKind.EBNF, "root ::= " + "(" * 60 + '"a"' + ")?" * 60) is Refusal.LIMIT


def test_patterns_nested_deeper_than_the_library_reads_are_a_limit_too() -> None:
    deep = "(" * 260 + "a" + ")" * 260
    assert refusal_of(GrammarKind.REGEX, deep) is Refusal.LIMIT
    assert refusal_of(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": deep})) is Refusal.LIMIT
    assert refusal_of(GrammarKind.JSON_SCHEMA, json.dumps({"not": {"const": "a" * 300}})) is Refusal.LIMIT


HOSTILE = {
    "rules within rules": 'root ::= a0 root | "z"\n'
    + "\n".join(f'a{n} ::= "x" a{n + 1} | [a-z]' for n in range(2000))
    + '\na2000 ::= "y"',
    "many alternatives": "root ::= " + " | ".join(f'[a-z]{{1,{n % 9 + 1}}} root "x{n}"' for n in range(1500)),
    "a long text": 'root ::= "' + "ab" * 30_000 + '" root | "abab"',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_library_would_take_too_long_for_is_refused_at_once(name: str) -> None:
    started_s = time.thread_time()
    assert refusal_of(GrammarKind.EBNF, HOSTILE[name]) is Refusal.LIMIT
    assert time.thread_time() - started_s < 5


def test_choices_are_texts_to_the_letter() -> None:
    options = ["yes", "yes, indeed", 'a"b\\c', "new\nline", "/x/", "é", "<|im_end|>", "\x7f"]
    for text in options:
        assert takes(GrammarKind.CHOICE, json.dumps(options), text)
    for text in ("", "no", "yes,", "new", "e"):
        assert not takes(GrammarKind.CHOICE, json.dumps(options), text)
    assert refusal_of(GrammarKind.CHOICE, "[]") is Refusal.SYNTAX
    assert refusal_of(GrammarKind.CHOICE, '["a", ""]') is Refusal.LIMIT


def test_dates_exist_and_times_are_those_of_a_clock() -> None:
    def taken(format_name: str, *texts: str) -> list[str]:
        schema = json.dumps({"type": "string", "format": format_name})
        return [text for text in texts if takes(GrammarKind.JSON_SCHEMA, schema, f'"{text}"')]

    days = ("2024-02-29", "2023-02-29", "1900-02-29", "2000-02-29", "0000-01-01", "2024-04-31", "2024-12-31")
    assert taken("date", *days) == ["2024-02-29", "2000-02-29", "2024-12-31"]
    assert taken("time", "23:59:59Z", "24:00:00Z", "10:00:60Z", "10:00:00", "08:01:02.5+01:00") == [
        "23:59:59Z",
        "08:01:02.5+01:00",
    ]


def test_no_key_hides_behind_an_escape_and_white_space_ends() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert takes(GrammarKind.JSON_SCHEMA, schema, '{"a": 1, "b": "x"}')
    assert not takes(GrammarKind.JSON_SCHEMA, schema, '{"\\u0061": "x"}')
    assert not takes(GrammarKind.JSON_SCHEMA, schema, '{"a": 1, "a": "x"}')
    assert takes(GrammarKind.JSON_SCHEMA, schema, '{\n    "a": 1\n}')
    assert not takes(GrammarKind.JSON_SCHEMA, schema, '{  "a": 1}')


def test_tools_are_called_in_their_form() -> None:
    loop = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    tools = [{"name": "f", "parameters": loop}, {"name": "g", "parameters": None}]
    one = '<tool_call>\n{"name": "f", "arguments": {"next": {"next": {}}}}\n</tool_call>'
    other = '<tool_call>\n{"name": "g", "arguments": {"any": 1}}\n</tool_call>'
    many, single = json.dumps({"tools": tools}), json.dumps({"tools": tools[:1], "max_calls": 1})
    assert [takes(GrammarKind.TOOL_CALLS, many, text) for text in (one, f"{one}\n{other}", f"{one}{other}")] == [
        True,
        True,
        False,
    ]
    assert [takes(GrammarKind.TOOL_CALLS, single, text) for text in (one, other, f"{one}\n{one}")] == [
        True,
        False,
        False,
    ]
    assert refusal_of(GrammarKind.TOOL_CALLS, '{"tools": []}') is Refusal.SYNTAX
    bad = json.dumps({"tools": [{"name": "f", "parameters": {"properties": {"a": {"contains": {}}}}}]})
    with pytest.raises(GrammarRefused, match=r"tools\[0\]\.parameters\.properties\.a\.contains: is not supported"):
        check_grammar(Grammar(kind=GrammarKind.TOOL_CALLS, source=bad), LIMITS)


@pytest.mark.parametrize("schema", ['{"type": ["object", "null"]}', '{"anyOf": [{"type": "object"}, {}]}', "{}"])
def test_a_call_has_an_object_whatever_else_its_schema_takes(schema: str) -> None:
    tools = f'{{"tools": [{{"name": "f", "parameters": {schema}}}]}}'
    calls = {text: f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' for text in ("{}", "null", '"a"')}
    assert [text for text, call in calls.items() if takes(GrammarKind.TOOL_CALLS, tools, call)] == ["{}"]


def test_a_tool_that_takes_no_object_is_refused_by_its_place() -> None:
    source = '{"tools": [{"name": "f", "parameters": null}, {"name": "g", "parameters": {"type": "string"}}]}'
    with pytest.raises(GrammarRefused, match=r"tools\[1\]\.parameters\.type: allows no object"):
        check_grammar(Grammar(kind=GrammarKind.TOOL_CALLS, source=source), LIMITS)
