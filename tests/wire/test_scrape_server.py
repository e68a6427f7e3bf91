"""The HTTP end of metrics: what scrapers get, and what a flood of them costs."""

import gzip
import http.client
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from wire import scrape_server
from wire.scrape_server import MAX_CONNECTIONS, MAX_HEAD_BYTES, MAX_REST_S, PageFormat, ScrapeServer

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
    assert get(server, path="/favicon.ico")[0::2] == (200, b"")
    status, headers, _ = get(server, "POST")
    assert (status, headers["allow"]) == (405, "GET, HEAD")


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


def test_scrapers_that_say_nothing_hold_up_nobody_and_above_the_bound_are_told_so(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who say nothing stay, and those who are refused are read, however long the machine pauses."""
    monkeypatch.setattr(scrape_server, "CONNECTION_TIMEOUT_S", 120.0)
    monkeypatch.setattr(scrape_server, "REFUSED_READ_S", 30.0)
    server = serve(lambda _: b"page")
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_CONNECTIONS - 1)]
    try:
        assert get(server)[2] == b"page"
        for _ in range(20):  # the one above may not have left yet
            silent.append(socket.create_connection(("127.0.0.1", server.port)))
            status, headers, _ = get(server)
            if status == 503:
                break
        assert (status, headers.get("retry-after")) == (503, "1")
    finally:
        for each in silent:
            each.close()
    for _ in range(200):  # until it has seen that they left
        if get(server)[0] == 200:
            return
        time.sleep(0.05)
    pytest.fail("places of scrapers that left are not free")


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
