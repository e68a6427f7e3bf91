"""The rule of every field of every request message, and the walk that applies them.

A test walks the descriptors and fails where a field has no row in the table, so that a new field cannot be forgotten.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.gateway.errors import MAX_VIOLATIONS, InvalidRequest, Violation
from octavo.gateway.validation import limits
from octavo.grammar.json_literals import has_depth
from octavo.v1 import inference_pb2

UINT32 = 2**32 - 1
ANY_NUMBER = 1 << 62  # elements: the size of a message is the limit


# Rules for single values. A rule says what is wrong with a value, or None.


class Rule(Protocol):
    """Says what is wrong with a value, or None. value: a scalar field that is set, or one element of a repeated
    field."""

    def __call__(self, value: object) -> str | None: ...


def _shown(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def anything(value: object) -> str | None:
    """Every value of the field's type is valid."""
    return None


def not_served(value: object) -> str | None:
    """The field is part of the contract, but not supported by this gateway."""
    return "is not supported"


def must_be_true(value: object) -> str | None:
    """A boolean in a oneof, which can only be set to true."""
    return None if value is True else "must be true"


@dataclass(frozen=True, slots=True)
class InRange:
    """A finite number in [low, high]."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{_shown(self.low)}, {_shown(self.high)}]"

    def __call__(self, value: object) -> str | None:
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"must be a finite number in {self}"
        # float fields arrive as doubles: 0.1f is not 0.1, but borders such as 1 and 100 are exact.
        return None if self.low <= value <= self.high else f"must be in {self}, not {_shown(value)}"


@dataclass(frozen=True, slots=True)
class Above:
    """A finite number in (low, high]."""

    low: float
    high: float

    def __call__(self, value: object) -> str | None:
        wrong = InRange(self.low, self.high)(value)
        if wrong is not None or value == self.low:
            return f"must be in ({_shown(self.low)}, {_shown(self.high)}]"
        return None


@dataclass(frozen=True, slots=True)
class Utf8Bytes:
    """Text of low to high bytes."""

    low: int
    high: int

    def __call__(self, value: object) -> str | None:
        num_bytes = len(str(value).encode())
        if num_bytes < self.low:
            return "must not be empty"
        return None if num_bytes <= self.high else f"has {num_bytes} bytes, at most {self.high} are allowed"


@dataclass(frozen=True, slots=True)
class Visible:
    """Visible ASCII, at most `high` characters, since it is used in headers and log lines."""

    high: int

    def __call__(self, value: object) -> str | None:
        text = str(value)
        if len(text) > self.high:
            return f"has {len(text)} characters, at most {self.high} are allowed"
        is_visible = text.isascii() and text.isprintable() and " " not in text
        return None if is_visible else "must be visible ASCII without spaces"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A named value of an enum; zero is handled by `required`."""

    enum: EnumDescriptor

    def __call__(self, value: object) -> str | None:
        return None if value in self.enum.values_by_number else f"{value} is no {self.enum.name}"


def json_object(value: object) -> str | None:
    """A JSON object as text, in valid Unicode, without NaN and Infinity."""
    try:
        parsed = json.loads(str(value), parse_constant=_refuse_constant)
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeEncodeError are ValueErrors
        return "is not valid JSON"
    if has_depth(parsed, limits.MAX_JSON_DEPTH):
        return f"is nested deeper than {limits.MAX_JSON_DEPTH}"
    return None if isinstance(parsed, dict) else "must be a JSON object"


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


@dataclass(frozen=True, slots=True)
class Count:
    """How many elements a repeated field may have."""

    low: int
    high: int

    def __call__(self, values: Sequence[object]) -> str | None:
        if len(values) < self.low:
            return f"needs at least {self.low} element{'s' if self.low != 1 else ''}"
        return None if len(values) <= self.high else f"has {len(values)} elements, at most {self.high} are allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRules:
    """fields: rule by name (for each element of repeated ones; messages are walked into). counts: of repeated fields.
    required: fields that must be set and non-zero. required_oneofs: those of which one field must be set."""

    fields: dict[str, Rule] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    required_oneofs: tuple[str, ...] = ()


REQUEST_ID = Visible(limits.MAX_REQUEST_ID)
_MODEL = Utf8Bytes(0, 256)
_NAME = Utf8Bytes(1, 256)
_GATEWAYS = InRange(0, 64)  # on other hosts

