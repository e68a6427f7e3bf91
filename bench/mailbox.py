"""Inbox and outbox of a gateway that lives in this process: what it asks goes in, what becomes of it is kept by others.

Must not know: engines, what is measured.
"""

from collections.abc import Iterator

import numpy as np

from octavo.wire.messages import StepOutput
from octavo.worker.engine.interfaces import GatewayIndex, InboxMessage, OutboxMessage

GATEWAY = GatewayIndex(0)


class Mailbox:
    """Both ports of a `worker.engine.engine.Engine`. What it does with the output of a step is a subclass's to say."""

    def __init__(self) -> None:
        self.coming: list[tuple[GatewayIndex, InboxMessage]] = []

    def drain(self) -> list[tuple[GatewayIndex, InboxMessage]]:
        """All of it."""
        coming, self.coming = self.coming, []
        return coming

    def wait(self, timeout_s: float) -> None:
        """Nothing comes by itself."""

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        """Of steps only: there is no other gateway that could ask for more."""
        if isinstance(message, StepOutput):
            self.take(message)

    def put_all(self, message: OutboxMessage) -> None:
        """Events of the prefix cache: nobody listens."""

    def take(self, output: StepOutput) -> None:
        """What a step gave."""
        raise NotImplementedError


def tokens_of(output: StepOutput) -> Iterator[tuple[int, int]]:
    """Handle and token, unpacked as a gateway does."""
    handles, tokens = np.frombuffer(output.handles, np.int64), np.frombuffer(output.tokens, np.int32)
    return zip(handles.tolist(), tokens.tolist(), strict=True)
