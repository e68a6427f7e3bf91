"""A worker that lies: between the engine and its link, one message in a while says what no correct worker says."""

import msgspec
import numpy as np

from sim.journal import Journal
from sim.runner import VOCAB_SIZE
from wire.messages import Finished, StepOutput, WireFinishReason
from worker.link import WorkerLink
from worker.ports import GatewayIndex, OutboxMessage

LIES = (
    "token_out_of_range",
    "unknown_handle",
    "ends_twice",
    "wrong_count",
    "gap",
    "old_epoch",
    "garbage",
    "late_token",
)


class LyingOutbox:
    """An Outbox. ``lie``: what to say with the next message that it can be said with; "" for the truth."""

    def __init__(self, link: WorkerLink, journal: Journal) -> None:
        self.lie = ""
        self._ended: int | None = None  # a handle that can have no more tokens
        self._link = link
        self._journal = journal

    def put_all(self, message: OutboxMessage) -> None:
        self._link.put_all(message)

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        if self.lie and isinstance(message, StepOutput):
            if self.lie == "garbage":
                self._link._gateways[gateway].socket.send(b"\x01\xc1garbage")
            lie = self._lied(message)
            if lie is not message or self.lie == "garbage":
                self._journal.faults[f"lie:{self.lie}"] += 1
                self.lie = ""
            message = lie
        self._link.put(gateway, message)
        if isinstance(message, StepOutput) and message.finished:
            self._ended = message.finished[0].handle

    def _lied(self, message: StepOutput) -> StepOutput:
        replace = msgspec.structs.replace
        match self.lie:
            case "token_out_of_range" if message.tokens:
                tokens = message.tokens[:-4] + np.array([VOCAB_SIZE + 7], "<i4").tobytes()
                return replace(message, tokens=tokens)
            case "unknown_handle":
                stranger = Finished(handle=1 << 40, reason=WireFinishReason.LENGTH)
                return replace(message, finished=(*message.finished, stranger))
            case "ends_twice" if message.finished:
                return replace(message, finished=message.finished * 2)
            case "wrong_count" if message.finished:
                first = message.finished[0]
                wrong = replace(first, completion_tokens=first.completion_tokens + 1)
                return replace(message, finished=(wrong, *message.finished[1:]))
            case "gap":
                return replace(message, seq=message.seq + 1)
            case "old_epoch":
                return replace(message, epoch="0" * 32)
            case "late_token" if self._ended is not None:
                handles = message.handles + np.array([self._ended], "<i8").tobytes()
                return replace(message, handles=handles, tokens=message.tokens + np.array([5], "<i4").tobytes())
        return message
