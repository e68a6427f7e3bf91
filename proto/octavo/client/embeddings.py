"""Builds `EmbedRequest` from plain Python values. Pure: no channel, no clock."""

from collections.abc import Sequence
from typing import SupportsIndex, TypedDict

from octavo.client.field_values import assign, enum_value, naming
from octavo.client.requests import Message, chat_message
from octavo.v1 import common_pb2, inference_pb2

EmbedInput = str | Sequence[int] | Sequence[Message] | inference_pb2.EmbedInput
"""A text, token ids, the messages of a conversation, or the contract's message."""

_POOLINGS = {"last_token": inference_pb2.POOLING_LAST_TOKEN, "mean": inference_pb2.POOLING_MEAN}
_PLAIN = ("request_id", "model", "normalize", "truncate_prompt_tokens", "priority", "cache_salt")


class EmbedFields(TypedDict, total=False):
    """Fields of a request; those left out take the server's default. pooling: "last_token" or "mean". The others are
    the fields of the same names in `octavo/v1/inference.proto`."""

    pooling: str
    request_id: str
    model: str
    normalize: bool
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str


def embed_request(inputs: Sequence[EmbedInput], **fields: object) -> inference_pb2.EmbedRequest:
    """Build a request with these `EmbedFields`.

    Raises TypeError for an unknown field and for a single text instead of a sequence, ValueError for an unknown pooling
    or role, and either of them for a value that a field cannot hold. Limits are checked by the server.
    """
    if isinstance(inputs, str):
        raise TypeError("inputs is a sequence of texts, not one text")
    given = dict(fields)
    with naming("inputs"):
        request = inference_pb2.EmbedRequest(inputs=[_embed_input(each) for each in inputs])
    pooling = given.pop("pooling", None)
    if pooling is not None:
        request.pooling = enum_value("pooling", pooling, _POOLINGS)
    for name in _PLAIN:
        if name in given:
            assign(request, name, given.pop(name))
    if given:
        raise TypeError(f"a request has no field {', '.join(sorted(given))}")
    return request


def _embed_input(value: EmbedInput) -> inference_pb2.EmbedInput:
    if isinstance(value, inference_pb2.EmbedInput):
        return value
    if isinstance(value, str):
        return inference_pb2.EmbedInput(text=value)
    if isinstance(value, bytes | bytearray):  # a sequence of integers, but nobody means these
        raise TypeError(f"a text is str, not {value!r}")
    items = list(value)
    if all(isinstance(item, SupportsIndex) for item in items):  # numpy's integers, too
        return inference_pb2.EmbedInput(token_ids=common_pb2.TokenIds(ids=items))  # type: ignore[arg-type]
    return inference_pb2.EmbedInput(chat=inference_pb2.Chat(messages=map(chat_message, items)))  # type: ignore[arg-type]
