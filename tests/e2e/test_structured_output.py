"""Constraints over gRPC on the whole service: right outputs, refusals by name, hostile grammars beside a bystander."""

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field

from octavo import Client, InvalidRequest, OctavoError
from tests.support.grammar.schemas import SchemaMaker
from tests.support.services.service import Service, serve

PLAYER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "level": {"type": "integer", "minimum": 1, "maximum": 60},
        "kind": {"enum": ["elf", "dwarf"]},
    },
    "required": ["name", "level", "kind"],
    "additionalProperties": False,
}
ROLL = {
    "name": "roll",
    "description": "Roll dice",
    "parameters": {
        "type": "object",
        "properties": {"sides": {"enum": [6, 20]}},
        "required": ["sides"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("service"), "--num-blocks=256", "--max-num-seqs=16") as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.target) as connected:
        yield connected


def test_each_kind_of_constraint_shapes_the_output(client: Client) -> None:
    ask = {"messages": [("user", "Make a player.")], "max_tokens": 150, "seed": 1, "timeout_s": 200}
    jsonschema.validate(json.loads(client.complete(json_schema=PLAYER, **ask).text), PLAYER)
    assert re.fullmatch(r"[A-Z][a-z]{2,7}", client.complete(regex=r"[A-Z][a-z]{2,7}", **ask).text)
    assert client.complete(choice=["left", "right"], **ask).text in ("left", "right")
    assert re.fullmatch("(ab){1,5}c", client.complete(ebnf='root ::= pair{1,5} "c"\npair ::= "ab"', **ask).text)
    found = client.complete(json_object=True, **ask | {"max_tokens": 400})
    assert found.text.startswith("{")


def test_a_pydantic_class_is_a_schema(client: Client) -> None:
    class Ship(BaseModel):
        """With bounds, as people write them."""

        model_config = ConfigDict(extra="forbid")

        name: str = Field(max_length=10)
        masts: int = Field(ge=1, le=3)

    answer = client.complete(text="A ship:", json_schema=Ship, max_tokens=200, seed=2, timeout_s=200)
    assert 1 <= Ship.model_validate_json(answer.text).masts <= 3


def test_a_tool_that_must_be_called_is_called(client: Client) -> None:
    for choice in ("required", "roll"):
        answer = client.complete(
            messages=[("user", "Roll!")], tools=[ROLL], tool_choice=choice, max_tokens=120, seed=3, timeout_s=200
        )
        assert answer.text.strip() == ""
        assert {call.name for call in answer.tool_calls} == {"roll"}
        for call in answer.tool_calls:
            jsonschema.validate(json.loads(call.arguments_json), ROLL["parameters"])


def test_a_stop_string_and_max_tokens_cut_a_constrained_output(client: Client) -> None:
    cut = client.complete(text="A player:", json_schema=PLAYER, stop=['"level"'], max_tokens=150, timeout_s=200)
    assert '"level"' not in cut.text
    short = client.complete(text="A player:", json_schema=PLAYER, max_tokens=3, timeout_s=200)
    assert short.finished.usage.completion_tokens == 3


REFUSED = {
    "constraint.json_schema": [
        ({"json_schema": {"properties": {"a": {"contains": {}}}}}, "properties.a.contains: is not supported"),
        ({"json_schema": {"items": {"format": "iri"}}}, "items.format: 'iri' is not supported"),
        ({"json_schema": {"uniqueItems": True}}, "uniqueItems: is supported for at most one item"),
        ({"json_schema": {"$ref": "http://a/b"}}, "$ref: must point into the schema itself"),
        ({"json_schema": "{"}, "is not valid JSON"),
        ({"json_schema": "[" * 60_000}, "is nested deeper than 16"),
        ({"json_schema": {"type": "string", "const": "x" * 70_000}}, "at most 65536 are allowed"),
        ({"json_schema": {"x-guidance": {"lenient": True}}}, "x-guidance: is not supported"),
    ],
    "constraint.regex": [({"regex": "a(?=b)"}, "look-around"), ({"regex": "("}, "unclosed group")],
    "constraint.ebnf": [({"ebnf": 'root ::= "a" b'}, "names b"), ({"ebnf": "x"}, "line 1")],
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_served_is_refused_by_its_name_and_place(client: Client, field: str) -> None:
    for given, words in REFUSED[field]:
        with pytest.raises(InvalidRequest) as caught:
            client.complete(text="x", max_tokens=5, timeout_s=120, **given)
        (violation,) = caught.value.violations
        assert violation.field == f"generate.{field}"
        assert words in violation.description


def bystander(service: Service, tokens: list[int], gaps_s: list[float]) -> None:
    with Client(service.target) as client:
        stream = client.stream(text="Once upon a time", max_tokens=300, seed=7, ignore_eos=True, output="token_ids")
        last_s = time.monotonic()
        for delta in stream.deltas():
            tokens += delta.token_ids
            gaps_s.append(time.monotonic() - last_s)
            last_s = time.monotonic()


HOSTILE: list[dict[str, object]] = [
    {"regex": "(.*a.{1000}){3}"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "|".join(f"x{i}y.*z{i}" for i in range(280))},
    {"json_schema": {"type": "object", "properties": {f"p{i}": {"pattern": "^(a|b)*a(a|b){40}$"} for i in range(600)}}},
    {"json_schema": {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(4)]} for i in range(8)]}},
    {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}}},
    {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "minItems": 10**5}},
    {"ebnf": 'root ::= root root | "x" | ""'},
]


