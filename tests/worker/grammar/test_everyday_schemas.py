"""JSON schemas as people send them: which are served, and that whatever comes out of those is valid."""

import json
from collections import Counter
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from octavo.grammar.check import check_grammar
from octavo.grammar.errors import GrammarRefused
from octavo.grammar.limits import GrammarLimits
from octavo.wire.messages import WireFinishReason
from tests.support.grammar.everyday_schemas import REFUSED, SCHEMAS
from tests.support.grammar.models import Speaker, oracle_speaker, tiny_speaker
from tests.support.grammar.rig import json_schema

pytestmark = pytest.mark.usefixtures("one_thread")
SERVED = {name: schema for name, schema in SCHEMAS.items() if name not in REFUSED}


def validator(schema: Any) -> Any:
    """Of the schema's own draft; `dependencies` are of the drafts before 2019."""
    old = "dependencies" in json.dumps(schema) and "Draft" not in schema.get("$schema", "")
    chosen = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    if old and "prefixItems" not in json.dumps(schema):
        chosen = jsonschema.Draft7Validator
    # Decimals: as doubles some multiples of 0.01 are none.
    return chosen(exact(json.dumps(schema)), format_checker=chosen.FORMAT_CHECKER)


def exact(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def refused_path(schema: Any) -> str | None:
    try:
        check_grammar(json_schema(json.dumps(schema)), GrammarLimits())
    except GrammarRefused as refused:
        return refused.path
    return None


def test_all_but_a_few_are_served_and_those_are_refused_by_their_path() -> None:
    assert len(SCHEMAS) == 60
    assert {name: path for name, schema in SCHEMAS.items() if (path := refused_path(schema)) is not None} == REFUSED


@pytest.mark.parametrize("speak", [tiny_speaker, oracle_speaker])
def test_whatever_comes_out_is_valid(speak: Any) -> None:
    speaker: Speaker = speak()
    rig = speaker.rig(num_seqs=48)
    asked = [(name, seed) for name in SERVED for seed in range(6)]
    for index, (name, seed) in enumerate(asked):
        grammar = json_schema(json.dumps(SERVED[name]))
        rig.ask(index, [1, 2, 3 + index % 90], grammar, seed=index, temperature=1.0 - 0.1 * seed, max_tokens=400)
    outputs = rig.run(timeout_s=300)
    rig.close()
    ends, wrong = Counter[str](), {}
    for (name, seed), output in zip(asked, outputs.values(), strict=True):
        assert output.finished is not None
        ends[output.finished.reason.name] += 1
        if output.finished.reason is WireFinishReason.STOP:
            text = speaker.text(output.token_ids)
            errors = [error.message for error in validator(SERVED[name]).iter_errors(exact(text))]
            if errors:
                wrong[name, seed] = f"{text}: {errors[0]}"
    assert wrong == {}
    assert set(ends) <= {"STOP", "LENGTH"}, [output.finished for output in outputs.values()]
    assert ends["STOP"] >= 0.6 * len(asked), ends
