"""What concerns several fields of a GenerateRequest, or its model."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from octavo.gateway.errors import ExceedsCapacity, InvalidRequest, Violation
from octavo.gateway.text.chat_template import ChatInput
from octavo.gateway.validation.fields import raise_if_any, violations
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Capacity, ModelCard

_FORCED_CHOICES = (pb.TOOL_CHOICE_REQUIRED, pb.TOOL_CHOICE_NAMED)


_ROLES = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
}


def chat_input(chat: pb.Chat) -> ChatInput:
    """A validated chat in the form that templates expect: messages and tools as in OpenAI's API."""
    return ChatInput(
        messages=[_message(message) for message in chat.messages],
        tools=[_tool(tool) for tool in chat.tools] if may_call_tools(chat) else None,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
    )


def may_call_tools(chat: pb.Chat) -> bool:
    """Whether the tools are part of the prompt."""
    return bool(chat.tools) and chat.tool_choice != pb.TOOL_CHOICE_NONE


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": _ROLES[message.role], "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _call(call: pb.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments_json)}
    return ({"id": call.id} if call.id else {}) | {"type": "function", "function": function}


def _tool(tool: pb.ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = json.loads(tool.parameters_json)
    return {"type": "function", "function": function}


def check_generate(request: pb.GenerateRequest) -> None:
    """Every check that does not need the model. Raises InvalidRequest."""
    raise_if_any(chain(violations(request, ""), _across_fields(request, "")))


def check_complete(request: pb.CompleteRequest) -> None:
    """`check_generate` for the unary form."""
    across = _across_fields(request.generate, "generate.")
    raise_if_any(chain(violations(request, ""), across))


def check_embed(request: pb.EmbedRequest) -> None:
    """Every check of an EmbedRequest that does not need the model. Raises InvalidRequest."""
    chats = (chat_violations(each.chat, f"inputs[{index}].chat.") for index, each in enumerate(request.inputs))
    raise_if_any(chain(violations(request, ""), *chats))


def check_tokenize(request: pb.TokenizeRequest) -> None:
    """Every check of a TokenizeRequest. Raises InvalidRequest."""
    raise_if_any(chain(violations(request, ""), chat_violations(request.chat, "chat.")))


def is_constrained(request: pb.GenerateRequest) -> bool:
    """Whether the output must match a grammar: from `constraint`, or from tools that the chat must call."""
    return request.HasField("constraint") or request.chat.tool_choice in _FORCED_CHOICES


def _across_fields(request: pb.GenerateRequest, prefix: str) -> Iterator[Violation]:
    yield from _stop_violations(request.stop, prefix)
    yield from _format_violations(request, prefix)
    if not request.HasField("chat"):
        return
    yield from chat_violations(request.chat, f"{prefix}chat.")
    if request.chat.tool_choice in _FORCED_CHOICES and request.HasField("constraint"):
        yield Violation(
            field=f"{prefix}constraint", description="is one thing, calls that chat.tool_choice asks for are another"
        )


def _stop_violations(stop: pb.StopConditions, prefix: str) -> Iterator[Violation]:
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        why = f"{stop.min_tokens} is above the {stop.max_tokens} that may come"
        yield Violation(field=f"{prefix}stop.min_tokens", description=why)


def _format_violations(request: pb.GenerateRequest, prefix: str) -> Iterator[Violation]:
    if request.output.format != pb.OUTPUT_FORMAT_TOKEN_IDS:
        return
    if request.stop.strings:
        yield Violation(field=f"{prefix}stop.strings", description="needs text, but output.format is TOKEN_IDS")
    if request.output.HasField("skip_special_tokens"):
        yield Violation(
            field=f"{prefix}output.skip_special_tokens", description="needs text, but output.format is TOKEN_IDS"
        )
    if request.output.parse_tool_calls:
        yield Violation(
            field=f"{prefix}output.parse_tool_calls", description="needs text, but output.format is TOKEN_IDS"
        )


def chat_violations(chat: pb.Chat, prefix: str) -> Iterator[Violation]:
    """Fields of turns that are not allowed for their role."""
    for index, message in enumerate(chat.messages):
        path = f"{prefix}messages[{index}]"
        if message.tool_calls and message.role != pb.CHAT_ROLE_ASSISTANT:
            yield Violation(field=f"{path}.tool_calls", description="belongs to turns of CHAT_ROLE_ASSISTANT")
        if message.tool_call_id and message.role != pb.CHAT_ROLE_TOOL:
            yield Violation(field=f"{path}.tool_call_id", description="belongs to turns of CHAT_ROLE_TOOL")
    yield from _tool_choice_violations(chat, prefix)


def _tool_choice_violations(chat: pb.Chat, prefix: str) -> Iterator[Violation]:
    is_named, is_forced = chat.tool_choice == pb.TOOL_CHOICE_NAMED, chat.tool_choice in _FORCED_CHOICES
    if chat.tool_name and not is_named:
        yield Violation(field=f"{prefix}tool_name", description="belongs to TOOL_CHOICE_NAMED")
    if is_forced and not chat.tools:
        yield Violation(field=f"{prefix}tool_choice", description="needs tools")
    elif is_named and chat.tool_name not in {tool.name for tool in chat.tools}:
        yield Violation(field=f"{prefix}tool_name", description="is the name of no tool")
    names = set[str]()
    for index, tool in enumerate(chat.tools if is_forced else ()):
        if tool.name in names:
            yield Violation(field=f"{prefix}tools[{index}].name", description="is the name of another tool")
        names.add(tool.name)


def check_ids(ids: Sequence[int], vocab_size: int, path: str, *, first: int = 0) -> np.ndarray:
    """The ids as int32 [T]. first: position of the first one in the caller's list. Raises InvalidRequest naming ids
    that the model does not have."""
    if not ids:
        return np.empty(0, np.int32)
    ids_T = np.asarray(ids, np.int64)
    if ids_T.max() >= vocab_size:
        raise_if_any(
            Violation(field=f"{path}[{first + at}]", description=f"{ids_T[at]} is not below vocab_size ({vocab_size})")
            for at in np.flatnonzero(ids_T >= vocab_size)
        )
    return ids_T.astype(np.int32)


def check_choice(
    sampling: pb.SamplingParams,
    card: ModelCard,
    *,
    path: str,
    stop_ids: frozenset[int],
    bad_words: Sequence[Sequence[int]],
    min_tokens: int,
) -> None:
    """Check the fields that forbid tokens: their ids must exist, and some token must remain. path: of the sampling.
    stop_ids: that end the output. bad_words: as tokens. Raises InvalidRequest."""
    check_ids(sampling.allowed_token_ids, card.vocab_size, f"{path}allowed_token_ids")
    raise_if_any(
        Violation(field=f"{path}logit_bias[{token}]", description=f"is not below vocab_size ({card.vocab_size})")
        for token in sorted(sampling.logit_bias)
        if token >= card.vocab_size
    )
    allowed = set(sampling.allowed_token_ids)
    if allowed and not (allowed := allowed - {word[0] for word in bad_words if len(word) == 1}):
        raise _nothing_left(path, "bad_words forbid each of them")
    if allowed and min_tokens and allowed <= stop_ids:
        raise _nothing_left(path, "each of them ends the output, and stop.min_tokens asks for others before that")


def _nothing_left(path: str, why: str) -> InvalidRequest:
    return InvalidRequest.of(f"{path}allowed_token_ids", why)


def check_outputs(num_outputs: int, capacity: Capacity) -> None:
    """Raises ExceedsCapacity if a worker can never hold so many outputs, running or waiting."""
    room = capacity.max_num_seqs + capacity.max_waiting
    if num_outputs > room:
        description = f"{num_outputs} are more than the {room} that a worker runs and queues"
        raise ExceedsCapacity(description, field="num_outputs")


def check_capacity(*, num_prompt_tokens: int, min_tokens: int, card: ModelCard, capacity: Capacity) -> None:
    """Raises ExceedsCapacity if the prompt and at least one token (or min_tokens) can never fit."""
    output = max(1, min_tokens)
    check_context(num_prompt_tokens, output, card)
    pool_tokens = capacity.num_blocks * capacity.block_size
    # The last token of an output needs no place in the pool; one is counted all the same.
    if num_prompt_tokens + max(1, output - 1) > pool_tokens:
        raise _does_not_fit(num_prompt_tokens, output, f"the KV pool of {pool_tokens} tokens")


def check_context(num_prompt_tokens: int, num_output_tokens: int, card: ModelCard) -> None:
    """Raises ExceedsCapacity if both together are longer than the context."""
    if num_prompt_tokens + num_output_tokens > card.max_model_len:
        raise _does_not_fit(num_prompt_tokens, num_output_tokens, f"the context of {card.max_model_len} tokens")


def _does_not_fit(num_prompt_tokens: int, output: int, limit: str) -> ExceedsCapacity:
    return ExceedsCapacity(f"{num_prompt_tokens} prompt tokens and at least {output} of output do not fit into {limit}")
