"""What both clients keep of one stream: the events so far. Nothing here reads from a call or waits."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import grpc

from octavo.client.errors import ServerFault
from octavo.client.tools import ToolCalls
from octavo.v1 import inference_pb2


class StreamCall(Protocol):
    """The blocking call that a stream reads from."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...


class AsyncStreamCall(Protocol):
    """The asyncio call that a stream reads from."""

    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...


CallT = TypeVar("CallT", StreamCall, AsyncStreamCall)


@dataclass(slots=True)
class OutputSoFar:
    """One output so far. token_ids, logprobs, calls: where the request asked for them. finished: None until
    its end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None
    calls: ToolCalls = field(default_factory=ToolCalls)

    @property
    def tool_calls(self) -> list[inference_pb2.ToolCall]:
        """Complete once `finished` is set."""
        return self.calls.all()

    def take(self, delta: inference_pb2.Delta) -> None:
        """Add what is new."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.calls.take(delta.tool_calls)


@dataclass(slots=True)
class StreamEvents:
    """The events of one stream, in order: one Started, any number of Delta, exactly one Finished for each output."""

    num_outputs: int = 1
    started: inference_pb2.Started | None = None
    prompt_logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    _outputs: list[OutputSoFar] = field(default_factory=list)

    @property
    def outputs(self) -> list[OutputSoFar]:
        """Each output so far; made when they are first asked for, since the server may not admit so many."""
        if not self._outputs:
            self._outputs = [OutputSoFar() for _ in range(self.num_outputs)]
        return self._outputs

    @property
    def first(self) -> OutputSoFar:
        """The only output, where the request asked for one."""
        return self.outputs[0]

    def check_single(self) -> None:
        """Raises ValueError where texts of several outputs would be mixed up."""
        if self.num_outputs > 1:
            raise ValueError(f"the request has {self.num_outputs} outputs: iterate over pieces()")

    def take(self, response: inference_pb2.GenerateResponse) -> inference_pb2.Delta | None:
        """Keep the event; returns it where it is new output."""
        match response.WhichOneof("event"):
            case "started":
                self.started = response.started
            case "finished":
                self._output(response.finished.output_index).finished = response.finished
            case "delta":
                self.prompt_logprobs.extend(response.delta.prompt_logprobs)
                self._output(response.delta.output_index).take(response.delta)
                return response.delta
        return None

    def _output(self, index: int) -> OutputSoFar:
        if index >= self.num_outputs:
            raise ServerFault(f"output {index} was not asked for", code=grpc.StatusCode.INTERNAL)
        return self.outputs[index]

    def end(self) -> None:
        """The stream ended with OK. Raises ServerFault where an output has no last event."""
        if any(output.finished is None for output in self.outputs):
            raise ServerFault("the stream ended without its last event", code=grpc.StatusCode.INTERNAL)


class TextSoFar(Generic[CallT]):
    """What both kinds of streams know of the output so far; each reads in its own way."""

    def __init__(self, call: CallT, *, num_outputs: int = 1) -> None:
        self._call: CallT = call
        self._events = StreamEvents(num_outputs=num_outputs)

    @property
    def started(self) -> inference_pb2.Started | None:
        """The first event."""
        return self._events.started

    @property
    def finished(self) -> inference_pb2.Finished | None:
        """The last event, of output 0."""
        return self._events.first.finished

    @property
    def token_ids(self) -> list[int]:
        """All ids of output 0 so far, where the request asked for ids."""
        return self._events.first.token_ids

    @property
    def tool_calls(self) -> list[inference_pb2.ToolCall]:
        """All calls of output 0 so far, where the request had tools; complete once `finished` is set."""
        return self._events.first.tool_calls

    @property
    def outputs(self) -> list[OutputSoFar]:
        """Each output so far."""
        return self._events.outputs

    @property
    def prompt_logprobs(self) -> list[inference_pb2.TokenLogprobs]:
        """Of the prompt's tokens from the second one on, where the request asked for them."""
        return self._events.prompt_logprobs

    def cancel(self) -> None:
        """End the request; its blocks are free at the next step. Does nothing after the end."""
        self._call.cancel()
