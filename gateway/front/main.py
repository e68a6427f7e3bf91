"""Entry point of a front process."""

import asyncio
import errno
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn

from octavo.gateway.front.app import make_app
from octavo.wire.host import ending_signals
from octavo.wire.logs import configure_logs

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """targets: gRPC addresses of the gateways. cert_file, key_file: with them it speaks HTTPS."""

    targets: tuple[str, ...]
    host: str
    port: int
    cert_file: Path | None = None
    key_file: Path | None = None
    max_body_bytes: int = 4 * 2**20
    drain_grace_s: float = 30.0
    log_format: str = "auto"
    log_level: str = "info"


class _Server(uvicorn.Server):
    """Drains at the first SIGTERM or SIGINT, stops at the second; the exit code says that all is well."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: object) -> None:
        self.force_exit = self.should_exit
        if not self.should_exit:
            log.info("draining", signal=signal.Signals(sig).name)
        self.should_exit = True


def main(config: FrontConfig) -> int:
    """Serve until a signal. Raises OSError where it cannot listen."""
    configure_logs(config.log_format, config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what it says is said here
    server = _Server(
        uvicorn.Config(
            make_app(config.targets, max_body_bytes=config.max_body_bytes),
            host=config.host,
            port=config.port,
            ssl_certfile=config.cert_file,
            ssl_keyfile=config.key_file,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(config.drain_grace_s)),
        )
    )
    return asyncio.run(_serve(server, config))


async def _serve(server: _Server, config: FrontConfig) -> int:
    try:
        serving = asyncio.ensure_future(server.serve())
        while not server.started and not serving.done():  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.01)
        if server.started:
            log.info("listening", address=f"{config.host}:{config.port}", gateways=len(config.targets))
        await serving
    except SystemExit:  # uvicorn's way to say that the address is taken
        place = f"--openai {config.host}:{config.port}"
        raise OSError(errno.EADDRINUSE, f"{place} cannot be bound: is another process listening there?") from None
    log.info("stopped")
    return 0
