"""Pages of processes that may end at any moment, and leave their port to other programs."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from octavo.cli.serve.readiness import read_metrics


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Where one request is answered so, and the connection closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_one() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=answer_one)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        thread.join(10)


def test_samples_are_read_by_name() -> None:
    page = b'# TYPE up gauge\nup{worker_id="w"} 1\n'
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page) as url:
        assert read_metrics(url) == {"up": [({"worker_id": "w"}, 1.0)]}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nup 1\n",  # it ended meanwhile
        b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n<html>{</html>\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff",
    ],
)
def test_where_there_is_no_such_page_there_are_no_samples(answer: bytes) -> None:
    with answering(answer) as url:
        assert read_metrics(url) == {}
