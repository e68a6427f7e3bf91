"""The page's HTTP server: what it serves, whom it refuses, and how its calls begin and end."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from octavo.gateway.auth.authenticator import digest_of
from octavo.gateway.config import AccessConfig, Exposure, PageConfig
from octavo.gateway.page import server
from octavo.gateway.page.calls import CallFailed, Method, plain
from octavo.gateway.rpc.addresses import AddressError, BindError
from octavo.v1 import load_pb2
from tests.support.gateway.fake_pool import FakePool

WATCH = "/octavo.v1.LoadService/WatchLoad"
GENERATE = "/octavo.v1.InferenceService/Generate"
JSON = {"Content-Type": "application/json"}
PAGE = PageConfig(port=0)
PROMPT = {"request_id": "r1", "token_ids": {"ids": [4, 5, 6]}}


@dataclass
class Answer:
    """status and headers are here; the body comes as it is read."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def body(self) -> bytes:
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)

    async def events(self) -> AsyncIterator[tuple[str, Any]]:
        """Name and data of each server-sent event."""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n\n")
            for each in whole:
                lines = dict(line.split(": ", 1) for line in each.decode().split("\n"))
                yield lines.get("event", "message"), json.loads(lines["data"])


@asynccontextmanager
async def asked(
    served: Any, path: str, body: Any = None, *, method: str = "", headers: dict[str, str] | None = None
) -> AsyncIterator[Answer]:
    """One request over a connection of its own, which is closed at the end. body: to be JSON, or bytes."""
    host, port = served.gateway.listeners.page_url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = {"Host": f"{host}:{port}", "Content-Length": str(len(data))} | (JSON if body is not None else {})
    fields |= headers or {}
    head = f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(30):
            writer.write(head.encode() + data)
            status = int((await reader.readline()).split()[1])
            rows = {}
            while (line := await reader.readline()) != b"\r\n":
                name, value = line.decode().strip().split(": ", 1)
                rows[name.lower()] = value
            yield Answer(status, rows, reader)
    finally:
        writer.close()


async def status_of(served: Any, path: str, body: Any = None, **more: Any) -> int:
    async with asked(served, path, body, **more) as answer:
        return answer.status


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("path", "media_type"),
    [("/", "text/html"), ("/page.css", "text/css"), ("/main.js", "text/javascript"), ("/icon.svg", "image/svg+xml")],
)
async def test_files_come_with_headers_that_keep_others_out(serve: Any, path: str, media_type: str) -> None:
    async with serve(page=PAGE) as served, asked(served, path) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(media_type)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in answer.headers
        assert await answer.body()


@pytest.mark.parametrize(
    "path", ["/nothing", "/../server.py", "/static/../server.py", "/%2e%2e/server.py", "//main.js"]
)
async def test_nothing_else_is_served(serve: Any, path: str) -> None:
    async with serve(page=PAGE) as served:
        assert await status_of(served, path) == 404


def test_the_page_needs_nothing_from_elsewhere_and_has_no_code_in_its_markup(repository: Path) -> None:
    for file in (repository / "gateway/page/static").iterdir():
        text = file.read_text()
        assert "https://" not in text.replace("http://www.w3.org/2000/svg", ""), file.name
        assert "innerHTML" not in text, file.name
        assert "eval(" not in text, file.name
    markup = (repository / "gateway/page/static/index.html").read_text()
    assert " on" not in markup.replace(" once", "").replace(" one", "").split("<body>")[1].replace(" on ", "")
    assert "style=" not in markup


async def test_there_is_no_page_unless_it_is_asked_for(serve: Any) -> None:
    async with serve() as served:
        assert served.gateway.listeners.page_url == ""


# ---------------------------------------------------------------- who is let in


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil:1"])
async def test_a_name_of_another_host_that_leads_here_is_refused(serve: Any, host: str) -> None:
    async with serve(page=PAGE) as served:
        for path, body in (("/", None), (WATCH, {})):
            assert await status_of(served, path, body, headers={"Host": host}) == 421


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:9", "LOCALHOST", "[::1]:7", "10.1.2.3", "watch.example:8"])
async def test_addresses_localhost_and_names_that_were_given_are_let_in(serve: Any, host: str) -> None:
    async with serve(page=PageConfig(port=0, names=("watch.example",))) as served:
        assert await status_of(served, "/", headers={"Host": host}) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another port is another origin
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
async def test_calls_of_other_pages_are_refused(serve: Any, headers: dict[str, str], status: int) -> None:
    pool = FakePool()
    async with serve(pool, page=PAGE) as served:
        assert await status_of(served, GENERATE, PROMPT, headers=headers) == status
        assert pool.runs == []


