"""A hub on loopback: the part of the Hugging Face hub's HTTP interface that a download uses, with faults on demand."""

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "org/tiny"


class Hub(ThreadingHTTPServer):
    """fetched: how often each file was fetched; ranges: the Range headers of these requests. breaks_after: number of
    bytes after which a file's connection breaks, once for each file. is_gated: files are only for callers who accepted
    the terms. sizes: file sizes to report instead of the true ones. slow: a file whose last byte waits for `release`.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.fetched: Counter[str] = Counter()
        self.ranges: list[tuple[str, str]] = []
        self.breaks_after: dict[str, int] = {}
        self.is_gated = False
        self.sizes: dict[str, int] = {}
        self.slow: str | None = None
        self.release = threading.Event()

    def size_of(self, name: str) -> int:
        """The size that listings report."""
        return self.sizes.get(name, len(self.files[name]))


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        if path in (f"/api/models/{REPOSITORY}", f"/api/models/{REPOSITORY}/revision/main"):
            siblings = [{"rfilename": name, "size": hub.size_of(name)} for name in hub.files]
            self._answer(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            rows = [{"type": "file", "path": p, "size": len(c), "oid": etag(c)} for p, c in hub.files.items()]
            self._answer(json.dumps(rows).encode())
        elif path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/") and hub.is_gated:
            self._answer(b'{"error": "Access to model is restricted"}', {"X-Error-Code": "GatedRepo"}, status=403)
        elif path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
            self._answer_file(path.rsplit("/", 1)[-1])
        elif path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            self._answer(b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"}, status=404)
        else:
            self._answer(b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, status=404)

    def _answer_file(self, name: str) -> None:
        content = self.server.files[name]
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range", "")
        first = int(asked.removeprefix("bytes=").partition("-")[0] or 0) if asked else 0
        if self.command == "GET":
            self.server.fetched[name] += 1
            self.server.ranges += [(name, asked)] if asked else []
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._answer(content[first:], headers, status=206 if first else 200, name=name)

    def _answer(
        self, body: bytes, headers: dict[str, str] | None = None, status: int = 200, name: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "GET":
            return
        most = self.server.breaks_after.pop(name, None) if name is not None else None
        if most is not None:
            self.wfile.write(body[:most])
            self.close_connection = True
            return
        if name is not None and self.server.slow == name:
            self.wfile.write(body[:-1])
            self.wfile.flush()
            self.server.release.wait(60)
            body = body[-1:]
        self.wfile.write(body)


def etag(content: bytes) -> str:
    """The ETag of a file with this content."""
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running_hub(checkpoint: Path) -> Iterator[Hub]:
    """A hub with the files of a checkpoint, and some that nobody should fetch."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    extra = {
        "pytorch_model.bin": b"pickle",
        "modeling_evil.py": b"evil",
        "vocab.txt": b"v",
        "chat_template.jinja": b"t",
    }
    with Hub(files | extra) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join(timeout=10)


def hub_environment(hub: Hub, home: Path) -> dict[str, str]:
    """Environment of a process that uses this hub and caches in `home`. (The hub's address is read at import.)"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return environment | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
