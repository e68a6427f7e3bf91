"""Tool calls out of text: the same events however the text is cut, and nothing lost."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.text.json_scanner import MAX_DEPTH, BadJson, JsonScanner
from octavo.gateway.text.tool_calls import CLOSE, OPEN, CallPiece, ToolCallParser
from tests.gateway.text.whole_calls import parse_whole

WEATHER = '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
Result = tuple[str, list[tuple[str, str, bool]], int]


def parse(pieces: list[str]) -> Result:
    """Plain text, (name, arguments, withdrawn) of each call that began, number of complete calls."""
    numbers = itertools.count(1)
    parser = ToolCallParser(lambda: f"call_{next(numbers)}")
    text, found = "", list[CallPiece]()
    for piece in pieces:
        parser.feed(piece)
        text += parser.take_text()
        found += parser.take_calls()
    parser.finish()
    text += parser.take_text()
    found += parser.take_calls()
    return text, [merged(index, found) for index in range(len({piece.index for piece in found}))], parser.num_calls


def merged(index: int, pieces: list[CallPiece]) -> tuple[str, str, bool]:
    mine = [piece for piece in pieces if piece.index == index]
    assert (mine[0].id, bool(mine[0].name), bool(mine[0].arguments)) == (f"call_{index + 1}", True, True)
    assert not any(piece.id or piece.name for piece in mine[1:])
    assert not any(piece.is_withdrawn for piece in mine[:-1])
    return mine[0].name, "".join(piece.arguments for piece in mine), mine[-1].is_withdrawn


def check(text: str) -> Result:
    """As a whole, by characters, and in halves at every place: always the same, and as the reference has it."""
    whole = parse([text])
    assert parse(list(text)) == whole
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]]) == whole, cut
    plain, calls, num_calls = whole
    assert (plain, [call[:2] for call in calls if not call[2]]) == parse_whole(text)
    assert num_calls == len([call for call in calls if not call[2]])
    for _, arguments, is_withdrawn in calls:
        if not is_withdrawn:
            assert isinstance(json.loads(arguments), dict)
    return whole


QUOTED = [
    '{"city": "Paris", "days": 3}',
    "{}", ' \n{"a": {"b": ["\\"x\\"", 1.5e3, null]}}\t', '{"é🦙": "\\ud83e\\udd99 \\u00e9"}',
    '{"p": "a\\\\b/\\n"}',
]  # fmt: skip


@pytest.mark.parametrize("arguments", QUOTED)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_arguments_may_be_a_string_that_holds_the_object(arguments: str, is_ascii: bool) -> None:
    quoted = json.dumps(arguments, ensure_ascii=is_ascii)
    for body in (f'{{"name": "f", "arguments": {quoted}}}', f'{{"arguments": {quoted}, "name": "f", "x": "{{}}"}}'):
        assert check(f"{OPEN}\n{body}\n{CLOSE}") == ("", [("f", arguments.strip(), False)], 1)


def test_arguments_in_a_string_come_as_they_are_written() -> None:
    parser = ToolCallParser(lambda: "id")
    parser.feed(f'{OPEN}{{"name": "f", "arguments": "{{\\"a\\')
    assert parser.take_calls() == [CallPiece(index=0, id="id", name="f", arguments='{"a')]
    parser.feed('": \\"\\ud83e\\ud')
    assert parser.take_calls() == [CallPiece(index=0, arguments='": "')]
    parser.feed('d99\\"}"}')
    assert parser.take_calls() == [CallPiece(index=0, arguments='🦙"}')]


CALL = f"{OPEN}\n{WEATHER}\n{CLOSE}"


@pytest.mark.parametrize("gap", ["", "\n", " \n\t\r\n ", "\n\n"])
def test_white_space_between_calls_and_behind_them_is_no_text(gap: str) -> None:
    text, calls, num_calls = check(f"Both:\n{CALL}{gap}{CALL}{gap}{CALL}{gap}")
    assert (text, len(calls), num_calls) == ("Both:\n", 3, 3)


@pytest.mark.parametrize(
    "rest", ["\nDone.", f"\n{OPEN}no", f"\n{OPEN}", "\n<tool", f" {CLOSE}", f"\n{CALL[:60]}", "\u00a0"]
)
def test_white_space_before_text_is_text(rest: str) -> None:
    assert check(f"{CALL}{rest}")[0] == rest
    if OPEN[:5] not in rest:
        assert check(f"{CALL}\n{CALL}{rest}{CALL}\n")[0] == rest


def test_a_call_between_texts() -> None:
    text = f"Let me look.\n{OPEN}\n{WEATHER}\n{CLOSE}\nDone."
    assert check(text) == ("Let me look.\n\nDone.", [("weather", '{"city": "Paris", "days": 3}', False)], 1)


def test_several_calls_without_text() -> None:
    text = "".join(f'{OPEN}{{"name": "f{i}", "arguments": {{"x": {i}}}}}{CLOSE}' for i in range(3))
    assert check(text) == ("", [(f"f{i}", f'{{"x": {i}}}', False) for i in range(3)], 3)


def test_arguments_are_the_text_that_the_model_wrote() -> None:
    arguments = '{ "a" :[1, 2.50e+3,{"b":"\\u00e9\\"}</tool_call>{"}], "ü": null ,"e":{}, "t" : true}'
    text = f'{OPEN} {{"arguments":{arguments} , "name":"f", "id": 7}} {CLOSE}'
    assert check(text) == ("", [("f", arguments, False)], 1)


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(lambda: "id")
    parser.feed(f'x <{OPEN[1:]}{{"name": "f", "arguments": {{"a": "b')
    assert parser.take_text() == "x "
    assert parser.take_calls() == [CallPiece(index=0, id="id", name="f", arguments='{"a": "b')]
    parser.feed('c"')
    assert parser.take_calls() == [CallPiece(index=0, arguments='c"')]
    parser.feed("}}\n</tool_")
    assert (parser.take_calls(), parser.num_calls) == ([CallPiece(index=0, arguments="}")], 0)
    parser.feed("call>.")
    assert (parser.take_text(), parser.num_calls) == (".", 1)


@pytest.mark.parametrize(
    "text",
    [
        "a < b, <tool, <tool_call <tool_call",
        f"{OPEN}{OPEN}",
        f"{OPEN}no json{CLOSE}",
        f"{OPEN}[]{CLOSE}",
        f"{OPEN}{{}}{CLOSE}",
        f'{OPEN}{{"name": "f"}}{CLOSE}',
        f'{OPEN}{{"arguments": {{}}}}{CLOSE}',
        f'{OPEN}{{"name": "", "arguments": {{}}}}{CLOSE}',
        f'{OPEN}{{"name": 3, "arguments": {{}}}}{CLOSE}',
        f'{OPEN}{{"name": "f", "arguments": "Paris"}}{CLOSE}',
        f'{OPEN}{{"name": "f", "arguments": "[1]"}}{CLOSE}',
        f'{OPEN}{{"name": "f", "arguments": ""}}{CLOSE}',
        f'{OPEN}{{"name": "f", "arguments": null}}{CLOSE}',
        f'{OPEN}{{"name": "\\ud800", "arguments": {{}}}}{CLOSE}',
        f'{OPEN}{{"name": "a\nb", "arguments": {{}}}}{CLOSE}',
    ],
)
def test_what_is_no_call_is_text_and_never_began(text: str) -> None:
    assert check(text) == (text, [], 0)


@pytest.mark.parametrize(
    "rest",
    [
        '{"a": NaN}}' + CLOSE,
        '{"a": 01}}' + CLOSE,
        '{"a": 1,}}' + CLOSE,
        '{"a": "b',
        '"{\\"a\\": NaN}"}' + CLOSE,
        '"{\\"a\\": 1} x"}' + CLOSE,
        '"{\\"a\\": \\"\\n\\"}"}' + CLOSE,  # a bare new line in the inner string
        '"{\\"a\\": \\"\\ud83e\\"}"}' + CLOSE,
        '"{\\"a\\": \\"\\udd99\\"}"}' + CLOSE,
        '"{\\"a\\": \\q"}' + CLOSE,
        '"{\\"a\\": 1',
        '{"a": 1}, "name": "g"}' + CLOSE,
        '{"a": 1}, "arguments": {}}' + CLOSE,
        '{"a": 1}} and more',
        '{"a": 1}}</tool_kall>',
        '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}}" + CLOSE,
    ],
)
def test_what_breaks_after_it_began_is_withdrawn_and_is_text(rest: str) -> None:
    text = f'{OPEN}{{"name": "f", "arguments": {rest}'
    plain, calls, num_calls = check(text)
    assert (plain, num_calls, [call[2] for call in calls]) == (text, 0, [True])


def test_a_broken_call_does_not_swallow_the_next_one() -> None:
    text = f'{OPEN}{{"name": "f", "arguments": {{"a" {OPEN}\n{WEATHER}\n{CLOSE}'
    plain, calls, num_calls = check(text)
    assert plain == f'{OPEN}{{"name": "f", "arguments": {{"a" '
    assert [call[0::2] for call in calls] == [("f", True), ("weather", False)]
    assert num_calls == 1


@pytest.mark.parametrize("end", ["", "\n", "\n</tool", "\n</tool_call"])
def test_a_complete_object_counts_where_the_output_ends(end: str) -> None:
    assert check(f"{OPEN}\n{WEATHER}{end}")[2] == 1


FRAGMENTS = st.sampled_from(
    [OPEN, CLOSE, "<tool_call", "</tool", "<", WEATHER, '{"name": "f", "arguments": ', "{}", "}", '{"a": ', '"', "\\",
     '"{', '\\"a\\": 1}"}', "\\ud83e", "\\udd99", CALL,
     "1.5", "-", "e", ",", ":", "[", "]", "tru", "e", "null", " ", "\n", '"x"', "\\u00e9", "text", "é🦙", '"name"',
     '"arguments"']
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(FRAGMENTS, max_size=14), st.data())
def test_every_cut_of_any_text_gives_the_same_events(fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = parse([text])
    assert parse(pieces) == whole
    assert parse(list(text)) == whole
    assert (whole[0], [call[:2] for call in whole[1] if not call[2]]) == parse_whole(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(VALUES, st.text(alphabet=' {}[]",:0123456789.eE+-truefalsn\\', max_size=3), st.integers(0, 60))
def test_the_scanner_agrees_with_the_library(value: object, noise: str, place: int) -> None:
    text = json.dumps(value)
    text = text[:place] + noise + text[place:]
    try:
        json.loads(text, parse_constant=lambda name: json.loads("?"), parse_int=str)
        is_valid = not text[:1].isspace()
    except ValueError:
        is_valid = False
    scanner = JsonScanner()
    try:
        end = scanner.feed(text)
        end = scanner.feed("\n") + end if not scanner.is_done else end  # ends a number
        got = scanner.is_done and not text[end:].strip(" \t\n\r")
    except BadJson:
        got = False
    assert got == is_valid


def test_a_hostile_output_costs_time_in_proportion() -> None:
    text = f'{OPEN}{{"' * 20_000
    plain, calls, _ = parse([text[i : i + 7] for i in range(0, len(text), 7)])
    assert (plain, calls) == (text, [])
