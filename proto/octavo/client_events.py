"""What both clients keep of one stream: the events seen so far. Pure."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from octavo.client_errors import ServerFault
from octavo.client_tools import ToolCalls
from octavo.v1 import inference_pb2


class StreamCall(Protocol):
    """The blocking call that a stream reads from."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...


class AsyncStreamCall(Protocol):
    """The asyncio call that a stream reads from."""

    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...


@dataclass(slots=True)
class StreamEvents:
    """The events of one stream, in order: one Started, any number of Delta, exactly one Finished."""

    started: inference_pb2.Started | None = None
    finished: inference_pb2.Finished | None = None
    token_ids: list[int] = field(default_factory=list)
    calls: ToolCalls = field(default_factory=ToolCalls)

    def take(self, response: inference_pb2.GenerateResponse) -> inference_pb2.Delta | None:
        """Keep the event; returns it where it is new output."""
        match response.WhichOneof("event"):
            case "started":
                self.started = response.started
            case "finished":
                self.finished = response.finished
            case "delta":
                self.token_ids.extend(response.delta.token_ids)
                self.calls.take(response.delta.tool_calls)
                return response.delta
        return None

    def end(self) -> None:
        """The stream ended with OK. Raises ServerFault where its last event is missing."""
        if self.finished is None:
            raise ServerFault("the stream ended without its last event", code=grpc.StatusCode.INTERNAL)
