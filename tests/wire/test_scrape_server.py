"""The HTTP end of metrics: what scrapers get, and what a flood of them costs."""

import gzip
import http.client
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.wire import scrape_server
from octavo.wire.scrape_server import MAX_CONNECTIONS, MAX_HEAD_BYTES, MAX_REST_S, PageFormat, ScrapeServer

Serve = Callable[[Callable[[PageFormat], bytes]], ScrapeServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ScrapeServer] = []

    def start(render: Callable[[PageFormat], bytes]) -> ScrapeServer:
        servers.append(ScrapeServer("127.0.0.1", 0, render))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def get(
    server: ScrapeServer, method: str = "GET", path: str = "/metrics", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        fields = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, fields, answer.read()
    finally:
        connection.close()


def test_scrapers_get_the_format_and_the_packing_that_they_accept(serve: Serve) -> None:
    server = serve(lambda page_format: page_format.name.encode())
    plain = {"content-type": PageFormat.TEXT.value, "content-length": "4", "connection": "close"}
    assert get(server) == (200, plain, b"TEXT")
    assert get(server, Accept_Encoding="deflate, identity") == (200, plain, b"TEXT")
    openmetrics = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3"
    status, headers, body = get(server, ACCEPT=openmetrics, Accept_Encoding="deflate, gzip")
    assert (status, headers["content-type"], headers["content-encoding"]) == (
        200,
        PageFormat.OPENMETRICS.value,
        "gzip",
    )
    assert gzip.decompress(body) == b"OPENMETRICS"
    assert get(server, "HEAD") == (200, plain, b"")
    status, headers, _ = get(server, "POST")
    assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/metrics", "/metrics/", "/metrics?name=up", "http://127.0.0.1:9090/metrics"])
def test_a_page_has_its_path(serve: Serve, path: str) -> None:
    assert get(serve(lambda _: b"page"), path=path)[0::2] == (200, b"page")


@pytest.mark.parametrize("path", ["/favicon.ico", "/metric", "/metrics/x", "/ready"])
def test_nothing_else_is_found(serve: Serve, path: str) -> None:
    """/ready neither, at a process that has no such answer: whoever asks the wrong one must not take it for ready."""
    assert get(serve(lambda _: b"page"), path=path)[0::2] == (404, b"not here: /metrics is\n")


def test_the_head_of_any_answer_is_told_alone(serve: Serve) -> None:
    server, why_not = serve(lambda _: b"page"), ["loading", None]
    server._why_not_ready = lambda: why_not[0]
    for status, length in ((503, "8"), (200, "6")):
        told, fields, body = get(server, "HEAD", "/ready")
        assert (told, fields["content-length"], body) == (status, length, b"")
        assert get(server, path="/ready?probe")[0] == status
        del why_not[0:1]
    assert get(server, "HEAD", "/nowhere")[0::2] == (404, b"")


def test_a_page_is_never_older_than_the_scrape_that_it_answers(serve: Serve) -> None:
    now = [0]
    server = serve(lambda _: b"%d" % now[0])
    for n in range(30):
        now[0] = n
        assert get(server)[2] == b"%d" % n


def test_a_flood_shares_pages_and_takes_a_share_of_one_core(serve: Serve) -> None:
    def slow(_: PageFormat) -> bytes:
        until_s = time.thread_time() + 0.005
        while time.thread_time() < until_s:
            pass
        return b"page"

    server, start_s = serve(slow), time.monotonic()
    with ThreadPoolExecutor(20) as threads:
        pages = list(threads.map(lambda _: get(server)[2], range(400)))
    # After each page the thread rests: nine times its work of at least 5 ms.
    most = 1 + (time.monotonic() - start_s) / min(MAX_REST_S, 9 * 0.005)
    assert pages == [b"page"] * 400
    assert 20 <= server.num_pages <= most


HALF = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


def is_hung_up(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("said", [b"", HALF])
def test_half_requests_keep_no_scraper_out_and_the_oldest_give_way(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Two hundred of them stay for longer than the test takes, however long the machine pauses."""
    monkeypatch.setattr(scrape_server, "CONNECTION_TIMEOUT_S", 120.0)
    server, silent = serve(lambda _: b"page"), list[socket.socket]()
    server._why_not_ready = lambda: None
    try:
        for n in range(200):
            silent.append(socket.create_connection(("127.0.0.1", server.port)))
            silent[-1].sendall(said)
            silent[-1].setblocking(False)
            if n % 20 == 19:
                assert get(server)[0::2] == (200, b"page")
                assert get(server, path="/ready")[0::2] == (200, b"ready\n")
        deadline_s = time.monotonic() + 60
        while sum(map(is_hung_up, silent)) < 200 - MAX_CONNECTIONS and time.monotonic() < deadline_s:
            time.sleep(0.01)
        ended = [is_hung_up(each) for each in silent]
        assert ended == sorted(ended, reverse=True), "a newer one was hung up before an older one"
        assert 200 - MAX_CONNECTIONS <= sum(ended) <= 200 - MAX_CONNECTIONS + 20
    finally:
        for each in silent:
            each.close()


def test_a_scraper_that_takes_no_byte_of_a_page_gives_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_server, "CONNECTION_TIMEOUT_S", 120.0)
    page = bytes(16 << 20)  # more than the system's buffers take
    server, idle = ScrapeServer("127.0.0.1", 0, lambda _: page, max_connections=4), list[socket.socket]()
    try:
        for _ in range(4):
            idle.append(socket.create_connection(("127.0.0.1", server.port)))
            idle[-1].sendall(HALF + b"\r\n")
            assert idle[-1].recv(1) == b"H"  # it is being written
        assert get(server)[2] == page
    finally:
        server.close()
        for each in idle:
            each.close()


def test_where_all_have_asked_the_next_is_told_to_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for a page that is half a minute away."""
    monkeypatch.setattr(scrape_server, "MAX_REST_S", 30.0)
    monkeypatch.setattr(scrape_server, "REST_PER_WORK", 1e9)
    monkeypatch.setattr(scrape_server, "REFUSED_READ_S", 30.0)
    monkeypatch.setattr(scrape_server, "CONNECTION_TIMEOUT_S", 120.0)
    server, asking = ScrapeServer("127.0.0.1", 0, lambda _: b"page", max_connections=4), list[socket.socket]()
    try:
        assert get(server)[2] == b"page"
        deadline_s = time.monotonic() + 60
        while server._num_open and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for _ in range(4):
            asking.append(socket.create_connection(("127.0.0.1", server.port)))
            asking[-1].sendall(HALF + b"\r\n")
        while (server._num_open < 4 or server._idle) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        status, headers, _ = get(server)
        assert (status, headers.get("retry-after")) == (503, "1")
    finally:
        server.close()
        for each in asking:
            each.close()


def test_a_head_without_end_and_garbage_cost_their_connection(serve: Serve) -> None:
    server = serve(lambda _: b"page")
    for rubbish in (b"x" * (4 * MAX_HEAD_BYTES), b"\r\n\r\n", b"\xff\x00 \r\n\r\n", b"GET\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:
            try:
                peer.sendall(rubbish)
                answer = peer.recv(100)
            except OSError:
                answer = b""
            assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert get(server)[2] == b"page"


def test_a_page_that_cannot_be_made_is_an_error_of_its_scrape(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    outcomes: Iterator[Exception | bytes] = iter([ValueError("defect"), b"page"])

    def render(_: PageFormat) -> bytes:
        outcome = next(outcomes)
        if isinstance(outcome, bytes):
            return outcome
        raise outcome

    server = serve(render)
    assert get(server)[0] == 500
    assert "defect" in caplog.text
    assert get(server)[2] == b"page"


def test_closing_frees_the_port_and_ends_the_thread(serve: Serve) -> None:
    server = serve(lambda _: b"page")
    waiting = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    assert get(server)[2] == b"page"
    server.close()
    server.close()
    assert waiting.recv(1) == b""
    waiting.close()
    again = ScrapeServer("127.0.0.1", server.port, lambda _: b"again")
    assert get(again)[2] == b"again"
    with pytest.raises(OSError, match="in use"):
        ScrapeServer("127.0.0.1", again.port, lambda _: b"")
    again.close()
