"""Sets the constraint on a request's output from plain Python values. Pure: no I/O."""

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

from octavo.client.field_values import assign, extend, naming
from octavo.v1 import inference_pb2

JsonSchema = str | Mapping[str, Any] | type
"""A JSON schema as text or as a dictionary, or a pydantic model class, whose schema is taken."""

CONSTRAINTS = ("json_schema", "json_object", "regex", "ebnf", "choice")


def set_constraint(request: inference_pb2.GenerateRequest, given: MutableMapping[str, Any]) -> None:
    """Move json_schema, json_object, regex, ebnf or choice from `given` to the request. Raises TypeError if there are
    several, and TypeError or ValueError for a value that the field cannot hold."""
    names = [name for name in CONSTRAINTS if name in given]
    if len(names) > 1:
        raise TypeError(f"an output has one constraint at most; got {', '.join(names)}")
    if not names:
        return
    value, constraint = given.pop(names[0]), request.constraint
    if names[0] == "json_schema":
        assign(constraint, "json_schema", schema_text(value))
    elif names[0] == "choice":
        extend(constraint.choice, "options", value, name="choice")
    else:
        assign(constraint, names[0], value)


def schema_text(schema: JsonSchema) -> str:
    """The schema as JSON, in as few bytes as the server counts for it. Raises TypeError for other types, and TypeError
    or ValueError where something in it is no JSON."""
    if isinstance(schema, str):
        return schema
    make = getattr(schema, "model_json_schema", None)  # a pydantic model's; pydantic need not be installed
    if make is None and not isinstance(schema, Mapping):
        raise TypeError(f"json_schema is text, a dictionary or a pydantic model class, not {schema!r}")
    with naming("json_schema"):
        return json.dumps(schema if make is None else make(), ensure_ascii=False)
