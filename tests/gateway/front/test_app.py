"""The HTTP application in front of a gateway of this process, whose workers speak as told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from octavo.gateway.errors import TenantLimit
from octavo.gateway.front import calls
from octavo.gateway.front.app import make_app
from octavo.gateway.text.model_text import ModelText
from octavo.wire.messages import TokenLogprobs, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun
from tests.support.gateway.generating import ids_of

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
ENDOFTEXT, IM_START, IM_END = 0, 1, 2  # special tokens of the small tokenizer


@dataclass(frozen=True, eq=False)
class Answer:
    """headers: by their names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream; the last one is [DONE]."""
        data = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


@dataclass(frozen=True, eq=False)
class Front:
    """An application that runs."""

    app: Starlette
    pool: FakePool

    async def ask(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        """One request, by a caller that stays until its end."""
        given, sent = [{"type": "http.request", "body": json.dumps(body).encode()}], list[Any]()

        async def receive() -> Any:
            return given.pop() if given else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        }  # fmt: skip
        await self.app(scope, receive, send)
        head = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], head, b"".join(each.get("body", b"") for each in sent[1:]))

    async def completion(self, **body: Any) -> Any:
        """An answer, whole; and that a stream says the same."""
        answer = await self.ask("/v1/completions", body)
        assert answer.status == 200, answer.body
        whole = answer.json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, used, done = (await self.ask("/v1/completions", body | options)).events
        assert (done, used["choices"], used["usage"]) == ("[DONE]", [], whole["usage"])
        for choice in whole["choices"]:
            own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == choice["index"]]
            assert "".join(each["text"] for each in own) == choice["text"]
            assert [each["finish_reason"] for each in own if each["finish_reason"]] == [choice["finish_reason"]]
            scores = [each["logprobs"] for each in own if each["logprobs"]]
            for name, values in (choice["logprobs"] or {}).items():
                assert [value for each in scores for value in each[name]] == values
        return whole


@pytest.fixture
def front(serve: Any) -> Callable[..., Any]:
    """`async with front(pool) as fronted`."""

    @asynccontextmanager
    async def fronting(pool: FakePool, **changes: Any) -> AsyncIterator[Front]:
        async with serve(pool, **changes) as served:
            app = make_app([served.gateway.listeners.address], max_body_bytes=1 << 20)
            async with app.router.lifespan_context(app):
                yield Front(app, pool)

    return fronting


def scored(*ids: int, reason: WireFinishReason = WireFinishReason.LENGTH, stop: int | None = None) -> FakePool:
    """A pool whose worker gives these tokens, with the log-probabilities that were asked for, then ends."""

    def speak(run: FakeRun) -> None:
        sampling, is_first = run.request.sampling, run.handle == run.request.handle
        if sampling.num_prompt_logprobs is not None and is_first:
            run.sink.on_prompt_logprobs([TokenLogprobs(-1.0, (70,), (-0.5,))] * (len(run.prompt_ids) - 1))  # type: ignore[attr-defined]
        scores = None if sampling.num_logprobs is None else [TokenLogprobs(-0.5, (71,), (-0.5,))] * len(ids)
        run.tokens(list(ids[: sampling.max_tokens]), scores)
        run.finish(reason, stop_token_id=stop)

    return FakePool(on_run=speak)


def begins(choice: Any) -> list[tuple[str, str]]:
    """Each token, and what of the text begins where it is said to begin."""
    scores = choice["logprobs"]
    places = zip(scores["tokens"], scores["text_offset"], strict=True)
    return [(token, choice["text"][start : start + len(token)]) for token, start in places]


async def test_an_error_tells_the_id_by_which_the_log_has_it(front: Callable[..., Any]) -> None:
    async with front(FakePool(refuse=[ZeroDivisionError("secret")])) as fronted:
        answer = await fronted.ask("/v1/completions", {"prompt": "Hello"})
    assert (answer.status, answer.json["error"]["code"]) == (500, "internal")
    assert answer.json["error"]["message"] == "internal error; the server's log has it under this request id"
    assert answer.headers["x-request-id"].startswith("cmpl-")


@pytest.mark.parametrize(
    ("reason", "error", "status", "header"),
    [
        (WireFinishReason.CANCELLED, "", 503, ("x-should-retry", "false")),
        (WireFinishReason.ERROR, "NUMERICAL", 500, ("x-should-retry", "false")),
        (WireFinishReason.ERROR, "CONSTRAINT", 400, ("x-should-retry", "false")),
        (WireFinishReason.ERROR, "QUEUE_FULL", 429, ("retry-after", "1")),
        (WireFinishReason.ERROR, "DRAINING", 503, ("retry-after", "1")),
    ],
)
async def test_clients_are_told_whether_to_repeat_what_failed(
    front: Callable[..., Any], reason: WireFinishReason, error: str, status: int, header: tuple[str, str]
) -> None:
    """They do so by themselves else: a request that an operator cancelled would be there again."""
    async with front(FakePool(on_run=lambda run: run.finish(reason, error=error))) as fronted:
        for stream in (True, False):
            answer = await fronted.ask("/v1/completions", {"prompt": "Hello", "stream": stream})
            told = {name: answer.headers[name] for name in ("x-should-retry", "retry-after") if name in answer.headers}
            assert (answer.status, told) == (status, dict([header]))


def fails_on_its_way(run: FakeRun) -> None:
    run.tokens([70])
    run.finish(WireFinishReason.ERROR, error="NUMERICAL", detail="no finite logits")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/completions", {"prompt": ["Hello", "you"], "n": 2}),
        ("/v1/chat/completions", CHAT),
    ],
)
async def test_a_stream_that_fails_on_its_way_tells_the_error_and_that_it_is_at_its_end(
    front: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    """As vLLM does: one object that begins with the error, in an event without a name, for some clients look for both;
    then what tells every reader that nothing comes any more."""
    async with front(FakePool(on_run=fails_on_its_way)) as fronted:
        answer = await fronted.ask(path, body | {"stream": True})
    assert answer.status == 200
    *chunks, error, done = answer.events
    assert chunks
    assert all(each["choices"] for each in chunks)
    told = {"message": "no finite logits", "type": "server_error", "param": None, "code": "numerical"}
    assert (error, done) == ({"error": told}, "[DONE]")
    assert b'data: {"error":{' in answer.body
    assert b"event:" not in answer.body


async def test_a_defect_on_the_way_of_a_stream_is_told_in_it(
    front: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object, **fields: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("octavo.gateway.front.completions.reason_of", breaks)
    async with front(FakePool(on_run=lambda run: (run.tokens([70]), run.finish()))) as fronted:
        answer = await fronted.ask("/v1/completions", {"prompt": "Hello", "stream": True})
    *_, error, done = answer.events
    assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
    assert b"secret" not in answer.body


@pytest.mark.parametrize(("stop", "param"), [("", "stop"), ([""], "stop[0]"), (["a", ""], "stop[1]")])
async def test_a_stop_string_in_no_list_is_named_without_a_place(
    front: Callable[..., Any], stop: object, param: str
) -> None:
    async with front(FakePool()) as fronted:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", CHAT)):
            for stream in (False, True):
                answer = await fronted.ask(f"/v1/{path}", {**body, "stop": stop, "stream": stream})
                assert (answer.status, answer.json["error"]["param"]) == (400, param)
                assert answer.json["error"]["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {'k' * 600}"}, 200),
        ({"authorization": f"Bearer {'k' * 20_000}"}, 401),
        ({"x-api-key": "k" * 600}, 200),
        ({"authorization": "Basic eDp5", "x-api-key": "k" * 20_000}, 401),
        ({"traceparent": f"00-{'a' * 20_000}"}, 200),
        ({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=" + "y" * 20_000}, 200),
    ],
    ids=["long key", "too long key", "long x-api-key", "too long x-api-key", "traceparent", "tracestate"],
)
async def test_headers_that_a_gateway_has_no_room_for_are_told_or_left_out(
    front: Callable[..., Any], headers: dict[str, str], status: int
) -> None:
    """A gateway's refusal of too much metadata was told as 429, to be tried again."""
    async with front(FakePool(on_run=lambda run: run.finish())) as fronted:
        answer = await fronted.ask("/v1/completions", {"prompt": "Hello"}, headers)
    assert answer.status == status
    if status == 401:
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_while_a_gateway_is_gone_the_others_answer(serve: Any, tmp_path: Path) -> None:
    """One that was started again took its turns all the same: they failed, though another could be reached."""
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        app = make_app([served.gateway.listeners.address, f"unix:{tmp_path}/gone.sock"], max_body_bytes=1 << 20)
        async with app.router.lifespan_context(app):
            fronted = Front(app, served.pool)
            statuses = [(await fronted.ask("/v1/completions", {"prompt": "Hello"})).status for _ in range(6)]
    assert statuses == [200] * 6


