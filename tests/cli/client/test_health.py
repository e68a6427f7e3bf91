"""`octavo health --worker`: what a probe of a worker's container prints and how it ends."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from octavo.cli.client.calls import worker_health
from octavo.cli.main import main
from octavo.cli.settings.groups import HealthSettings
from octavo.wire.scrape_server import ScrapeServer

Listen = Callable[[Callable[[], str | None] | None], int]


@pytest.fixture
def listen() -> Iterator[Listen]:
    with ExitStack() as stack:

        def run(why_not_ready: Callable[[], str | None] | None) -> int:
            server = ScrapeServer("127.0.0.1", 0, lambda page_format: b"a page", why_not_ready=why_not_ready)
            stack.callback(server.close)
            return server.port

        yield run


def probe(port: int, **more: str) -> int:
    return worker_health(HealthSettings(worker_metrics_port=port, **more))  # type: ignore[arg-type]


def test_a_worker_that_is_ready_is_told_so(listen: Listen, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(listen(lambda: None)) == 0
    assert capsys.readouterr().out == "ready\n"


def test_one_that_is_not_says_what_it_waits_for(listen: Listen, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(listen(lambda: "no gateway has taken this worker yet")) == 1
    assert capsys.readouterr().out == "no gateway has taken this worker yet\n"


def test_one_that_still_loads_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        assert probe(taken.getsockname()[1]) == 1
    assert capsys.readouterr().out == "UNREACHABLE\n"


@pytest.mark.parametrize("words", [["--live"], ["--model-name", "m"]])
def test_a_worker_is_not_asked_about_a_gateway(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--worker", *words]) == 2
    assert f"--worker and {words[0]} are given" in capsys.readouterr().err


def test_it_asks_where_the_worker_listens_and_no_proxy(
    listen: Listen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert probe(listen(lambda: None), metrics_host="0.0.0.0") == 0


def test_the_metrics_of_a_ready_process_are_still_there(listen: Listen) -> None:
    with socket.create_connection(("127.0.0.1", listen(lambda: "not yet"))) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        connection.settimeout(10)
        said = b"".join(iter(lambda: connection.recv(4096), b""))
    assert said.startswith(b"HTTP/1.1 200")
    assert said.endswith(b"a page")