TABLE: dict[str, MessageRules] = {
    "octavo.v1.GenerateRequest": MessageRules(
        fields={
            "request_id": REQUEST_ID,
            "model": _MODEL,
            "text": Utf8Bytes(1, ANY_NUMBER),
            "token_ids": anything,
            "chat": anything,
            "sampling": anything,
            "stop": anything,
            "output": anything,
            "priority": InRange(limits.MIN_PRIORITY, limits.MAX_PRIORITY),
            "cache_salt": Utf8Bytes(0, limits.MAX_SALT_BYTES),
            "num_outputs": InRange(1, limits.MAX_OUTPUTS),
            "constraint": anything,
            "timeout_s": Above(0, limits.MAX_TIMEOUT_S),
            "return_partial_on_deadline": anything,
            "truncate_prompt_tokens": InRange(1, UINT32),
            "format_as_annotation": anything,
        },
        required_oneofs=("input",),
    ),
    "octavo.v1.Constraint": MessageRules(
        fields={
            # How long a source may be is a setting (`gateway.requests.constraints`).
            "json_schema": Utf8Bytes(1, ANY_NUMBER),
            "json_object": must_be_true,
            "regex": Utf8Bytes(1, limits.MAX_REGEX_BYTES),
            "ebnf": Utf8Bytes(1, ANY_NUMBER),
            "choice": anything,
        },
        required_oneofs=("kind",),
    ),
    "octavo.v1.Choice": MessageRules(
        fields={"options": Utf8Bytes(1, limits.MAX_CHOICE_BYTES)}, counts={"options": Count(1, limits.MAX_CHOICES)}
    ),
    "octavo.v1.CompleteRequest": MessageRules(fields={"generate": anything}, required=("generate",)),
    "octavo.v1.TokenIds": MessageRules(fields={"ids": anything}, counts={"ids": Count(1, ANY_NUMBER)}),
    "octavo.v1.Chat": MessageRules(
        fields={
            "messages": anything,
            "tools": anything,
            "add_generation_prompt": anything,
            "tool_choice": OneOf(inference_pb2.ToolChoice.DESCRIPTOR),
            "tool_name": Utf8Bytes(0, 256),
        },
        counts={"messages": Count(1, 10_000), "tools": Count(0, 1_000)},
    ),
    "octavo.v1.ChatMessage": MessageRules(
        fields={
            "role": OneOf(inference_pb2.ChatRole.DESCRIPTOR),
            "content": anything,
            "tool_calls": anything,
            "tool_call_id": Utf8Bytes(0, 256),
        },
        counts={"tool_calls": Count(0, 1_000)},
        required=("role",),
    ),
    "octavo.v1.ToolDefinition": MessageRules(
        fields={"name": _NAME, "description": anything, "parameters_json": json_object}, required=("name",)
    ),
    "octavo.v1.ToolCall": MessageRules(
        fields={"id": Utf8Bytes(0, 256), "name": _NAME, "arguments_json": json_object},
        required=("name", "arguments_json"),
    ),
    "octavo.v1.SamplingParams": MessageRules(
        fields={
            "temperature": InRange(0, 100),
            "top_p": Above(0, 1),
            "top_k": InRange(0, UINT32),
            "min_p": InRange(0, 1),
            "seed": anything,
            "repetition_penalty": Above(limits.LOW_REPETITION_PENALTY, 100),
            "presence_penalty": InRange(-10, 10),
            "frequency_penalty": InRange(-10, 10),
            "typical_p": Above(0, 1),
            "top_n_sigma": InRange(0, 100),
            "logit_bias": InRange(-limits.MAX_BIAS, limits.MAX_BIAS),
            "allowed_token_ids": anything,
            "bad_words": Utf8Bytes(1, limits.MAX_BAD_WORD_BYTES),
        },
        counts={
            "logit_bias": Count(0, limits.MAX_BIASES),
            "allowed_token_ids": Count(0, limits.MAX_ALLOWED_IDS),
            "bad_words": Count(0, limits.MAX_BAD_WORDS),
        },
    ),
    "octavo.v1.StopConditions": MessageRules(
        fields={
            "max_tokens": InRange(1, UINT32),
            "min_tokens": InRange(0, UINT32),
            "strings": Utf8Bytes(1, limits.MAX_STOP_STRING_BYTES),
            "token_ids": anything,
            "ignore_eos": anything,
            "include_stop": anything,
        },
        counts={"strings": Count(0, limits.MAX_STOP_STRINGS), "token_ids": Count(0, limits.MAX_STOP_TOKEN_IDS)},
    ),
    "octavo.v1.OutputOptions": MessageRules(
        fields={
            "format": OneOf(inference_pb2.OutputFormat.DESCRIPTOR),
            "logprobs": InRange(0, limits.MAX_LOGPROBS),
            "skip_special_tokens": anything,
            "prompt_logprobs": InRange(0, limits.MAX_LOGPROBS),
            "echo": anything,
            "return_prompt": anything,
            "parse_tool_calls": anything,
        }
    ),
    "octavo.v1.EmbedRequest": MessageRules(
        fields={
            "request_id": REQUEST_ID,
            "model": _MODEL,
            "inputs": anything,
            "pooling": OneOf(inference_pb2.Pooling.DESCRIPTOR),
            "normalize": anything,
            "truncate_prompt_tokens": InRange(1, UINT32),
            "priority": InRange(limits.MIN_PRIORITY, limits.MAX_PRIORITY),
            "cache_salt": Utf8Bytes(0, limits.MAX_SALT_BYTES),
            "timeout_s": Above(0, limits.MAX_TIMEOUT_S),
        },
        counts={"inputs": Count(1, limits.MAX_EMBED_INPUTS)},
    ),
    "octavo.v1.EmbedInput": MessageRules(
        fields={"text": Utf8Bytes(1, ANY_NUMBER), "token_ids": anything, "chat": anything}, required_oneofs=("input",)
    ),
    "octavo.v1.TokenizeRequest": MessageRules(
        fields={"model": _MODEL, "text": anything, "chat": anything}, required_oneofs=("input",)
    ),
    "octavo.v1.DetokenizeRequest": MessageRules(
        fields={"model": _MODEL, "token_ids": anything, "skip_special_tokens": anything}
    ),
    "octavo.v1.CancelRequest": MessageRules(fields={"request_id": REQUEST_ID}, required=("request_id",)),
    "octavo.v1.ListModelsRequest": MessageRules(),
    "octavo.v1.GetModelRequest": MessageRules(fields={"model": _MODEL}),
    "octavo.v1.AbortRequest": MessageRules(fields={"request_id": REQUEST_ID}, required=("request_id",)),
    "octavo.v1.GetLoadRequest": MessageRules(),
    "octavo.v1.WatchLoadRequest": MessageRules(
        fields={
            "interval_s": InRange(limits.MIN_WATCH_S, limits.MAX_WATCH_S),
            "max_requests": InRange(0, limits.MAX_WATCHED_REQUESTS),
            "max_block_cells": InRange(0, limits.MAX_BLOCK_CELLS),
        }
    ),
    "octavo.v1.AuditBlocksRequest": MessageRules(),
    "octavo.v1.FlushPrefixCacheRequest": MessageRules(),
    "octavo.v1.DrainRequest": MessageRules(fields={"grace_s": InRange(0, 86_400)}),
    "octavo.v1.ScaleRequest": MessageRules(
        fields={"model": _MODEL, "num_workers": InRange(1, limits.MAX_WORKERS)}, required=("num_workers",)
    ),
    "octavo.v1.ScaleGatewaysRequest": MessageRules(fields={"num_gateways": _GATEWAYS}, required=("num_gateways",)),
}