async def test_what_cannot_be_reached_is_not_told_by_its_address(tmp_path: Path) -> None:
    app = make_app([f"unix:{tmp_path}/gone.sock"], max_body_bytes=1 << 20)
    async with app.router.lifespan_context(app):
        answer = await Front(app, FakePool()).ask("/v1/completions", {"prompt": "Hello"})
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["error"]["message"] == "the service does not answer"


async def test_a_body_that_says_it_is_too_long_is_not_waited_for() -> None:
    app, sent = make_app([], max_body_bytes=1 << 20), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-length", str((1 << 20) + 1).encode())],
    }  # fmt: skip
    async with asyncio.timeout(20):
        await app(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]  # nothing comes
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_who_has_to_wait_is_told_at_once_how_long(front: Callable[..., Any], path: str) -> None:
    """The front waited itself, three times, and said one second then."""
    pool = FakePool(refuse=[TenantLimit("too many", retry_after_ms=41_100)])
    async with front(pool) as fronted:
        async with asyncio.timeout(20):
            answer = await fronted.ask(path, {"prompt": "Hello"} if path == "/v1/completions" else {"input": "Hello"})
    assert (answer.status, answer.headers["retry-after"]) == (429, "42")
    assert answer.json["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (["a", "b", ""], "prompt[2]"),
        ([[5], [6, 7, 600]], "prompt[1][2]"),
        (["a", "b " * 400], "prompt[1]"),
        ([[5], [6] * 256], "prompt[1]"),
        ([[6, 600]], "prompt[1]"),
        (["a" * 999], "prompt"),
    ],
)
async def test_of_several_prompts_the_one_that_is_wrong_is_named(
    front: Callable[..., Any], prompt: Any, param: str, stream: bool
) -> None:
    async with front(FakePool()) as fronted:
        answer = await fronted.ask("/v1/completions", {"prompt": prompt, "stream": stream})
    told = answer.json["error"]
    assert (answer.status, told["param"]) == (400, param)
    assert told["message"].startswith(f"{param}: ") or len(prompt) == 1


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "input"),
        ([""], "input[0]"),
        ([6, 600], "input[1]"),
        ([[6, 600]], "input[0][1]"),
        ("b " * 400, "input"),
        (["b " * 400], "input[0]"),
        ([6] * 256, "input"),
    ],
)
async def test_an_input_that_is_in_no_list_is_named_as_none(front: Callable[..., Any], given: Any, param: str) -> None:
    async with front(FakePool()) as fronted:
        answer = await fronted.ask("/v1/embeddings", {"input": given})
    told = answer.json["error"]
    assert (answer.status, told["param"]) == (400, param)
    assert told["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("n", "most"), [(1, 4), (2, 2), (5, 1)])
async def test_of_many_prompts_so_many_run_at_once_as_a_worker_takes(
    front: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, n: int, most: int, stream: bool
) -> None:
    """More than a worker runs and queues were refused whenever they were asked for."""
    monkeypatch.setattr(calls, "OUTPUTS_AT_ONCE", 4)
    seen, runs, num_prompts = list[int](), list[FakeRun](), 9  # runs: open ones, n of a request

    def speak(run: FakeRun) -> None:
        runs.append(run)
        seen.append(len({each.request.request_id for each in runs}))
        if len(runs) == most * n or len(seen) == num_prompts * n:  # however long it takes until so many are there
            asyncio.get_running_loop().call_later(0.02, end_all)

    def end_all() -> None:
        while runs:
            runs[0].tokens([70])
            runs.pop(0).finish(WireFinishReason.LENGTH)

    async with front(FakePool(on_run=speak)) as fronted:
        body = {
            "prompt": [f"Hello {number}" for number in range(num_prompts)],
            "n": n,
            "max_tokens": 1,
            "stream": stream,
        }
        answer = await fronted.ask("/v1/completions", body)
    choices = [each["choices"][0] for each in answer.events[:-1]] if stream else answer.json["choices"]
    assert {each["index"] for each in choices} == set(range(9 * n))
    assert max(seen) == most


# ---------------------------------------------------------------- where tokens begin


@pytest.mark.parametrize("skip", [True, False, None])
async def test_special_tokens_that_are_left_out_take_no_place_in_the_text(
    front: Callable[..., Any], tiny_text: ModelText, skip: bool | None
) -> None:
    user, there = ids_of("user", tiny_text), ids_of("there", tiny_text)
    prompt = [IM_START, *user, IM_END, *there]
    special = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    async with front(scored(*user, ENDOFTEXT, *there, IM_END, reason=WireFinishReason.STOP, stop=IM_END)) as fronted:
        fields = {"echo": True, "logprobs": 0, "max_tokens": 40, "ignore_eos": True, "skip_special_tokens": skip}
        answer = await fronted.completion(prompt=prompt, **fields)
    (choice,) = answer["choices"]
    is_shown = skip is False
    assert choice["text"].startswith("<|im_start|>user<|im_end|>there" if is_shown else "userthere")
    told = begins(choice)
    assert {token for token, _ in told} >= special
    last = told.pop()  # ended the output: its text is left out in any case
    assert last == ("<|im_end|>", "")
    assert [pair for pair in told if pair[0] != pair[1] and (is_shown or pair[0] not in special)] == []


async def test_special_tokens_in_a_text_are_echoed_with_it(front: Callable[..., Any], tiny_text: ModelText) -> None:
    async with front(scored(*ids_of("there", tiny_text))) as fronted:
        fields = {"echo": True, "logprobs": 0, "max_tokens": 40, "n": 2}
        answer = await fronted.completion(prompt="<|im_start|>user<|im_end|>", **fields)
    for choice in answer["choices"]:
        assert choice["text"] == "<|im_start|>user<|im_end|>there"
        assert [pair for pair in begins(choice) if pair[0] != pair[1]] == []


# ---------------------------------------------------------------- the prompt alone


@pytest.mark.parametrize(
    "prompt", ["Once upon a time", [5, 6, 7], [5], ["Hello", "world, how"], [IM_START, 70, 71], [IM_START]]
)
async def test_no_tokens_are_the_prompt_alone(front: Callable[..., Any], tiny_text: ModelText, prompt: Any) -> None:
    """By which texts are scored."""
    async with front(scored(IM_END, reason=WireFinishReason.STOP, stop=IM_END)) as fronted:
        fields = {"prompt": prompt, "echo": True, "logprobs": 1, "n": 2}
        alone = await fronted.completion(max_tokens=0, **fields)
        with_one = await fronted.completion(max_tokens=1, **fields)
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["total_tokens"] == alone["usage"]["prompt_tokens"] == with_one["usage"]["prompt_tokens"]
    assert len(alone["choices"]) == len(with_one["choices"])
    for choice, longer in zip(alone["choices"], with_one["choices"], strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["text"] == longer["text"]  # the end token has no text
        assert choice["text"] or prompt == [IM_START]
        assert choice["logprobs"] == {name: values[:-1] for name, values in longer["logprobs"].items()}


async def test_no_tokens_without_echo_are_nothing(front: Callable[..., Any], tiny_text: ModelText) -> None:
    async with front(scored(*ids_of("there", tiny_text))) as fronted:
        scores = await fronted.completion(prompt="Hello", max_tokens=0, logprobs=2)
        echoed = await fronted.completion(prompt="Hello", max_tokens=0, echo=True)
        refused = await fronted.ask("/v1/completions", {"prompt": "a", "max_tokens": 0, "min_tokens": 1})
        of_service = await fronted.ask("/v1/completions", {"prompt": "a", "max_tokens": 0, "temperature": -1})
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}
        of_chat = await fronted.ask("/v1/chat/completions", chat)
    assert [(each["choices"][0]["text"]) for each in (scores, echoed)] == ["", "Hello"]
    assert scores["choices"][0]["logprobs"] == {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    assert echoed["choices"][0]["logprobs"] is None
    told = [(each.status, each.json["error"]["param"]) for each in (refused, of_service, of_chat)]
    assert told == [(400, "min_tokens"), (400, "temperature"), (400, "max_tokens")]


async def test_a_stream_numbers_its_calls_and_has_its_usage_at_the_end(
    front: Callable[..., Any], tiny_text: ModelText
) -> None:
    said = "".join(f'<tool_call>\n{{"name": "f", "arguments": {{"a": {n}}}}}\n</tool_call>\n' for n in (1, 2))
    pool = scored(*ids_of(said, tiny_text), reason=WireFinishReason.STOP, stop=IM_END)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    asked = CHAT | {"tools": tools, "max_tokens": 1000}
    async with front(pool) as fronted:
        whole = (await fronted.ask("/v1/chat/completions", asked)).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, used, done = (await fronted.ask("/v1/chat/completions", asked | options)).events
    assert (done, used["choices"], used["usage"]) == ("[DONE]", [], whole["usage"])
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    made = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [json.loads(each["arguments"]) for each in made] == [{"a": 1}, {"a": 2}]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]) for call in calls] == list(enumerate(made))
    assert len({call["id"] for call in calls}) == 2
