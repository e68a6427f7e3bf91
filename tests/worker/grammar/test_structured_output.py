"""Outputs under a grammar, from models that would never write them by themselves: what is complete is right."""

import json
import re
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from octavo.grammar.tool_calls import CALL_TAGS, CLOSING, OPENING
from octavo.wire.messages import Grammar, GrammarKind, WireFinishReason
from tests.support.grammar.models import Speaker, as_json, folder_speaker, oracle_speaker, tiny_speaker
from tests.support.grammar.rig import json_schema
from tests.support.grammar.schemas import SchemaMaker

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return tiny_speaker()


@pytest.fixture(scope="module")
def folio(repository: Path) -> Speaker:
    return folder_speaker(repository / "model/embedded/folio-chat")


def complete_outputs(speaker: Speaker, seeds: range, *, max_tokens: int = 400) -> tuple[dict[int, str], Counter[str]]:
    """Texts by seed of those that ended by themselves, and how all of them ended."""
    rig = speaker.rig(num_seqs=48)
    for seed in seeds:
        schema = SchemaMaker(seed).schema()
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens}
        if seed % 5 == 1:
            sampling = {"temperature": 0.8, "seed": seed, "top_p": 0.95, "top_k": 40, "max_tokens": max_tokens}
        if seed % 5 == 2:
            sampling |= {"frequency_penalty": 0.5, "min_tokens": 20}
        rig.ask(seed, [5, 6, 7, 8 + seed % 50], json_schema(as_json(schema)), **sampling)
    outputs = rig.run(timeout_s=240)
    rig.close()
    ends = Counter(output.finished.reason.name for output in outputs.values() if output.finished)
    stopped = {
        seed: speaker.text(output.token_ids)
        for seed, output in outputs.items()
        if output.finished and output.finished.reason is WireFinishReason.STOP
    }
    return stopped, ends


def invalid(texts: dict[int, str]) -> dict[int, str]:
    """What does not validate, by seed."""
    wrong = {}
    for seed, text in texts.items():
        schema = SchemaMaker(seed).schema()
        try:
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))
        except (jsonschema.ValidationError, json.JSONDecodeError) as error:
            wrong[seed] = f"{text!r}: {error}"[:300]
    return wrong


def test_three_hundred_schemas_on_random_weights_give_only_what_validates(tiny: Speaker) -> None:
    texts, ends = complete_outputs(tiny, range(300))
    assert invalid(texts) == {}
    assert set(ends) <= {"STOP", "LENGTH"}
    assert ends["STOP"] >= 240, ends


@pytest.mark.slow
def test_the_demo_model_gives_only_what_validates(folio: Speaker) -> None:
    texts, ends = complete_outputs(folio, range(1000, 1050), max_tokens=250)
    assert invalid(texts) == {}
    assert set(ends) <= {"STOP", "LENGTH"}
    assert ends["STOP"] >= 37, ends


def test_the_oracle_gives_only_what_validates() -> None:
    texts, ends = complete_outputs(oracle_speaker(), range(2000, 2060))
    assert invalid(texts) == {}
    assert ends["STOP"] >= 30, ends


PATTERNS = (
    r"[ab]{3}c+", r"(yes|no|maybe) [0-9]{1,3}", r"\d{4}-\d{2}", r"[А-Яа-я]{2,6}", r"x?[^a-z\n]{1,8}", r"(?:ab|cd)*e",
    r"[\x20-\x7e]{0,12}!", r"^anchored$", "(?i)shout", "日本[語人]+。",
)  # fmt: skip


def test_outputs_match_their_regular_expression_as_a_whole(tiny: Speaker) -> None:
    rig = tiny.rig()
    for index, pattern in enumerate(PATTERNS * 4):
        rig.ask(index, [1, 2, 3 + index], Grammar(kind=GrammarKind.REGEX, source=pattern), seed=index, max_tokens=100)
    ended = {
        index: tiny.text(output.token_ids)
        for index, output in rig.run().items()
        if output.finished and output.finished.reason is WireFinishReason.STOP
    }
    rig.close()
    assert len(ended) >= 36
    wrong = {index: text for index, text in ended.items() if not re.fullmatch((PATTERNS * 4)[index], text)}
    assert wrong == {}


