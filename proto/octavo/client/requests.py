"""Builds `GenerateRequest` from plain Python values. Pure: no channel, no clock."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from octavo.client.constraints import JsonSchema, set_constraint
from octavo.client.field_values import assign, enum_value, extend, made, naming
from octavo.client.tools import Tool, set_tools, tool_call
from octavo.v1 import inference_pb2

Message = inference_pb2.ChatMessage | tuple[str, str] | Mapping[str, Any]
"""A message of a conversation: a ChatMessage, (role, content), or {"role": …, "content": …}, with "tool_calls" or
"tool_call_id" where they apply."""

_ROLES = {
    "system": inference_pb2.CHAT_ROLE_SYSTEM,
    "user": inference_pb2.CHAT_ROLE_USER,
    "assistant": inference_pb2.CHAT_ROLE_ASSISTANT,
    "tool": inference_pb2.CHAT_ROLE_TOOL,
}
MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
_FORMATS = {
    "text": inference_pb2.OUTPUT_FORMAT_TEXT,
    "token_ids": inference_pb2.OUTPUT_FORMAT_TOKEN_IDS,
    "text_and_token_ids": inference_pb2.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS,
}
_PLAIN = (
    "request_id", "model", "priority", "cache_salt", "num_outputs", "return_partial_on_deadline",
    "truncate_prompt_tokens", "format_as_annotation",
)  # fmt: skip
_SAMPLING_LISTS = ("allowed_token_ids", "bad_words")
_SAMPLING = {*inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name} - {*_SAMPLING_LISTS, "logit_bias"}


class GenerateFields(TypedDict, total=False):
    """Fields of a request; those left out take the model's default.

    Give exactly one of text, token_ids and messages. tools and tool_choice ("auto", "none", "required", or the name of
    the tool that must be called) go with messages. At most one of json_schema, json_object, regex, ebnf and choice
    constrains the output; format_as_annotation applies to schemas. The others are the fields of the same names in
    `octavo/v1/inference.proto`, which gives their units and limits. The deadline is not a field but an argument of the
    call, timeout_s.
    """

    text: str
    token_ids: Sequence[int]
    messages: Sequence[Message]
    tools: Sequence[Tool]
    tool_choice: str
    request_id: str
    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    typical_p: float
    top_n_sigma: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    output: str
    logprobs: int
    skip_special_tokens: bool
    prompt_logprobs: int
    echo: bool
    return_prompt: bool
    parse_tool_calls: bool
    priority: int
    cache_salt: str
    json_schema: JsonSchema
    json_object: bool
    regex: str
    ebnf: str
    choice: Sequence[str]
    num_outputs: int
    return_partial_on_deadline: bool
    truncate_prompt_tokens: int
    format_as_annotation: bool


def generate_request(**fields: object) -> inference_pb2.GenerateRequest:
    """Build a request with these `GenerateFields`. `output` is "text", "token_ids" or "text_and_token_ids".

    Raises TypeError for an unknown field and for no or several inputs, ValueError for an unknown role or output, and
    either of them for a value that a field cannot hold (such as -1 for an unsigned one). Limits are checked by the
    server.
    """
    given = dict(fields)
    request = inference_pb2.GenerateRequest()
    _set_input(request, given)
    for name in _PLAIN:
        if name in given:
            assign(request, name, given.pop(name))
    set_constraint(request, given)
    _set_sampling(request.sampling, given)
    _set_stop(request.stop, given)
    _set_output(request.output, given)
    if chats := [name for name in ("tools", "tool_choice") if name in given]:
        raise TypeError(f"{chats[0]}: goes with messages")
    if given:
        raise TypeError(f"a request has no field {', '.join(sorted(given))}")
    return request


def request_of(request: inference_pb2.GenerateRequest | None, fields: GenerateFields) -> inference_pb2.GenerateRequest:
    """The given request, or one with these fields. Raises TypeError for both, for something else in the place of a
    request (most often a prompt), and what `generate_request` raises."""
    if request is None:
        return generate_request(**fields)
    if not isinstance(request, inference_pb2.GenerateRequest):
        raise TypeError(f"request: is a GenerateRequest, not {request!r}; a prompt is given by its name, as text=…")
    if fields:
        raise TypeError(f"a request that is made takes no further fields; got {', '.join(sorted(fields))}")
    return request


def chat_message(message: Message) -> inference_pb2.ChatMessage:
    """The message as a ChatMessage. Raises ValueError for an unknown role, TypeError if it is not a message."""
    if isinstance(message, inference_pb2.ChatMessage):
        return message
    fields = _message_fields(message)
    role = enum_value("role", fields.get("role"), _ROLES)
    if "content" not in fields and not fields.get("tool_calls"):
        raise TypeError(f"a message has content; this one has {', '.join(map(str, fields))}")
    # What SDKs return from a model has many more fields, which are None.
    if others := [str(name) for name, value in fields.items() if name not in MESSAGE_FIELDS and value is not None]:
        raise TypeError(f"a message has no {', '.join(others)}; it has {', '.join(MESSAGE_FIELDS)}")
    if not isinstance(fields.get("content") or "", str):
        raise TypeError(f"content is text, not {fields['content']!r}")
    return made(
        inference_pb2.ChatMessage(role=role, tool_calls=map(tool_call, fields.get("tool_calls") or ())),
        content=fields.get("content") or "",
        tool_call_id=fields.get("tool_call_id"),
    )


def _message_fields(message: object) -> Mapping[str, Any]:
    if isinstance(message, Mapping):
        return message
    if isinstance(message, str) or not isinstance(message, Sequence) or len(message) != 2:
        raise TypeError(f'{message!r} is no message: write ("user", "Hello")')
    return dict(zip(("role", "content"), message, strict=True))


def _set_input(request: inference_pb2.GenerateRequest, given: dict[str, Any]) -> None:
    inputs = [name for name in ("text", "token_ids", "messages") if name in given]
    if len(inputs) != 1:
        raise TypeError(f"a request has exactly one of text, token_ids, messages; got {', '.join(inputs) or 'none'}")
    value = given.pop(inputs[0])
    if inputs[0] == "text":
        assign(request, "text", value)
    elif inputs[0] == "token_ids":
        extend(request.token_ids, "ids", value, name="token_ids")
        request.token_ids.SetInParent()  # of an empty list, too
    else:
        with naming("messages"):
            if isinstance(value, str | Mapping):
                raise TypeError(f"is a sequence of messages, not {value!r}")
            request.chat.CopyFrom(inference_pb2.Chat(messages=[chat_message(message) for message in value]))
        set_tools(request.chat, given.pop("tools", ()), given.pop("tool_choice", ""))


def _set_sampling(sampling: inference_pb2.SamplingParams, given: dict[str, Any]) -> None:
    for name in sorted(_SAMPLING & given.keys()):
        assign(sampling, name, given.pop(name))
    for name in _SAMPLING_LISTS:
        if name in given:
            extend(sampling, name, given.pop(name))
    with naming("logit_bias"):
        sampling.logit_bias.update(given.pop("logit_bias", {}))


def _set_stop(stop: inference_pb2.StopConditions, given: dict[str, Any]) -> None:
    for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop"):
        if name in given:
            assign(stop, name, given.pop(name))
    for name, field in (("stop", "strings"), ("stop_token_ids", "token_ids")):
        if name in given:
            extend(stop, field, given.pop(name), name=name)


def _set_output(output: inference_pb2.OutputOptions, given: dict[str, Any]) -> None:
    for name in ("logprobs", "skip_special_tokens", "prompt_logprobs", "echo", "return_prompt", "parse_tool_calls"):
        if name in given:
            assign(output, name, given.pop(name))
    if "output" in given:
        output.format = enum_value("output", given.pop("output"), _FORMATS)
