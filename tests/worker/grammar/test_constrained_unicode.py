"""Constraints whose text is not in Unicode's composed form come out byte for byte, whatever the tokenizer's normalizer
would make of them."""

import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.wire.messages import Grammar, GrammarKind, WireFinishReason
from tests.support.grammar.models import Speaker, folder_speaker, oracle_speaker, tiny_speaker
from tests.support.grammar.rig import json_schema

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = {
    "decomposed Vietnamese": unicodedata.normalize("NFD", "Tiếng Việt đẹp lắm"),
    "Korean jamo": unicodedata.normalize("NFD", "한국어로 말해요"),
    "ohm sign": "4.7 k\u2126",
    "angstrom sign": "1 \u212b = 0.1 nm",
    "kelvin sign, then a mark": "300 \u212a\u0301 e\u0301",
    "marks in another order": "q\u0307\u0323 and q\u0323\u0307",
    "excluded from composition": "\u0958 \u2adc \ufb2a",
    "composed, as most text is": "Tiếng Việt, 한국어, Ω, Å",
}


def regex_of(text: str) -> str:
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def grammars(text: str) -> dict[str, tuple[Grammar, str]]:
    """By name: a grammar that has a single text, and that text."""
    options = json.dumps([text], ensure_ascii=False)
    schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
    schema["additionalProperties"] = False
    document = json.dumps({text: text}, ensure_ascii=False, separators=(",", ":"))
    return {
        "choice": (Grammar(kind=GrammarKind.CHOICE, source=options), text),
        "regex": (Grammar(kind=GrammarKind.REGEX, source=regex_of(text)), text),
        "ebnf": (Grammar(kind=GrammarKind.EBNF, source=f'root ::= "<" {json.dumps(text)} ">"'), f"<{text}>"),
        "json": (json_schema(json.dumps(schema, ensure_ascii=False)), document),
    }


def check_all(speaker: Speaker) -> None:
    """Each text of each grammar is what comes out, to the byte."""
    rig = speaker.rig(num_seqs=16)
    cases = [(name, kind, *case) for name, text in TEXTS.items() for kind, case in grammars(text).items()]
    for index, (_, _, grammar, _) in enumerate(cases):
        rig.ask(index, [1, 2, 3 + index], grammar, seed=index, temperature=1.0)
    outputs = rig.run()
    rig.close()
    wrong = {}
    for index, (name, kind, _, wanted) in enumerate(cases):
        output = outputs[index]
        assert output.finished is not None
        got = speaker.text(output.token_ids)
        if kind == "json":  # white space between its parts is free
            got = json.dumps(json.loads(got), ensure_ascii=False, separators=(",", ":")) if got.endswith("}") else got
        if (got, output.finished.reason) != (wanted, WireFinishReason.STOP):
            wrong[name, kind] = (got, output.finished.reason.name, output.finished.detail)
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong}"


def test_a_model_of_random_weights_writes_them() -> None:
    check_all(tiny_speaker())


def test_the_embedded_model_writes_them(repository: Path) -> None:
    check_all(folder_speaker(repository / "model/embedded/folio-chat"))


def test_qwens_own_tokenizer_writes_them(shared: Path) -> None:
    content = (shared / "data" / "tokenizer" / "tokenizer.json").read_bytes()
    check_all(Speaker(None, {"tokenizer.json": content}, 151_665, (151_645, 151_643)))


def test_nothing_else_of_a_tokenizer_changes_a_forced_text() -> None:
    """Truncation, padding, and added tokens that take the white space beside them."""
    speaker = oracle_speaker()
    content = json.loads(speaker.files["tokenizer.json"])
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "a",
    }  # fmt: skip
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    greedy = {"lstrip": True, "rstrip": True, "normalized": True, "single_word": False, "special": False}
    content["added_tokens"].append({"id": content["model"]["vocab"]["k"], "content": "k"} | greedy)
    check_all(replace(speaker, files=speaker.files | {"tokenizer.json": json.dumps(content).encode()}))
