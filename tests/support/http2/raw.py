"""An HTTP/2 client at the level of frames, to send what no library would. Blocking; one thread per connection."""

import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import hpack
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from octavo.client.requests import generate_request

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GENERATE = "/octavo.v1.InferenceService/Generate"
WAIT_S = 30.0
Headers = Sequence[tuple[str, str]]


def grpc_message(data: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """A message with gRPC's prefix. length: the length to claim, if not the true one."""
    return struct.pack(">BI", compressed, len(data) if length is None else length) + data


def generate(prompt: Sequence[int] = (7, 8, 9), max_tokens: int = 4, seed: int = 0) -> bytes:
    """The bytes of a valid GenerateRequest."""
    return generate_request(
        token_ids=prompt, max_tokens=max_tokens, seed=seed, temperature=0, ignore_eos=True, output="token_ids"
    ).SerializeToString()


def grpc_headers(path: str = GENERATE, extra: Headers = ()) -> Headers:
    """The headers that every gRPC client sends."""
    return [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
        ("content-type", "application/grpc"), ("te", "trailers"), *extra,
    ]  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Ending:
    """How a stream, or the connection, ended. headers: all headers of the stream, trailers included."""

    headers: dict[str, str] = field(default_factory=dict)
    is_reset: bool = False
    is_goaway: bool = False
    is_closed: bool = False

    @property
    def status(self) -> int | None:
        """The gRPC status code; None if no trailers came."""
        return int(self.headers["grpc-status"]) if "grpc-status" in self.headers else None

    @property
    def kind(self) -> str:
        """One word to count endings by."""
        if self.status is not None:
            return f"status {self.status}"
        if "http" in self.headers or ":status" in self.headers:
            return f"http {self.headers[':status']}"
        return "reset" if self.is_reset else "goaway" if self.is_goaway else "closed" if self.is_closed else "silence"


class RawHttp2:
    """A connection that has sent its preface. Stream ids are odd and ascending."""

    def __init__(
        self,
        port: int,
        *,
        preface: bytes = PREFACE,
        settings: dict[int, int] | None = None,
        connect_timeout_s: float = WAIT_S,
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=connect_timeout_s)
        self.socket.settimeout(WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder(max_header_list_size=1 << 24)
        self._buffer = b""
        self._next_id = 1
        self.is_closed = False
        self.frames: dict[str, int] = {}
        self._initial_window = 65_535
        self.peer_settings: dict[int, int] = {}
        self.answers_pings = True
        self._windows: dict[int, int] = {0: 65_535}
        self._ended: set[int] = set()
        self._frames_to_come: list[Frame] = []  # read while a call was being sent
        if preface:
            self.send(preface, SettingsFrame(settings=settings or {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def new_id(self) -> int:
        """The id of the next stream."""
        self._next_id += 2
        return self._next_id - 2

    def send(self, *parts: Frame | bytes) -> bool:
        """Send these; whether the other side still accepts bytes."""
        data = b"".join(part if isinstance(part, bytes) else part.serialize() for part in parts)
        try:
            self.socket.sendall(data)
        except OSError:
            self.is_closed = True
        return not self.is_closed

    def headers(self, stream_id: int, headers: Headers | None = None, *flags: str) -> HeadersFrame:
        """A HEADERS frame with a whole header block."""
        encoded = self._encoder.encode(headers or grpc_headers())
        return HeadersFrame(stream_id, encoded, flags=["END_HEADERS", *flags])

    def call(self, message: bytes, headers: Headers | None = None, *, piece_bytes: int = 16_384) -> int:
        """Send HEADERS and DATA of a call, whose message is already framed, as fast as the windows allow; the stream
        id."""
        stream_id = self.new_id()
        self.send(self.headers(stream_id, headers))
        at = 0
        while at < len(message) and not self.is_closed and stream_id not in self._ended:
            room = min(self._windows[0], self._windows.get(stream_id, 0) + self._initial_window)
            if room <= 0 or at % (piece_bytes * 1_000) == piece_bytes:
                self._frames_to_come += self.read(WAIT_S if room <= 0 else 0.001)
            if room <= 0:
                continue
            piece = message[at : at + min(room, piece_bytes)]
            at += len(piece)
            self._windows[0] -= len(piece)
            self._windows[stream_id] = self._windows.get(stream_id, 0) - len(piece)
            last = ["END_STREAM"] if at == len(message) else []
            self.send(DataFrame(stream_id, piece, flags=last))
        return stream_id

    def reset(self, stream_id: int) -> None:
        """Cancel the stream."""
        self.send(RstStreamFrame(stream_id, error_code=8))

    def read(self, timeout_s: float) -> list[Frame]:
        """The frames that have arrived, waiting at most timeout_s for the first. Answers SETTINGS and PING."""
        self.socket.settimeout(max(timeout_s, 0.001))
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        finally:
            self.socket.settimeout(WAIT_S)
        if not data:
            self.is_closed = True
        self._buffer += data
        return list(self._parse())

    def _parse(self) -> Iterable[Frame]:
        while len(self._buffer) >= 9:
            frame, length = Frame.parse_frame_header(memoryview(self._buffer)[:9])
            if len(self._buffer) < 9 + length:
                return
            frame.parse_body(memoryview(self._buffer)[9 : 9 + length])
            self._buffer = self._buffer[9 + length :]
            name = type(frame).__name__
            self.frames[name] = self.frames.get(name, 0) + 1
            self._note(frame)
            yield frame

    def _note(self, frame: Frame) -> None:
        if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            self.peer_settings |= frame.settings
            self._initial_window = frame.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, self._initial_window)
            self.send(SettingsFrame(flags=["ACK"]))
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags and self.answers_pings:
            self.send(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
        elif isinstance(frame, WindowUpdateFrame):
            self._windows[frame.stream_id] = self._windows.get(frame.stream_id, 0) + frame.window_increment
        elif isinstance(frame, RstStreamFrame) or "END_STREAM" in frame.flags:
            self._ended.add(frame.stream_id)

    def ending(self, stream_id: int, timeout_s: float = WAIT_S) -> Ending:
        """Read until that stream, or the connection, has ended."""
        ending, until_s = Ending(), time.monotonic() + timeout_s
        while (not self.is_closed or self._frames_to_come) and time.monotonic() < until_s:
            frames, self._frames_to_come = self._frames_to_come, []
            for frame in frames or self.read(until_s - time.monotonic()):
                ending.is_goaway |= isinstance(frame, GoAwayFrame)
                if isinstance(frame, HeadersFrame):
                    decoded = self._decoder.decode(frame.data)
                    if frame.stream_id == stream_id:
                        ending.headers |= {_text(name): _text(value) for name, value in decoded}
                if frame.stream_id == stream_id:
                    ending.is_reset |= isinstance(frame, RstStreamFrame)
                    if ending.is_reset or "END_STREAM" in frame.flags:
                        return ending
        ending.is_closed = self.is_closed
        return ending

    def endings(self, count: int, timeout_s: float = WAIT_S) -> Counter[str]:
        """Read until this many streams, or the connection, have ended; counts by kind: gRPC's status, a reset, or that
        nothing came."""
        kinds: dict[int, str] = {}
        until_s = time.monotonic() + timeout_s
        frames, self._frames_to_come = self._frames_to_come, []
        while len(kinds) < count and (frames or not self.is_closed) and time.monotonic() < until_s:
            for frame in frames or self.read(until_s - time.monotonic()):
                if isinstance(frame, HeadersFrame):
                    decoded = {_text(name): _text(value) for name, value in self._decoder.decode(frame.data)}
                    if "grpc-status" in decoded:
                        reason = decoded.get("x-error-reason", "")
                        kinds[frame.stream_id] = f"status {decoded['grpc-status']} {reason}".strip()
                elif isinstance(frame, RstStreamFrame):
                    kinds.setdefault(frame.stream_id, "reset")
            frames = []
        rest = "closed" if self.is_closed else "silence"
        return Counter(kinds.values()) + Counter({rest: count - len(kinds)})

    def until_closed(self, timeout_s: float) -> bool:
        """Whether the other side closes the connection in time."""
        until_s = time.monotonic() + timeout_s
        while not self.is_closed and time.monotonic() < until_s:
            self.read(until_s - time.monotonic())
        return self.is_closed

    def abort(self) -> None:
        """Close with a TCP RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self.socket.close()
        self.is_closed = True


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
