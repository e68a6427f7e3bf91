"""Messages to frames and back: one version byte, then msgpack.

Decoding never runs anything that a peer chose: typed structs only, and bytes that do not fit them raise
ProtocolError. Must not know sockets, nor what the messages mean: a message that decodes can still be wrong.
"""

from typing import TypeVar

import msgspec

from octavo.wire.messages import AdminReply, KvEvents, Message, Run, StepOutput, ToGateway, ToWorker
from octavo.wire.peer_messages import PeerReply, ToPeer

WIRE_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024  # a tokenizer bundle is the largest message
MAX_PEER_BYTES = 1024 * 1024  # between gateways: ids and figures
MAX_TO_WORKER_BYTES = 16 * 1024 * 1024  # a prompt of four million tokens

HANDLE_BYTES = 8  # int64
TOKEN_BYTES = 4  # int32

MessageT = TypeVar("MessageT")

_PREFIX = bytes([WIRE_VERSION])
_encoder = msgspec.msgpack.Encoder()
_to_gateway = msgspec.msgpack.Decoder(ToGateway)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_peer = msgspec.msgpack.Decoder(ToPeer)
_peer_reply = msgspec.msgpack.Decoder(PeerReply)


class ProtocolError(Exception):
    """A frame that this version of the wire does not understand; drop it and count it."""


class MessageTooLarge(ProtocolError):
    """Our own message is too large for any peer: a caller's mistake, raised before anything is sent."""


def encode(message: Message) -> bytes:
    """One frame. Raises MessageTooLarge."""
    frame = _PREFIX + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageTooLarge(f"{type(message).__name__} of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
    return frame


def decode_to_gateway(frame: bytes) -> ToGateway:
    """A worker's message. Raises ProtocolError, and nothing else, for any bytes."""
    message: ToGateway = _decode(_to_gateway, frame, limit_bytes=MAX_FRAME_BYTES)
    _check_arrays(message)
    return message


def decode_to_worker(frame: bytes) -> ToWorker:
    """A gateway's message. Raises ProtocolError, and nothing else, for any bytes."""
    message: ToWorker = _decode(_to_worker, frame, limit_bytes=MAX_TO_WORKER_BYTES)
    _check_arrays(message)
    return message


def decode_to_peer(frame: bytes) -> ToPeer:
    """Another gateway's question. Raises ProtocolError."""
    message: ToPeer = _decode(_to_peer, frame, limit_bytes=MAX_PEER_BYTES)
    return message


def decode_peer_reply(frame: bytes) -> PeerReply:
    """Another gateway's answer. Raises ProtocolError."""
    return _decode(_peer_reply, frame, limit_bytes=MAX_PEER_BYTES)


def _decode(decoder: "msgspec.msgpack.Decoder[MessageT]", frame: bytes, *, limit_bytes: int) -> MessageT:
    if len(frame) > limit_bytes:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds {limit_bytes}")
    if not frame:
        raise ProtocolError("empty frame")
    if frame[0] != WIRE_VERSION:
        raise ProtocolError(f"wire version {frame[0]}, this side speaks {WIRE_VERSION}")
    try:
        return decoder.decode(memoryview(frame)[1:])
    # Too deep nesting and bad UTF-8 raise Python's own errors.
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise ProtocolError(f"malformed message: {error}") from None


def _check_arrays(message: object) -> None:
    """Packed arrays must hold whole elements, and parallel arrays must have equal lengths."""
    if isinstance(message, StepOutput):
        num_rows, rest = divmod(len(message.handles), HANDLE_BYTES)
        if rest or len(message.tokens) != num_rows * TOKEN_BYTES:
            raise ProtocolError(f"{len(message.handles)} bytes of handles beside {len(message.tokens)} of tokens")
    elif isinstance(message, AdminReply):
        num_outputs = len(message.phases)
        if len(message.handles) != num_outputs * HANDLE_BYTES or len(message.held_blocks) != num_outputs * TOKEN_BYTES:
            raise ProtocolError(f"{len(message.handles)} bytes of handles beside {num_outputs} phases")
    elif isinstance(message, Run):
        if len(message.prompt_ids) % TOKEN_BYTES:
            raise ProtocolError(f"{len(message.prompt_ids)} bytes are no int32 array")
    elif isinstance(message, KvEvents) and any(len(event.token_ids) % TOKEN_BYTES for event in message.events):
        raise ProtocolError("token ids of a block are no int32 array")
