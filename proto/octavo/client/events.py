"""What both clients keep of a stream: its events so far. Nothing here reads from a call or waits."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import grpc

from octavo.client.errors import ServerFault
from octavo.client.tools import ToolCalls
from octavo.v1 import inference_pb2


class StreamCall(Protocol):
    """A blocking call that a stream reads from."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...


class AsyncStreamCall(Protocol):
    """An asyncio call that a stream reads from."""

    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...


CallT = TypeVar("CallT", StreamCall, AsyncStreamCall)


@dataclass(slots=True)
class OutputSoFar:
    """One output so far. token_ids, logprobs, calls: empty unless the request asked for them. finished: None until the
    output has ended."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None
    calls: ToolCalls = field(default_factory=ToolCalls)

    @property
    def tool_calls(self) -> list[inference_pb2.ToolCall]:
        """The tool calls, in order; complete once `finished` is set."""
        return self.calls.all()

    def take(self, delta: inference_pb2.Delta) -> None:
        """Append a piece of output."""
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
        """Each output so far. The list is created on first use, since the server may not admit that many outputs."""
        if not self._outputs:
            self._outputs = [OutputSoFar() for _ in range(self.num_outputs)]
        return self._outputs

    @property
    def first(self) -> OutputSoFar:
        """Output 0, which is the only one unless the request asked for several."""
        return self.outputs[0]

    def check_single(self) -> None:
        """Raises ValueError if there are several outputs, whose texts would be mixed up."""
        if self.num_outputs > 1:
            raise ValueError(f"the request has {self.num_outputs} outputs: iterate over pieces()")

    def take(self, response: inference_pb2.GenerateResponse) -> inference_pb2.Delta | None:
        """Record an event. Returns its Delta if it is new output, else None. Raises ServerFault for an output that was
        not asked for."""
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
        """To be called when the stream has ended with OK. Raises ServerFault if an output has no Finished event."""
        if any(output.finished is None for output in self.outputs):
            raise ServerFault("the stream ended without its last event", code=grpc.StatusCode.INTERNAL)


class TextSoFar(Generic[CallT]):
    """The output so far, for both kinds of streams; each reads in its own way."""

    def __init__(self, call: CallT, *, num_outputs: int = 1) -> None:
        self._call: CallT = call
        self._events = StreamEvents(num_outputs=num_outputs)

    @property
    def started(self) -> inference_pb2.Started | None:
        """The stream's first event; None until it has arrived."""
        return self._events.started

    @property
    def finished(self) -> inference_pb2.Finished | None:
        """The last event of output 0; None until it has arrived."""
        return self._events.first.finished

    @property
    def token_ids(self) -> list[int]:
        """The token ids of output 0 so far; empty unless the request asked for ids."""
        return self._events.first.token_ids

    @property
    def tool_calls(self) -> list[inference_pb2.ToolCall]:
        """The tool calls of output 0 so far, if the request had tools; complete once `finished` is set."""
        return self._events.first.tool_calls

    @property
    def outputs(self) -> list[OutputSoFar]:
        """Each output so far."""
        return self._events.outputs

    @property
    def prompt_logprobs(self) -> list[inference_pb2.TokenLogprobs]:
        """Log-probabilities of the prompt's tokens from the second one on; empty unless the request asked for them."""
        return self._events.prompt_logprobs

    def cancel(self) -> None:
        """End the request; its blocks are freed at the next step. Does nothing if the request has ended."""
        self._call.cancel()
