"""A server of our contract that answers from a script, so that the clients can be tested without the service."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc


@dataclass
class Script:
    """What the server does: `failures` first, one per call; then the texts that it streams, and how a stream ends."""

    texts: tuple[str, ...] = ("Hello", ", ", "wörld")
    finishes: bool = True
    failures: list[tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]] = field(default_factory=list)
    fails_after_text: bool = False
    hold_s: float = 0.0
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    authorizations: list[str] = field(default_factory=list)  # of calls that had one
    tool_calls: tuple[inference_pb2.ToolCallDelta, ...] = ()  # each in a Delta of its own, after the texts
    embed_requests: list[inference_pb2.EmbedRequest] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)  # of the connections that streams came over
    pause_s: float = 0.0  # before each text


class ScriptedInference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers by the script."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self._script.requests.append(request)
        self._script.peers.add(context.peer())
        if not self._script.fails_after_text:
            self._fail(context)
        context.add_callback(self._script.ended.set)
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r", model="m", prompt_tokens=3))
        for index, text in enumerate(self._script.texts):
            time.sleep(self._script.pause_s)
            for output in range(request.num_outputs or 1):
                delta = inference_pb2.Delta(text=text, token_ids=[index], output_index=output)
                yield inference_pb2.GenerateResponse(delta=delta)
        for piece in self._script.tool_calls:
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(tool_calls=[piece]))
        self._fail(context)
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(self._script.hold_s)
        for output in range(request.num_outputs or 1) if self._script.finishes else ():
            end = finished()
            end.output_index = output
            yield inference_pb2.GenerateResponse(finished=end)

    def Complete(
        self, request: inference_pb2.CompleteRequest, context: grpc.ServicerContext
    ) -> inference_pb2.CompleteResponse:
        self._script.requests.append(request.generate)
        self._fail(context)
        return inference_pb2.CompleteResponse(text="".join(self._script.texts), finished=finished())

    def Embed(self, request: inference_pb2.EmbedRequest, context: grpc.ServicerContext) -> inference_pb2.EmbedResponse:
        self._script.embed_requests.append(request)
        self._fail(context)
        usage = common_pb2.Usage(prompt_tokens=1)
        vectors = [inference_pb2.Embedding(values=[index, 0.5], usage=usage) for index, _ in enumerate(request.inputs)]
        return inference_pb2.EmbedResponse(request_id="r", model="m", embeddings=vectors)

    def Cancel(
        self, request: inference_pb2.CancelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.CancelResponse:
        self._fail(context)
        return inference_pb2.CancelResponse(found=request.request_id == "r", num_unreachable_gateways=2)

    def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=list(request.text.encode()))

    def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self._script.failures:
            code, message, trailers = self._script.failures.pop(0)
            context.set_trailing_metadata(trailers)
            context.abort(code, message)


class ScriptedModels(model_pb2_grpc.ModelServiceServicer):
    """One model."""

    def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[model_pb2.ModelInfo(name="m")])


def finished() -> inference_pb2.Finished:
    """The last event of a stream."""
    result = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP)
    result.usage.completion_tokens = 3
    return result


def violation_trailers(path: str, description: str) -> tuple[tuple[str, str | bytes], ...]:
    """Trailers as the gateway makes them for a refused field."""
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field=path, description=description)
    packed = any_pb2.Any()
    packed.Pack(bad)
    status = status_pb2.Status(code=3, message="m", details=[packed])
    return (
        ("x-error-reason", "INVALID_FIELD"),
        ("x-request-id", "r1"),
        ("x-tokens-delivered", "0"),
        ("grpc-status-details-bin", status.SerializeToString()),
    )


class _Listener(grpc.ServerInterceptor):
    """Records what calls say about themselves."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        metadata = handler_call_details.invocation_metadata or ()
        self._script.authorizations += [str(value) for key, value in metadata if key == "authorization"]
        return continuation(handler_call_details)


@contextmanager
def running(script: Script, *options: tuple[str, int]) -> Iterator[str]:
    """The address of a server that follows the script. options: channel options of the server."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4), interceptors=[_Listener(script)], options=options)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(ScriptedInference(script), server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ScriptedModels(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait(5)
