"""Each field of a dialect's request changes what the worker is asked for, is refused, or is known to change nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from octavo.gateway.dialects.openengine.translate import translate as from_openengine
from octavo.gateway.dialects.vllm_native.translate import translate as from_native
from octavo.gateway.errors import InvalidRequest
from octavo.openengine import openengine_pb2 as oe
from octavo.vllm import vllm_pb2 as vllm

Path = tuple[FieldDescriptor, ...]


def leaves(message: Descriptor, above: Path = ()) -> Iterator[Path]:
    """Every field that is no message, and every message without fields, with those around it."""
    for field in message.fields:
        path = (*above, field)
        inner = field.message_type
        if inner is None or not inner.fields or inner.file.package == "google.protobuf" or inner.GetOptions().map_entry:
            yield path
        else:
            yield from leaves(inner, path)


def with_field(request: Any, path: Path) -> Any:
    """A copy in which it is set, and not to its default."""
    made = type(request)()
    made.CopyFrom(request)
    *outer, field = path
    message = made
    for each in outer:
        inner = getattr(message, each.name)
        message = inner.add() if each.is_repeated else inner
        if not each.is_repeated:
            message.SetInParent()
    set_field(message, field)
    return made


def set_field(message: Message, field: FieldDescriptor) -> None:
    place, inner = getattr(message, field.name), field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, held = value_of(inner.fields_by_name["key"]), inner.fields_by_name["value"]
        if held.message_type is None:
            place[key] = value_of(held)
        else:
            place[key].SetInParent()
    elif inner is not None:
        (place.add() if field.is_repeated else place).SetInParent()
        if inner.full_name == "google.protobuf.Struct":
            place.update({"a": 1})
    elif field.is_repeated:
        place.append(value_of(field))
    else:
        setattr(message, field.name, value_of(field))


def value_of(field: FieldDescriptor) -> Any:
    """Not the default."""
    numbers = {
        FieldDescriptor.CPPTYPE_STRING: b"a" if field.type == field.TYPE_BYTES else "a",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_FLOAT: 0.5,
        FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    }
    return numbers.get(field.cpp_type, 3)


def ignored(base: Message, translate: Callable[[Any], Any]) -> set[str]:
    found, plain = set[str](), translate(base)
    for path in leaves(base.DESCRIPTOR):
        try:
            if translate(with_field(base, path)) == plain:
                found.add(".".join(each.name for each in path))
        except InvalidRequest:
            pass
    return found


def test_of_openengine() -> None:
    base = oe.GenerateRequest(prompt="hello", sampling=oe.SamplingParams(seed=1))
    # The contract's place for what a server may ignore.
    assert ignored(base, lambda request: from_openengine(request, {})) == {"extra"}


def test_of_vllm() -> None:
    base = vllm.GenerateRequest(text="hello", sampling=vllm.RandomSampling(seed=1))
    # Sessions are found by their prefixes; whether ids are told is not the worker's business, and text is the default.
    assert ignored(base, from_native) == {"session_id", "response.output_token_ids", "response.output_text"}


def test_of_vllm_engine() -> None:
    stubs = pytest.importorskip("smg_grpc_proto").vllm_engine_pb2
    from octavo.gateway.dialects.vllm.translate import translate as from_engine

    base = stubs.GenerateRequest(text="hello", sampling_params=stubs.SamplingParams(seed=1))
    # For reference, of the answer's form, or of how text is written, of which this contract sends none.
    text = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
    known = {f"sampling_params.{name}" for name in (*text, "grammar_from_first_token")}
    assert ignored(base, from_engine) == known | {"stream"}