async def test_other_methods_and_other_rpcs_are_not_served(serve: Any) -> None:
    async with serve(page=PAGE, admin_address="127.0.0.1:0") as served:
        assert await status_of(served, WATCH) == 405
        assert await status_of(served, "/", {}) == 405
        for path in ("/octavo.v1.AdminService/Drain", "/octavo.v1.InferenceService/Cancel"):
            assert await status_of(served, path, {}) == 404


async def test_the_page_asks_for_the_same_keys(serve: Any, tmp_path: Path) -> None:
    keys = {name: f"octavo-the-key-of-{name}-0123456789" for name in ("ann", "root")}
    file = tmp_path / "keys.toml"
    rows = [f'[keys.{name}]\nsha256 = "{digest_of(key).hex()}"\n' for name, key in keys.items()]
    file.write_text(rows[0] + rows[1] + 'scopes = ["admin"]\n')
    file.chmod(0o600)
    async with serve(page=PAGE, access=AccessConfig(api_keys_file=file)) as served:
        assert await status_of(served, "/") == 200  # the page has nothing of the service in it
        async with asked(served, WATCH, {}) as answer:
            assert (answer.status, json.loads(await answer.body())["code"]) == (401, "UNAUTHENTICATED")
        assert await status_of(served, WATCH, {}, headers={"X-Api-Key": keys["ann"]}) == 403
        assert await status_of(served, GENERATE, PROMPT, headers={"X-Api-Key": keys["root"]}) == 403
        assert await status_of(served, f"{WATCH}?key={keys['root']}", {}) == 401
        for headers in ({"X-Api-Key": keys["root"]}, {"Authorization": f"Bearer {keys['root']}"}):
            async with asked(served, WATCH, {}, headers=headers) as answer:
                assert answer.status == 200


# ---------------------------------------------------------------- calls


async def test_snapshots_stream_as_events(serve: Any) -> None:
    async with serve(page=PAGE) as served:
        async with asked(served, WATCH, {"interval_s": 0.2, "max_requests": 5}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = answer.events()
            for _ in range(3):
                name, snapshot = await anext(events)
                assert (name, snapshot["gateway"]) == ("message", "gateway")
                assert [each["worker_id"] for each in snapshot["workers"]] == ["w0"]
            assert served.gateway.load_watch.num_watchers == 1
        await served.until(lambda: served.gateway.load_watch.num_watchers == 0)


async def test_an_answer_streams_and_ends_with_its_receipt(serve: Any) -> None:
    pool = FakePool(on_run=lambda run: (run.tokens([70, 71]), run.finish()))
    async with serve(pool, page=PAGE) as served, asked(served, GENERATE, PROMPT) as answer:
        events = [event async for event in answer.events()]
    assert [next(iter(data), "") for _, data in events] == ["started", "delta", "finished", ""]
    assert events[-1][0] == "end"
    assert events[2][1]["finished"]["receipt"]["worker_id"] == "w0"
    assert served.gateway.meters.rpcs["/octavo.v1.InferenceService/Generate", "OK", ""] == 1


async def test_a_request_whose_browser_has_left_ends(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool, page=PAGE) as served:
        async with asked(served, GENERATE, PROMPT) as answer:
            assert (await anext(answer.events()))[1]["started"]["request_id"] == "r1"
        await served.until(lambda: pool.cancelled)
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
        method = "/octavo.v1.InferenceService/Generate"
        await served.until(lambda: served.gateway.meters.rpcs[method, "CANCELLED", "CLIENT"] == 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (WATCH, {"interval_s": 0.01}, 400, "interval_s"),
        (WATCH, {"nonsense": 1}, 400, "nonsense"),
        (WATCH, b"{", 400, "WatchLoadRequest"),
        (WATCH, b"\xff\xfe", 400, "WatchLoadRequest"),
        (WATCH, b"[" * 100_000, 400, "WatchLoadRequest"),
        (GENERATE, {}, 400, "input"),
        (GENERATE, {"model": "other", "token_ids": {"ids": [1]}}, 404, "no such model"),
    ],
)
async def test_what_is_wrong_is_said_by_its_field(serve: Any, path: str, body: Any, status: int, words: str) -> None:
    async with serve(page=PAGE) as served, asked(served, path, body) as answer:
        assert answer.status == status
        assert words in json.loads(await answer.body())["message"]


async def test_a_stream_that_fails_says_so_in_its_last_event(serve: Any) -> None:
    pool = FakePool(on_run=lambda run: (run.tokens([70]), run.lose(detail="it died")))
    async with serve(pool, page=PAGE) as served, asked(served, GENERATE, PROMPT) as answer:
        *_, (name, data) = [event async for event in answer.events()]
    assert (name, data["code"], data["reason"]) == ("failure", "UNAVAILABLE", "WORKER_LOST")


