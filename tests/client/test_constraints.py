import json

import pytest
from pydantic import BaseModel

from octavo.client.requests import generate_request
from octavo.v1 import inference_pb2 as pb


class Fish(BaseModel):
    """What pydantic makes a schema of."""

    fins: int


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json_schema": '{"type": "null"}'}, pb.Constraint(json_schema='{"type": "null"}')),
        ({"json_schema": {"type": "null"}}, pb.Constraint(json_schema='{"type": "null"}')),
        ({"json_schema": Fish}, pb.Constraint(json_schema=json.dumps(Fish.model_json_schema()))),
        ({"json_object": True}, pb.Constraint(json_object=True)),
        ({"regex": "a+"}, pb.Constraint(regex="a+")),
        ({"ebnf": 'root ::= "a"'}, pb.Constraint(ebnf='root ::= "a"')),
        ({"choice": ("a", "b")}, pb.Constraint(choice=pb.Choice(options=["a", "b"]))),
    ],
)
def test_each_constraint_lands_in_its_field(given: dict[str, object], expected: pb.Constraint) -> None:
    assert generate_request(text="x", **given) == pb.GenerateRequest(text="x", constraint=expected)


def test_a_schema_has_no_more_bytes_than_its_texts_and_what_is_no_json_is_named() -> None:
    request = generate_request(text="x", json_schema={"const": "鱼"})
    assert request.constraint.json_schema == '{"const": "鱼"}'
    with pytest.raises(TypeError, match=r"^json_schema: Object of type set is not JSON serializable$"):
        generate_request(text="x", json_schema={"enum": {"a"}})
    with pytest.raises(ValueError, match=r"^json_schema: is not UTF-8 text"):
        generate_request(text="x", json_schema={"const": "\ud800"})


def test_a_schemas_formats_may_be_annotations() -> None:
    expected = pb.GenerateRequest(text="x", constraint=pb.Constraint(json_schema="{}"), format_as_annotation=True)
    assert generate_request(text="x", json_schema="{}", format_as_annotation=True) == expected


def test_there_is_one_constraint_at_most_and_a_schema_is_a_schema() -> None:
    with pytest.raises(TypeError, match="json_object, regex"):
        generate_request(text="x", regex="a", json_object=True)
    with pytest.raises(TypeError, match="pydantic"):
        generate_request(text="x", json_schema=int)