def check(message: Message) -> None:
    """Raises InvalidRequest with the paths of what is wrong."""
    raise_if_any(violations(message, ""))


def raise_if_any(found: Iterable[Violation]) -> None:
    """Raises InvalidRequest with the first MAX_VIOLATIONS of them, if there are any."""
    if first := tuple(islice(found, MAX_VIOLATIONS)):
        raise InvalidRequest(first)


def violations(message: Message, prefix: str) -> Iterator[Violation]:
    """What is wrong in this message and its submessages, in field order."""
    rules = TABLE[message.DESCRIPTOR.full_name]
    given = {descriptor.name: (descriptor, value) for descriptor, value in message.ListFields()}
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        yield Violation(field=f"{prefix}#{unknown.field_number}", description="unknown field")
    for name in rules.required_oneofs:
        if message.WhichOneof(name) is None:
            yield unset_choice(message, name, prefix)
    for name in rules.required:
        if name not in given:
            yield Violation(field=prefix + name, description="must be set")
    miscounted = set[str]()
    for name, count in rules.counts.items():
        if (wrong := count(given[name][1] if name in given else ())) is not None:
            miscounted.add(name)
            yield Violation(field=prefix + name, description=wrong)
    for name, (descriptor, value) in given.items():
        rule = rules.fields[name]
        if name in miscounted:  # elements of a list that is too long are not looked at
            continue
        if rule is not_served:
            yield Violation(field=prefix + name, description="is not supported")
        elif descriptor.is_repeated:
            yield from _element_violations(descriptor, rule, value, prefix + name)
        elif isinstance(value, Message):
            yield from violations(value, f"{prefix}{name}.")
        elif (wrong := rule(value)) is not None:
            yield Violation(field=prefix + name, description=wrong)


def unset_choice(message: Message, oneof: str, prefix: str = "") -> Violation:
    """The violation that a required oneof of this message is not set."""
    choice = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields)
    return Violation(field=prefix + oneof, description=f"one of {choice} must be set")


def _element_violations(field: FieldDescriptor, rule: Rule, values: Any, path: str) -> Iterator[Violation]:
    elements: Iterable[tuple[object, Any]] = ()  # repeated numbers are ids: what they may be depends on the model
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        elements = ((key, values[key]) for key in sorted(values))
    elif field.message_type is not None or field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        elements = enumerate(values)
    for name, value in elements:
        if isinstance(value, Message):
            yield from violations(value, f"{path}[{name}].")
        elif (wrong := rule(value)) is not None:
            yield Violation(field=f"{path}[{name}]", description=wrong)
