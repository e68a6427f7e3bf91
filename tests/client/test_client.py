import copy
import math
import pickle
import re
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import timedelta

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2  # type: ignore[import-untyped]

import octavo
from octavo import Client
from octavo.client.errors import FieldViolation, InvalidRequest, Overloaded, ServerFault, Unauthorized, Unavailable
from octavo.client.options import tls_credentials
from octavo.client.requests import generate_request
from octavo.v1 import model_pb2
from tests.support.gateway.scripted_server import Script, finished


@pytest.fixture
def client(target: str) -> Iterator[Client]:
    with Client(target) as client:
        yield client


def test_the_package_lists_what_it_has() -> None:
    """Names are imported when they are asked for, and shells offer what dir() gives."""
    assert {"Client", "AsyncClient", "OctavoError", "generate_request"} <= set(dir(octavo))


def test_a_stream_gives_its_text_then_knows_how_it_ended(client: Client) -> None:
    stream = client.stream(text="hi")
    assert "".join(stream) == "Hello, wörld"
    assert stream.started is not None
    assert (stream.started.request_id, stream.token_ids, stream.finished) == ("r", [0, 1, 2], finished())


def test_several_outputs_are_told_apart(client: Client) -> None:
    stream = client.stream(text="hi", num_outputs=2)
    assert list(stream.pieces())[:3] == [(0, "Hello"), (1, "Hello"), (0, ", ")]
    assert [(each.text, each.token_ids) for each in stream.outputs] == [("Hello, wörld", [0, 1, 2])] * 2
    assert [each.finished and each.finished.output_index for each in stream.outputs] == [0, 1]
    with pytest.raises(ValueError, match="2 outputs"):
        "".join(client.stream(text="hi", num_outputs=2))


def test_outputs_that_no_server_admits_take_no_memory(client: Client, script: Script, refusal: tuple) -> None:
    script.failures.append(refusal)
    tracemalloc.start()
    with pytest.raises(InvalidRequest):
        list(client.stream(text="hi", num_outputs=100_000).pieces())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


def test_a_request_is_cancelled_by_its_id(client: Client, script: Script, refusal: tuple) -> None:
    assert [client.cancel(each).found for each in ("r", "other")] == [True, False]
    assert client.cancel("r").num_unreachable_gateways == 2
    script.failures.append(refusal)
    with pytest.raises(InvalidRequest):
        client.cancel("r")


def test_deltas_give_everything(client: Client) -> None:
    assert [(each.text, list(each.token_ids)) for each in client.stream(text="hi").deltas()] == [
        ("Hello", [0]),
        (", ", [1]),
        ("wörld", [2]),
    ]


def test_a_stream_without_its_last_event_is_a_fault(client: Client, script: Script) -> None:
    script.finishes = False
    stream = client.stream(text="hi")
    with pytest.raises(ServerFault, match="without its last event"):
        "".join(stream)


def test_a_refused_field_is_named(client: Client, script: Script, refusal: tuple) -> None:
    script.failures.append(refusal)
    with pytest.raises(InvalidRequest) as caught:
        "".join(client.stream(text="hi"))
    error = caught.value
    assert (error.code, error.reason, error.request_id, error.tokens_delivered, error.violations) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        "r1",
        0,
        (FieldViolation(field="sampling.top_p", description="must be in (0, 1]"),),
    )
    assert len(script.requests) == 1


def test_a_full_server_is_tried_again_after_the_wait_that_it_asks_for(
    client: Client, script: Script, overload: tuple
) -> None:
    script.failures += [overload, overload]
    assert "".join(client.stream(text="hi")) == "Hello, wörld"
    assert len(script.requests) == 3


def test_a_server_that_stays_full_is_given_up(client: Client, script: Script, overload: tuple) -> None:
    script.failures += [overload] * 10
    with pytest.raises(Overloaded) as caught:
        client.complete(text="hi")
    assert (len(script.requests), caught.value.retry_after_s) == (4, 0.02)


