"""Entry point of a front process."""

import asyncio
import errno
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
import uvicorn

from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.config import AccessConfig, TlsConfig
from octavo.gateway.front.app import make_app
from octavo.gateway.restarting import restarting_task
from octavo.wire.host import ending_signals
from octavo.wire.logs import configure_logs

log = structlog.get_logger(__name__)
# Longer than callers keep an idle connection (httpx 5 s, nginx and AWS's load balancers 60 s): a request that is sent
# just as the connection is closed here gets no answer, and the caller may not be able to retry it.
KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """targets: gRPC addresses of the gateways. tls: serve HTTPS; client certificates are not asked for. max_body_bytes:
    longest body of a request. drain_grace_s: how long a drain waits for requests in flight."""

    targets: tuple[str, ...]
    host: str
    port: int
    tls: TlsConfig | None = None
    max_body_bytes: int = 4 * 2**20
    drain_grace_s: float = 30.0
    log_format: str = "auto"
    log_level: str = "info"


class _Server(uvicorn.Server):
    """Drains on the first SIGTERM or SIGINT and stops on the second, with exit code 0."""

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
    """Serve until a signal; returns the exit code. Raises OSError if the address cannot be bound, AccessFileError
    if a certificate file cannot be used."""
    configure_logs(config.log_format, config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # it is logged here instead
    settings = uvicorn.Config(
        make_app(config.targets, max_body_bytes=config.max_body_bytes),
        host=config.host,
        port=config.port,
        ssl_certfile=None if config.tls is None else config.tls.cert_file,
        ssl_keyfile=None if config.tls is None else config.tls.key_file,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(config.drain_grace_s)),
    )
    return asyncio.run(_serve(_Server(settings), config))


async def _serve(server: _Server, config: FrontConfig) -> int:
    tasks = (
        [restarting_task(_follow_files(server.config, config).run, name="reloader")] if config.tls is not None else []
    )
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
    finally:
        for task in tasks:
            task.cancel()
    log.info("stopped")
    return 0


def _follow_files(settings: uvicorn.Config, config: FrontConfig) -> AccessReloader:
    """A reloader of the certificate files; new connections use the new ones. Raises AccessFileError."""
    reloader = AccessReloader(AccessConfig(tls=config.tls))
    reloader.load()
    settings.load()
    assert settings.ssl is not None
    reloader.follow(settings.ssl)
    return reloader