async def test_a_drain_ends_the_page_and_holds_nothing_up(serve: Any) -> None:
    async with serve(page=PAGE) as served:
        async with asked(served, WATCH, {"interval_s": 60}) as answer:
            events = answer.events()
            await anext(events)
            served.gateway.begin_drain()
            assert (await anext(events))[1]["is_draining"]
            name, data = await anext(events)
            assert (name, data["reason"]) == ("failure", "DRAINING")
        await served.until(served.gateway.drained.is_set)
        assert await status_of(served, WATCH, {}) == 503


def test_messages_become_the_json_that_the_library_makes() -> None:
    snapshot = load_pb2.WatchLoadResponse(
        window_s=10.5,
        total=load_pb2.LoadFigures(num_in_flight=3, queue_s=load_pb2.Percentiles(num_values=7, p50=0.25)),
        workers=[load_pb2.WorkerSnapshot(worker_id="w", block_map=load_pb2.BlockMap(states=[1, 4], lengths=[9, 2]))],
        requests=[load_pb2.RequestSnapshot(request_id='"<b>', phase=load_pb2.REQUEST_PHASE_DECODE, num_blocks=0)],
    )
    expected = MessageToDict(snapshot, preserving_proto_field_name=True, use_integers_for_enums=True)
    expected["total"]["queue_s"]["num_values"] = 7  # 64 bits are text in the library's
    assert plain(snapshot) == expected


# ---------------------------------------------------------------- bounds


async def test_a_body_has_a_limit(serve: Any) -> None:
    async with serve(page=PAGE) as served:
        assert await status_of(served, GENERATE, b" " * (server.MAX_BODY_BYTES + 1)) == 413


async def test_a_head_has_a_limit(serve: Any) -> None:
    async with serve(page=PAGE) as served:
        assert await status_of(served, "/", headers={"X-Long": "x" * 100 * server.MAX_HEAD_BYTES}) == 400


async def test_half_requests_are_closed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.2)
    async with serve(page=PAGE) as served:
        port = int(served.gateway.listeners.page_url.rstrip("/").rsplit(":", 1)[1])
        for part in (b"", b"GET / HTTP/1.1\r\nHost: 127"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(part)
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        assert await status_of(served, GENERATE, b"{", headers={"Content-Length": "100"}) == 408


async def test_many_connections_of_one_caller_keep_no_other_out(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    async with serve(page=PAGE) as served:
        port = int(served.gateway.listeners.page_url.rstrip("/").rsplit(":", 1)[1])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        assert await status_of(served, "/") == 200
        for _, writer in idle:
            writer.close()


async def test_many_watchers_are_told_to_come_later(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.gateway.watching import watch

    monkeypatch.setattr(watch, "MAX_WATCHERS", 0)
    async with serve(page=PAGE) as served:
        assert await status_of(served, WATCH, {}) == 429


# ---------------------------------------------------------------- addresses


async def test_a_busy_port_that_was_asked_for_is_an_error_and_one_that_was_not_is_replaced(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BindError, match=f"--page-port 127.0.0.1:{port}"):
            async with serve(page=PageConfig(port=port)):
                pass
        monkeypatch.setattr(server, "DEFAULT_PORT", port)
        async with serve(page=PageConfig()) as served:
            assert not served.gateway.listeners.page_url.endswith(f":{port}/")
            assert await status_of(served, "/") == 200


async def test_it_leaves_this_host_only_when_that_is_asked_for_in_plain_words(serve: Any) -> None:
    with pytest.raises(AddressError, match=r"--page-host .*--exposure insecure"):
        async with serve(page=PageConfig(host="0.0.0.0", port=0)):
            pass
    async with serve(page=PageConfig(host="0.0.0.0", port=0), exposure=Exposure.INSECURE) as served:
        assert served.gateway.listeners.page_url


async def test_what_fails_around_a_handler_ends_the_call() -> None:
    async def behaviour(request: Any, context: Any) -> None:
        raise RuntimeError("not of the handler")

    async def intercept_service(continuation: Any, details: Any) -> Any:
        return SimpleNamespace(stream_stream=behaviour)

    interceptor: Any = SimpleNamespace(intercept_service=intercept_service)
    method = Method(WATCH, load_pb2.WatchLoadRequest, behaviour, interceptor)
    with pytest.raises(CallFailed) as failed:
        async with asyncio.timeout(10):
            _ = [message async for message in method.call(b"", (), "somebody")]
    assert failed.value.http_status == 500
