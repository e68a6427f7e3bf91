"""`octavo serve --openai`: the front as a process of the service, asked by plain HTTP."""

import http.client
import json
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.gateway.certificates import Authority
from tests.support.services.guarded import guarded_service, octavo
from tests.support.services.service import Service, free_port, launch, wait_for

ORACLE = ("--runner=oracle", "--num-blocks=256", "--oracle-eos-every=1000000")
CHAT = {"messages": [{"role": "user", "content": "once upon"}], "seed": 7}


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, int]]:
    port = free_port()
    arguments = (*ORACLE, "--oracle-step-delay-s=0.005", "--gateways=2", f"--openai={port}")
    arguments += ("--max-streams-per-connection=2",)  # of each caller's, which the front is not
    with launch(tmp_path_factory.mktemp("fronted"), *arguments) as service:
        service.wait_until_supervised()
        yield service, port


def ask(
    port: int,
    path: str,
    body: object = None,
    *,
    key: str = "",
    scheme: tuple[str, str] = ("authorization", "Bearer "),
    context: ssl.SSLContext | None = None,
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Status, JSON and headers of an answer."""
    connection = _connection(port, context)
    headers = {"content-type": "application/json"} | ({scheme[0]: scheme[1] + key} if key else {})
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
    connection.request("GET" if data is None else "POST", path, data, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith(b"{") else text, answer.headers


def _connection(port: int, context: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
    if context is None:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    return http.client.HTTPSConnection("localhost", port, timeout=60, context=context)


def events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    """Of a stream, as they come; the last one is the text [DONE]."""
    for line in answer:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def open_stream(port: int, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = _connection(port)
    data = json.dumps(body | {"stream": True})
    connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
    return connection, connection.getresponse()


def front_pid(service: Service) -> int | None:
    return next((each.pid for each in service.children("openai")), None)


def test_the_summary_tells_the_address(fronted: tuple[Service, int]) -> None:
    service, port = fronted
    assert f"OpenAI:   http://127.0.0.1:{port}/v1" in service.log.read_text()


def test_a_stream_says_what_one_answer_says(fronted: tuple[Service, int]) -> None:
    _, port = fronted
    status, whole, headers = ask(port, "/v1/chat/completions", CHAT | {"max_tokens": 12})
    assert (status, whole["object"], whole["model"]) == (200, "chat.completion", "folio-chat")
    assert headers["x-request-id"] == whole["id"]
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    connection, answer = open_stream(port, CHAT | {"max_tokens": 12, "stream_options": {"include_usage": True}})
    assert (answer.status, answer.headers.get_content_type()) == (200, "text/event-stream")
    *chunks, used, done = events(answer)
    connection.close()
    assert done == "[DONE]"
    assert (used["choices"], used["usage"]["completion_tokens"]) == ([], 12)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {answer.headers["x-request-id"]}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == choice["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_caller_that_hangs_up_frees_its_memory(stream: bool, fronted: tuple[Service, int]) -> None:
    service, port = fronted
    service.wait_until_idle()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as caller:
        data = json.dumps(CHAT | {"max_tokens": 1900, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        caller.sendall(head.encode() + data)
        wait_for(lambda: any(load.num_running for load in service.load()))
        steps = sum(load.num_steps for load in service.load())
    service.wait_until_idle()
    assert sum(load.num_steps for load in service.load()) - steps < 1000  # not the 1,900 that it asked for


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        ("/v1/chat/completions", b"{", 400, None, "the body is not JSON"),
        ("/v1/chat/completions", b"[" * 100_000, 400, None, "the body is not JSON"),
        ("/v1/chat/completions", [], 400, None, "the body must be a JSON object"),
        ("/v1/chat/completions", {}, 400, "messages", "messages: field required"),
        ("/v1/chat/completions", CHAT | {"frob": 1}, 400, "frob", "unknown or unsupported field: frob"),
        ("/v1/chat/completions", CHAT | {"n": "many"}, 400, "n", "n: input should be a valid integer"),
        (
            "/v1/chat/completions",
            CHAT | {"max_tokens": -1},
            400,
            "max_tokens",
            "the request cannot be made: max_tokens: ",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"stop_token_ids": [-1]},
            400,
            "stop_token_ids",
            "the request cannot be made: ",
        ),
        ("/v1/completions", {"prompt": [2**32]}, 400, "prompt", "the request cannot be made: "),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": -1}, 400, "truncate_prompt_tokens", ""),
        ("/v1/embeddings", {"input": [2**32]}, 400, "input", ""),
        ("/v1/chat/completions", b"x" * (5 << 20), 413, None, "the body has more than 4,194,304 bytes"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of", "best_of: other than n is not supported"),
        ("/v1/completions", {"prompt": []}, 400, "prompt", "prompt: there is none"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, 400, "encoding_format", "encoding_format: "),
        ("/v1/embeddings", {"input": ["a"] * 300 + [""]}, 400, "input[300]", "input[300]: must not be empty"),
        ("/v1/embeddings", {"input": ["a"] * 256 + ["b " * 40_000]}, 400, "input[256]", "input[256]: more than "),
        ("/v1/nothing", {}, 404, None, "there is no /v1/nothing here"),
        ("/v1/embeddings", None, 405, None, "GET is not for /v1/embeddings"),
    ],
)
def test_mistakes_are_objects_of_openais_kind(
    path: str, body: object, status: int, param: str | None, said: str, fronted: tuple[Service, int]
) -> None:
    found, answer, _ = ask(fronted[1], path, body)
    assert found == status
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert answer["error"]["message"].startswith(said)


@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 6, 7], [5]])
def test_an_echoed_prompt_has_its_log_probabilities(prompt: str | list[int], fronted: tuple[Service, int]) -> None:
    """What evaluation harnesses score texts by; whole and as a stream."""
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1, "n": 2, "seed": 7}
    status, answer, _ = ask(fronted[1], "/v1/completions", body)
    assert status == 200
    num_tokens = answer["usage"]["prompt_tokens"] + 2
    for choice in answer["choices"]:
        scores = choice["logprobs"]
        assert {name: len(each) for name, each in scores.items()} == dict.fromkeys(scores, num_tokens)
        assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
        assert all(isinstance(each, float) for each in scores["token_logprobs"][1:])
        assert [len(each) for each in scores["top_logprobs"][1:]] == [1] * (num_tokens - 1)
        assert "".join(scores["tokens"]) == choice["text"]
        ends = [start + len(token) for start, token in zip(scores["text_offset"], scores["tokens"], strict=True)]
        assert scores["text_offset"] == [0, *ends[:-1]]
    connection = _connection(fronted[1])
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    pieces = [each["choices"][0] for each in events(connection.getresponse()) if each != "[DONE]"]
    connection.close()
    for choice in answer["choices"]:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [each for piece in own if piece["logprobs"] for each in piece["logprobs"][name]] == values


def test_parts_of_characters_have_their_bytes_and_begin_where_the_character_does(fronted: tuple[Service, int]) -> None:
    prompt = "\N{LLAMA}a\N{LLAMA}b"
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0, "seed": 7}
    _, answer, _ = ask(fronted[1], "/v1/completions", body)
    choice = answer["choices"][0]
    scores = choice["logprobs"]
    begins = dict(zip(scores["text_offset"], scores["tokens"], strict=True))
    assert choice["text"].startswith(prompt)
    assert (begins[1], begins[3], [*begins][:5]) == ("a", "b", [0, 1, 2, 3, 4])
    assert scores["tokens"].count("\ufffd") > 2


def test_a_connection_stays_while_its_caller_keeps_it(fronted: tuple[Service, int]) -> None:
    """It was closed after five seconds, just when the openai client may send the next request."""
    connection, sockets = _connection(fronted[1]), set[socket.socket | None]()
    for pause_s in (0.0, 6.0):
        time.sleep(pause_s)
        connection.request("GET", "/v1/models")
        answer = connection.getresponse()
        sockets.add(connection.sock)
        assert (answer.status, answer.read()[:1]) == (200, b"{")
    assert len(sockets) == 1
    connection.close()


def test_the_model_that_answered_is_named_where_the_caller_named_none(fronted: tuple[Service, int]) -> None:
    body = {"prompt": ["once", "upon"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    connection = _connection(fronted[1])
    connection.request("POST", "/v1/completions", json.dumps(body))
    *chunks, done = events(connection.getresponse())
    connection.close()
    assert (done, {chunk["model"] for chunk in chunks}) == ("[DONE]", {"folio-chat"})
    status, answer, _ = ask(fronted[1], "/v1/embeddings", {"input": "once upon"})
    assert (status, answer["model"]) == (200, "folio-chat")


def test_what_is_null_is_unset(fronted: tuple[Service, int]) -> None:
    """Clients send every field that they have, and -1 for all tokens as with vLLM."""
    names = ("model", "n", "stream", "stream_options", "tools", "tool_choice", "functions", "reasoning_effort", "top_p")
    status, answer, _ = ask(fronted[1], "/v1/chat/completions", CHAT | dict.fromkeys(names) | {"top_k": -1})
    assert (status, len(answer["choices"])) == (200, 1)


@pytest.mark.parametrize("header", ["origin: http://evil.example", "sec-fetch-site: same-origin"])
def test_pages_of_browsers_are_not_answered(header: str, fronted: tuple[Service, int]) -> None:
    name, _, value = header.partition(": ")
    connection = _connection(fronted[1])
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), {name: value, "content-type": "text/plain"})
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["type"]) == (403, "permission_error")
    connection.close()


def test_a_front_that_dies_is_started_again(fronted: tuple[Service, int]) -> None:
    service, port = fronted
    before = front_pid(service)
    assert before is not None
    psutil.Process(before).kill()
    wait_for(lambda: front_pid(service) not in (None, before))

    def answers() -> bool:
        try:
            return ask(port, "/v1/models")[0] == 200
        except OSError:
            return False

    wait_for(answers)
    assert [model["id"] for model in ask(port, "/v1/models")[1]["data"]] == ["folio-chat"]


def test_ps_tells_of_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    port = free_port()
    with launch(tmp_path, *ORACLE, f"--openai={port}") as service:
        service.wait_until_supervised()
        done = octavo("ps", "--json", folder=tmp_path)
        (found,) = map(json.loads, done.stdout.splitlines())
        front = found["processes"][-1]
        assert (front["name"], front["state"], front["url"]) == ("openai", "ready", f"http://127.0.0.1:{port}")


def test_a_drain_lets_a_stream_end(tmp_path: Path) -> None:
    port = free_port()
    with launch(tmp_path, *ORACLE, "--oracle-step-delay-s=0.02", f"--openai={port}") as service:
        service.wait_until_supervised()
        connection, answer = open_stream(port, CHAT | {"max_tokens": 80})
        chunks = events(answer)
        next(chunks)
        service.process.send_signal(signal.SIGTERM)
        rest = list(chunks)
        connection.close()
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert service.process.wait(60) == 0


def test_a_stream_whose_service_ends_gets_an_error_object(tmp_path: Path) -> None:
    port = free_port()
    arguments = (*ORACLE, "--oracle-step-delay-s=0.02", "--max-migrations=0", f"--openai={port}")
    with launch(tmp_path, *arguments) as service:
        service.wait_until_supervised()
        connection, answer = open_stream(port, CHAT | {"max_tokens": 1900})
        chunks = events(answer)
        next(chunks)
        service.children("worker")[0].kill()
        *_, last, done = chunks
        connection.close()
        assert (last["error"]["type"], last["error"]["code"], done) == ("server_error", "worker_lost", "[DONE]")


def test_keys_are_passed_on_and_tls_is_spoken(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    keys = tmp_path / "keys" / "api-keys.toml"
    key = octavo("keys", "new-api", "ann", "--file", keys, folder=tmp_path).stdout.strip()
    lesser = octavo("keys", "new-api", "bob", "--scope", "health", "--file", keys, folder=tmp_path).stdout.strip()
    port = free_port()
    doors = [f"--tls-cert-file={pair.cert}", f"--tls-key-file={pair.key}", f"--api-keys-file={keys}"]
    with guarded_service(tmp_path, *ORACLE, f"--openai={port}", *doors):
        context = ssl.create_default_context(cafile=str(authority.cert))
        body = CHAT | {"max_tokens": 3}
        wanted = [("", 401, "invalid_api_key"), ("wrong", 401, "invalid_api_key"), (lesser, 403, "permission_denied")]
        for given, status, code in wanted:
            found, answer, _ = ask(port, "/v1/chat/completions", body, key=given, context=context)
            assert (found, answer["error"]["code"]) == (status, code)
        for scheme in (("authorization", "Bearer "), ("x-api-key", "")):  # a refusal names both
            found, answer, _ = ask(port, "/v1/chat/completions", body, key=key, scheme=scheme, context=context)
            assert (found, answer["usage"]["completion_tokens"]) == (200, 3)
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(port, "/v1/models", key=key)  # in the clear


def test_new_certificates_are_shown_to_new_connections_and_broken_ones_are_not(tmp_path: Path) -> None:
    """One that ends soon, as these do, is told of by the front as well as by the gateway."""
    old, new = (Authority(folder_of(tmp_path, name), name) for name in ("old", "new"))
    pair, later = old.sign("server"), new.sign("server")
    contexts = [ssl.create_default_context(cafile=str(each.cert)) for each in (old, new)]
    port = free_port()

    def trusting() -> list[bool]:
        """Whose clients get an answer: the old authority's, the new one's."""
        return [is_answered(port, context) for context in contexts]

    with guarded_service(
        tmp_path,
        *ORACLE,
        "--gateways=1",
        f"--openai={port}",
        f"--tls-cert-file={pair.cert}",
        f"--tls-key-file={pair.key}",
    ):
        kept = http.client.HTTPSConnection("localhost", port, context=contexts[0], timeout=30)
        kept.request("GET", "/v1/models")
        assert kept.getresponse().read()
        assert trusting() == [True, False]
        wait_for(lambda: (tmp_path / "service.log").read_text().count("certificate_expires_soon") == 2)
        later.cert.replace(pair.cert)  # half a rotation
        wait_for(lambda: (tmp_path / "service.log").read_text().count("reload_refused") == 2)  # the gateway, too
        assert trusting() == [True, False]
        later.key.replace(pair.key)
        wait_for(lambda: trusting() == [False, True])
        kept.request("GET", "/v1/models")  # who was in stays in
        assert kept.getresponse().status == 200
        kept.close()


def folder_of(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def is_answered(port: int, context: ssl.SSLContext) -> bool:
    try:
        return ask(port, "/v1/models", context=context)[0] == 200
    except ssl.SSLError:
        return False


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["--tls-client-ca-file=ca.pem", "--tls-cert-file=c.pem", "--tls-key-file=k.pem"],
            ["error: --openai does not go with client certificates alone"],
        ),
        (["--openai-host=0.0.0.0"], ["error: bad address", "  --openai-host 0.0.0.0:0 can be reached"]),
        (["--host=0.0.0.0"], ["error: bad address", "  --host 0.0.0.0:0 can be reached"]),
        (["--metrics-host=0.0.0.0"], ["error: bad address", "  --metrics-host 0.0.0.0:0 can be reached"]),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_starts(
    arguments: list[str], lines: list[str], tmp_path: Path
) -> None:
    for name in ("ca", "c", "k"):
        (tmp_path / f"{name}.pem").write_text("x")
    done = octavo("serve", *ORACLE, "--openai=0", "--port=0", "--metrics-port=0", *arguments, folder=tmp_path)
    assert done.returncode != 0
    for found, wanted in zip(done.stderr.splitlines(), lines, strict=False):
        assert found.startswith(wanted), done.stderr
    assert len(done.stderr.splitlines()) == 3


def test_a_busy_port_names_its_flag(fronted: tuple[Service, int], tmp_path: Path) -> None:
    ports = ["--port=0", "--metrics-port=0", "--worker-metrics-port=0", f"--openai={fronted[1]}"]
    done = octavo("serve", *ORACLE, *ports, folder=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, f"error: port {fronted[1]} is busy")
    assert "choose another port with --openai" in done.stderr


def test_open_streams_leave_room_for_other_calls(fronted: tuple[Service, int]) -> None:
    """The front has one connection to each gateway."""
    service, port = fronted
    streams = [open_stream(port, CHAT | {"max_tokens": 1900, "seed": seed}) for seed in range(8)]
    try:
        most, deadline_s = 0, time.monotonic() + 5.0  # each lasts twice as long
        while most < len(streams) and time.monotonic() < deadline_s:
            most = max(most, sum(load.num_running + load.num_waiting for load in service.load()))
            time.sleep(0.05)
        assert most == len(streams), "at the worker, where limits and queues see them"
        assert ask(port, "/v1/models")[0] == 200
    finally:
        for connection, answer in streams:
            answer.close()
            connection.close()
    service.wait_until_idle()


def test_slow_readers_and_many_callers_do_not_mix(fronted: tuple[Service, int]) -> None:
    _, port = fronted
    texts: dict[int, str] = {}

    def one(seed: int) -> None:
        connection, answer = open_stream(port, CHAT | {"max_tokens": 20, "seed": seed})
        texts[seed] = "".join(
            each["choices"][0]["delta"].get("content") or "" for each in events(answer) if each != "[DONE]"
        )
        connection.close()

    readers = [threading.Thread(target=one, args=(seed,)) for seed in range(12)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    for seed in (0, 11):
        whole = ask(port, "/v1/chat/completions", CHAT | {"max_tokens": 20, "seed": seed})[1]
        assert texts[seed] == whole["choices"][0]["message"]["content"]
    assert len(texts) == 12
