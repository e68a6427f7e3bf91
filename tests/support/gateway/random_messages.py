"""Random requests from their descriptors: often right, sometimes at the edge of a type, sometimes of no known kind."""

import re
from contextlib import suppress
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_INF = float("inf")
_SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
_TEXTS = (
    "",
    "a",
    "é😀\0\n",
    "<|im_end|>",
    "x" * 300,
    "y" * 70_000,
    _SCHEMA,
    "[" * 5000,
    '{"a": NaN}',
    "(",
    "a{3,1}",
    "root ::= root",
)
_FLOATS = (0.0, -0.0, 1.0, -2.0, 100.5, 1e-45, 1e300, _INF, -_INF, float("nan"))
_INTEGERS = (0, 1, 2, 7, 129, 600, -1, -101, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
_UNKNOWN = b"\xf8\x07\x01"  # field 127, a varint
# What fields of a name are likely to take.
_LIKELY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("model", "model_name", "name"), ("", "tiny")),
    **dict.fromkeys(("text", "prompt", "original_text"), ("hello", "Once upon a time")),
    **dict.fromkeys(("ids", "input_ids", "token_ids", "stop_token_ids", "allowed_token_ids"), (3, 70, 71)),
    **dict.fromkeys(("max_tokens", "max_new_tokens", "truncate_prompt_tokens"), (1, 3, 50)),
    **dict.fromkeys(("num_outputs", "num_sequences", "n", "top_n"), (1, 2)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "temperature", "timeout_s"), (0.5, 1.0)),
    **dict.fromkeys(("json_schema", "json", "parameters_json"), (_SCHEMA, '{"type": "integer"}')),
    **dict.fromkeys(("ebnf", "grammar", "ebnf_grammar"), ('root ::= "a"',)),
    **dict.fromkeys(("priority", "data_parallel_rank", "min_tokens", "dp_rank"), (0,)),
    **dict.fromkeys(("media", "mm_inputs", "session", "lora_name", "structural_tag"), ()),
    "arguments_json": ("{}", '{"a": 1}'),
    "request_id": ("", "r1"),
    "interval_s": (0.5,),
}


class RandomMessages:
    """The same messages for the same seed. edges: the share of values taken from the limits of their types."""

    def __init__(self, seed: int, *, edges: float) -> None:
        self._random, self._edges = Random(seed), edges

    def fill(self, message: Message, depth: int = 0) -> Message:
        """Set some of its fields, and return it."""
        fields, drawn = list(message.DESCRIPTOR.fields), self._random
        share = drawn.choice((0.15, 0.3, 0.6))
        for field in fields:
            is_likely = _LIKELY.get(field.name) != () and (field.is_required or drawn.random() < share)
            if (is_likely or drawn.random() < self._edges / 4) and depth < 6:
                self._set(message, field, depth)
        for oneof in message.DESCRIPTOR.oneofs:
            choice = drawn.choice(oneof.fields)
            if message.WhichOneof(oneof.name) is None and len(oneof.fields) > 1 and drawn.random() < 0.9:
                self._set(message, choice, depth)
        if drawn.random() < self._edges / 8:
            message.MergeFromString(_UNKNOWN)
        return message

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        count = self._random.choice((1, 1, 2, 3, 130 if self._is_edge() else 1)) if field.is_repeated else 1
        for _ in range(count):
            if field.message_type is None:
                self._set_number_or_text(message, field)
            elif field.message_type.GetOptions().map_entry:
                self._set_entry(getattr(message, field.name), field.message_type, depth)
            elif field.is_repeated:
                self.fill(getattr(message, field.name).add(), depth + 1)
            else:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self.fill(inner, depth + 1)

    def _set_number_or_text(self, message: Message, field: FieldDescriptor) -> None:
        value = self.value_of(field)
        with suppress(ValueError):  # an integer that this type does not have
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)

    def _set_entry(self, entries: Any, entry: Descriptor, depth: int) -> None:
        key, value = self.value_of(entry.fields_by_name["key"]), entry.fields_by_name["value"]
        with suppress(ValueError):
            if value.message_type is None:
                entries[key] = self.value_of(value)
            else:
                self.fill(entries[key], depth + 1)

    def value_of(self, field: FieldDescriptor) -> Any:
        """A value for a field that is not a message."""
        drawn = self._random
        likely = _LIKELY.get(field.name)
        if likely and not self._is_edge():
            return drawn.choice(likely).encode() if field.type == field.TYPE_BYTES else drawn.choice(likely)
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return drawn.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                assert field.enum_type is not None
                return drawn.choice([*field.enum_type.values_by_number, *((99, -1) if self._is_edge() else ())])
            case FieldDescriptor.CPPTYPE_STRING:
                text = drawn.choice(_TEXTS if self._is_edge() else ("a", "e"))
                return text.encode() if field.type == field.TYPE_BYTES else text
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return drawn.choice(_FLOATS) if self._is_edge() else drawn.choice((0.0, 0.25, 1.0))
        return drawn.choice(_INTEGERS) if self._is_edge() else drawn.choice((0, 1, 2))

    def _is_edge(self) -> bool:
        return self._random.random() < self._edges


def names_a_field(path: str, message: Descriptor | None) -> bool:
    """Whether a path such as `stop.strings[2]` or `chat.#99` leads to a field, or a oneof, of the message."""
    for part in path.split("."):
        name = re.sub(r"\[[^]]*\]$", "", part)
        if name.startswith("#"):
            return True
        if message is None:
            return False
        if name not in message.fields_by_name:
            return name in message.oneofs_by_name
        message = message.fields_by_name[name].message_type
    return True