@pytest.fixture
def deterministic_service(tmp_path: Path) -> Iterator[Service]:
    """On any CPU, since elsewhere a sum's bits may depend on who else is in the batch."""
    if shutil.which("cc") is None:
        pytest.skip("deterministic mode on a CPU needs a C compiler")
    with serve(tmp_path, "--deterministic", "--num-blocks=256", "--max-num-seqs=16") as running:
        yield running


def test_hostile_constraints_change_no_token_of_a_bystander_and_delay_it_little(
    deterministic_service: Service,
) -> None:
    service = deterministic_service
    quiet: list[int] = []
    bystander(service, quiet, [])
    tokens: list[int] = []
    gaps_s: list[float] = []
    listener = threading.Thread(target=bystander, args=(service, tokens, gaps_s))
    listener.start()
    codes, begin_s = [], time.monotonic()
    with Client(service.target) as client:
        for given in HOSTILE:
            try:
                client.complete(text="x", max_tokens=40, temperature=1.5, timeout_s=120, **given)
                codes.append("OK")
            except OctavoError as error:
                codes.append(error.code.name if isinstance(error.code, grpc.StatusCode) else str(error.code))
    hostile_s = time.monotonic() - begin_s
    listener.join(200)
    assert tokens == quiet
    assert set(codes) <= {"OK", "INVALID_ARGUMENT"}
    # 0.5 on a quiet machine; what stood in its way would take as long as all of them.
    assert max(gaps_s) < max(6.0, hostile_s / 2)
    service.wait_until_idle()


def test_a_cancelled_constrained_request_frees_its_blocks(service: Service) -> None:
    with Client(service.target) as client:
        for _ in range(5):
            with client.stream(text="x" * 200, regex="[a-z ]{2000}", max_tokens=400) as stream:
                next(iter(stream))
    service.wait_until_idle()


def outputs(service: Service) -> list[str]:
    with Client(service.target) as client:
        asked = [
            client.stream(
                text=f"Item {seed}:", json_schema=SchemaMaker(seed).schema(), seed=seed, max_tokens=60, temperature=1.0
            )
            for seed in range(8)
        ]
        return ["".join(stream) for stream in asked]


@pytest.mark.slow
def test_preemption_changes_no_constrained_output(tmp_path: Path) -> None:
    """With the oracle, whose tokens depend on nothing but what its blocks hold."""
    (tmp_path / "calm").mkdir()
    with serve(tmp_path / "calm", "--runner=oracle") as calm:
        expected = outputs(calm)
    (tmp_path / "squeezed").mkdir()
    limits = ("--num-blocks=14", "--max-model-len=128", "--preempt-every-steps=7")
    with serve(tmp_path / "squeezed", "--runner=oracle", *limits) as squeezed:
        assert outputs(squeezed) == expected
        assert all(list(audit.violations) == [] for audit in squeezed.audit())