def test_outputs_are_one_of_the_choices_and_every_choice_comes_up(tiny: Speaker) -> None:
    options = ["yes", "yes indeed", "no", 'naïve\n"quoted"', "<|im_end|>"]
    rig = tiny.rig()
    grammar = Grammar(kind=GrammarKind.CHOICE, source=json.dumps(options))
    for index in range(60):
        rig.ask(index, [1, 2, 3 + index], grammar, seed=index, temperature=2.0)
    outputs = rig.run()
    rig.close()
    assert {tiny.text(output.token_ids) for output in outputs.values()} == set(options)
    assert rig.cache.num_hits >= 50


BRACKETS = 'root ::= item{1,3}\nitem ::= "(" item* ")" | "[" [a-z]{1,2} "]"'


def is_balanced(text: str) -> bool:
    """The independent check: remove what is complete until nothing is left."""
    text = re.sub(r"\[[a-z]{1,2}\]", "", text)
    while "()" in text:
        text = text.replace("()", "")
    return text == ""


def test_outputs_are_of_their_grammar(tiny: Speaker) -> None:
    rig = tiny.rig()
    for index in range(40):
        rig.ask(index, [1, 2, 3 + index], Grammar(kind=GrammarKind.EBNF, source=BRACKETS), seed=index, max_tokens=200)
    outputs = rig.run()
    rig.close()
    ended = [
        tiny.text(output.token_ids)
        for output in outputs.values()
        if output.finished and output.finished.reason is WireFinishReason.STOP
    ]
    assert len(ended) >= 20
    assert [text for text in ended if not text or not is_balanced(text)] == []


def test_any_json_object_is_an_object(tiny: Speaker) -> None:
    rig = tiny.rig()
    for index in range(20):
        grammar = Grammar(kind=GrammarKind.JSON_OBJECT)
        rig.ask(index, [1, 2, 3 + index], grammar, seed=index, max_tokens=300, temperature=0.7)
    outputs = rig.run()
    rig.close()
    ended = [
        json.loads(tiny.text(output.token_ids))
        for output in outputs.values()
        if output.finished and output.finished.reason is WireFinishReason.STOP
    ]
    assert len(ended) >= 5
    assert all(isinstance(value, dict) for value in ended)


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
}


def test_a_text_that_is_forced_may_name_a_control_token(tiny: Speaker) -> None:
    rig = tiny.rig()
    rig.ask(0, [1, 2, 3], Grammar(kind=GrammarKind.CHOICE, source=json.dumps(["a <|im_end|> b"])))
    output = rig.run()[0]
    rig.close()
    assert tiny.text(output.token_ids) == "a <|im_end|> b"
    assert not {*output.token_ids} & {tiny.tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|im_start|>")}


def test_calls_are_written_with_the_tags_that_the_model_has(folio: Speaker) -> None:
    source = json.dumps({"tools": [{"name": "weather", "parameters": CITY}], "max_calls": 1})
    rig = folio.rig()
    rig.ask(0, [1, 2, 3], Grammar(kind=GrammarKind.TOOL_CALLS, source=source))
    output = rig.run()[0]
    rig.close()
    opening, closing = (folio.tokenizer.token_to_id(tag) for tag in CALL_TAGS)
    assert (output.token_ids[0], output.token_ids[-1]) == (opening, closing)
    assert output.finished is not None
    assert output.finished.reason is WireFinishReason.STOP


def test_forced_calls_of_tools_have_their_form_and_their_arguments(tiny: Speaker) -> None:
    source = json.dumps({"tools": [{"name": "weather", "parameters": CITY}], "max_calls": 1})
    rig = tiny.rig()
    for index in range(8):
        rig.ask(index, [1, 2, 3 + index], Grammar(kind=GrammarKind.TOOL_CALLS, source=source), seed=index)
    outputs = rig.run()
    rig.close()
    for output in outputs.values():
        text = tiny.text(output.token_ids)
        assert text.startswith(OPENING)
        assert text.endswith(CLOSING)
        call = json.loads(text.removeprefix(OPENING).removesuffix(CLOSING))
        assert call["name"] == "weather"
        jsonschema.validate(call["arguments"], CITY)