def test_a_message_that_is_too_large_is_no_reason_to_try_again(client: Client, script: Script) -> None:
    with pytest.raises(InvalidRequest, match=r"CLIENT: Sent message larger than max"):
        client.complete(text="x" * 2**24)
    script.failures += [(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 8)", ())]
    script.failures += script.failures * 3
    with pytest.raises(InvalidRequest) as caught:
        client.complete(text="hi")
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stream_that_has_begun_is_never_replayed(client: Client, script: Script, loss: tuple) -> None:
    script.failures.append(loss)
    script.fails_after_text = True
    seen: list[str] = []
    with pytest.raises(Unavailable) as caught:
        seen.extend(client.stream(text="hi"))
    assert (caught.value.reason, caught.value.tokens_delivered, len(script.requests)) == ("WORKER_LOST", 3, 1)


def test_leaving_a_stream_ends_the_request_on_the_server(client: Client, script: Script) -> None:
    script.hold_s = 120.0
    with client.stream(text="hi") as stream:
        assert next(iter(stream)) == "Hello"
        assert not script.ended.is_set()
    assert script.ended.wait(30.0)


def test_one_message_has_it_all(client: Client, script: Script) -> None:
    answer = client.complete(messages=[("user", "hi")], max_tokens=2)
    assert (answer.text, answer.finished) == ("Hello, wörld", finished())
    assert script.requests[0].stop.max_tokens == 2


def test_a_request_that_is_made_takes_no_further_fields(client: Client, script: Script) -> None:
    request = generate_request(text="hi", max_tokens=2)
    assert "".join(client.stream(request)) == client.complete(request).text == "Hello, wörld"
    for call in (client.stream, client.complete):
        with pytest.raises(TypeError, match="takes no further fields; got max_tokens, seed"):
            call(request, seed=1, max_tokens=5)
    assert script.requests == [request, request]


def test_models_and_tokens(client: Client) -> None:
    assert client.models() == [model_pb2.ModelInfo(name="m")]
    assert client.tokenize("hé") == [104, 195, 169]
    assert client.detokenize([104, 195, 169]) == "hé"


def pickled(error: InvalidRequest) -> InvalidRequest:
    back: InvalidRequest = pickle.loads(pickle.dumps(error))  # noqa: S301
    return back


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_an_error_may_be_copied_and_go_to_another_process(
    client: Client, script: Script, refusal: tuple, again: Callable[[InvalidRequest], InvalidRequest]
) -> None:
    script.failures.append(refusal)
    with pytest.raises(InvalidRequest) as caught:
        "".join(client.stream(text="hi"))
    caught.value.add_note("of the second try")
    copied = again(caught.value)
    assert (type(copied), str(copied), vars(copied)) == (InvalidRequest, str(caught.value), vars(caught.value))
    assert copied.violations


def test_details_that_cannot_be_read_leave_the_error(client: Client, script: Script) -> None:
    inner = any_pb2.Any(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff")
    for details in (b"\xff", status_pb2.Status(details=[inner]).SerializeToString()):
        script.failures.append((grpc.StatusCode.INVALID_ARGUMENT, "no", (("grpc-status-details-bin", details),)))
        with pytest.raises(InvalidRequest, match=r"^no ") as caught:
            client.complete(text="hi")
        assert caught.value.violations == ()


@pytest.mark.parametrize("timeout_s", [1e10, 1e300, math.inf, 10**400])
def test_a_timeout_that_no_clock_reaches_is_none(timeout_s: float, client: Client) -> None:
    assert client.models(timeout_s=timeout_s) == [model_pb2.ModelInfo(name="m")]
    assert "".join(client.stream(text="hi", timeout_s=timeout_s)) == "Hello, wörld"


def test_a_timeout_that_is_no_number_is_refused_by_its_name(client: Client) -> None:
    for wrong in (math.nan, "5", b"5", [5], timedelta(seconds=5)):
        with pytest.raises(ValueError, match=f"^timeout_s: {re.escape(repr(wrong))} is no number of seconds$"):
            client.complete(text="hi", timeout_s=wrong)  # type: ignore[arg-type]


def test_what_a_small_call_cannot_send_is_named(client: Client) -> None:
    with pytest.raises(ValueError, match=r"^text: is not UTF-8 text, from its character 2 on$"):
        client.tokenize("x\ud800")
    with pytest.raises(ValueError, match=r"^token_ids: Value out of range: -1$"):
        client.detokenize([-1])
    with pytest.raises(TypeError, match=r"^token_ids: is a sequence, not the text b'ab'$"):
        client.detokenize(b"ab")
    with pytest.raises(TypeError, match=r"^request_id: "):
        client.cancel(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^model: is not UTF-8 text, from its character 1 on$"):
        client.tokenize("x", model="\ud800")
    with pytest.raises(TypeError, match=r"^model: "):
        client.detokenize([1], model=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^max_requests: Value out of range: -1$"):
        next(client.watch_load(max_requests=-1))
    with pytest.raises(TypeError, match=r"^interval_s: "):
        next(client.watch_load(interval_s="1"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "error"), [("", ValueError), (["127.0.0.1:1"], TypeError), (None, TypeError)])
def test_a_target_that_is_none_is_refused(target: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^target: is "):
        Client(target)


@pytest.mark.parametrize("target", ["127.0.0.1:99999", "dns:///localhost:65536", "127.0.0.1:1,127.0.0.2:99999"])
def test_a_port_that_there_is_not_is_refused(target: str) -> None:
    """gRPC took its last 16 bits, and asked whoever listens there."""
    with pytest.raises(ValueError, match=r": a port is at most 65535, not \d{5}$"):
        Client(target)
    Client("unix:/tmp/socket:99999").close()


def test_a_list_of_servers_names_the_one_that_is_no_address() -> None:
    for wrong in ("gateway", "gateway:1", ""):
        with pytest.raises(ValueError, match=f"addresses with ports alone, not '{wrong}'$"):
            Client(f"127.0.0.1:1,{wrong}")


def test_nobody_there_is_told_as_such() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable) as caught:
        client.models(timeout_s=30.0)
    assert caught.value.reason == ""


def test_every_call_carries_the_key(target: str, script: Script) -> None:
    with Client(target, api_key="the-key") as client:
        client.complete(text="hi")
        "".join(client.stream(text="hi"))
        client.models()
        client.detokenize(client.tokenize("hi"))
    assert script.authorizations == ["Bearer the-key"] * 5


def test_a_key_that_no_header_can_hold_is_told_before_any_call() -> None:
    for key in ("two\nlines", "schlüssel"):
        with pytest.raises(ValueError, match="visible ASCII"):
            Client("127.0.0.1:1", api_key=key)
    with pytest.raises(TypeError, match=r"^api_key: is text, not a value of type bytes$"):
        Client("127.0.0.1:1", api_key=b"secret")  # type: ignore[arg-type]


def test_refused_keys_and_rights_have_a_class_of_their_own(client: Client, script: Script) -> None:
    for code, reason in (
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
        (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    ):
        script.failures.append((code, "no", (("x-error-reason", reason),)))
        with pytest.raises(Unauthorized) as caught:
            client.complete(text="hi")
        assert (caught.value.code, caught.value.reason) == (code, reason)


def test_half_a_client_certificate_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="both"):
        tls_credentials(cert_file="cert.pem")
