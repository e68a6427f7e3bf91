"""A caller that speaks HTTP/2 itself and gives every stream a window of 0: it accepts headers, but no message before it
opens the window."""

import asyncio
import struct
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, SettingsAcknowledged, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes

GENERATE = "/octavo.v1.InferenceService/Generate"
PREFIX = struct.Struct("!?I")  # of a gRPC message: compressed flag, length


@dataclass(slots=True)
class UnreadingCaller:
    """trailers: of streams that have ended, by stream id. data: the bytes received on each. The connection's own window
    is always open."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: H2Connection
    trailers: dict[int, dict[str, str]] = field(default_factory=dict)
    data: dict[int, bytearray] = field(default_factory=dict)
    is_heeded: bool = False  # the server has acknowledged our settings

    @classmethod
    async def connect(cls, port: int) -> "UnreadingCaller":
        """Connect in plain text to a service on this host."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        connection.initiate_connection()
        connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        writer.write(connection.data_to_send())
        await writer.drain()
        caller = cls(reader, writer, connection)
        while not caller.is_heeded:  # until then the server uses the protocol's default window
            await caller.receive(for_s=5.0)
        return caller

    def open(self, message: bytes) -> int:
        """Call Generate with a serialized message; the stream's id."""
        stream = self.connection.get_next_available_stream_id()
        headers = [
            (":method", "POST"), (":scheme", "http"), (":path", GENERATE), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"),
        ]  # fmt: skip
        self.connection.send_headers(stream, headers)
        self.connection.send_data(stream, PREFIX.pack(False, len(message)) + message, end_stream=True)
        self.writer.write(self.connection.data_to_send())
        return stream

    async def receive(self, *, for_s: float) -> bool:
        """Process what arrives within that time; whether anything did."""
        try:
            async with asyncio.timeout(for_s):
                data = await self.reader.read(65536)
        except TimeoutError:
            return False
        if not data:
            raise ConnectionError("the server closed the connection")
        for event in self.connection.receive_data(data):
            if isinstance(event, SettingsAcknowledged):
                self.is_heeded |= SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings
            elif isinstance(event, DataReceived) and event.data:
                assert event.stream_id is not None
                self.data.setdefault(event.stream_id, bytearray()).extend(event.data)
                self.connection.increment_flow_control_window(event.flow_controlled_length)
            elif isinstance(event, TrailersReceived | ResponseReceived):
                fields = {str(name): str(value) for name, value in event.headers or ()}
                if "grpc-status" in fields and event.stream_id is not None:
                    self.trailers[event.stream_id] = fields
            elif isinstance(event, StreamReset | StreamEnded) and event.stream_id is not None:
                self.trailers.setdefault(
                    event.stream_id, {"grpc-status": "none", "x-error-reason": type(event).__name__}
                )
        self.writer.write(self.connection.data_to_send())
        await self.writer.drain()
        return True

    def take(self, stream: int, num_bytes: int) -> None:
        """Open a stream's window by this many bytes."""
        self.connection.increment_flow_control_window(num_bytes, stream)
        self.writer.write(self.connection.data_to_send())

    def messages(self, stream: int) -> list[bytes]:
        """The complete messages that a stream has received."""
        data, found, at = bytes(self.data.get(stream, b"")), list[bytes](), 0
        while at + PREFIX.size <= len(data):
            _, length = PREFIX.unpack_from(data, at)
            if at + PREFIX.size + length > len(data):
                break
            found.append(data[at + PREFIX.size : at + PREFIX.size + length])
            at += PREFIX.size + length
        return found

    async def close(self) -> None:
        """Close the connection."""
        self.writer.close()
        await self.writer.wait_closed()
