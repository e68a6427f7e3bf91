"""Entry point of a gateway process. Imports no torch."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable

import structlog

from octavo.gateway.app import Gateway
from octavo.gateway.config import AccessConfig, GatewayConfig
from octavo.gateway.observability.logs import LogWriter
from octavo.gateway.observability.tracing import start_tracing
from octavo.wire.host import arm_stall_guard, disarm_stall_guard, ending_signals, raise_descriptor_limit
from octavo.wire.logs import configure_logs

log = structlog.get_logger(__name__)


STALL_EXIT_S, TURN_S = 60.0, 1.0


def main(config: GatewayConfig, *, drained_code: int = 0) -> int:
    """Serve until SIGTERM, SIGINT, SIGHUP (which looks at keys and certificates instead, where there are some) or
    AdminService.Drain (drain first; a second signal stops at once). Exit code: 0 stopped by a signal, drained_code by
    AdminService.Drain. Raises what makes a start impossible: AddressError, AccessFileError, EndpointError,
    KeyFileError, RunDirError, TracingError, OSError (BindError among them)."""
    writer = LogWriter(sys.stderr)
    configure_logs(config.log_format.value, config.log_level, lambda *_: writer)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, drained_code))
    finally:
        writer.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, asyncio's own elsewhere."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(config: GatewayConfig, drained_code: int) -> int:
    raise_descriptor_limit()
    stop_now, tracing = asyncio.Event(), start_tracing()
    gateway = Gateway(config, tracing=tracing)
    _install_signals(gateway, stop_now)
    await gateway.start()
    gc.collect()
    gc.freeze()  # objects that are never freed need not be walked again
    guard = asyncio.create_task(guard_loop(STALL_EXIT_S), name="guard of the event loop")
    try:
        await _first_of(gateway.drained, stop_now)
    finally:
        guard.cancel()
        await gateway.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    log.info("stopped")
    return drained_code if gateway.is_drained_by_operator else 0


def _install_signals(gateway: Gateway, stop_now: asyncio.Event) -> None:
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            stop_now.set()
        asked = True
        gateway.begin_drain()

    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, on_signal)
    if gateway.config.access != AccessConfig():
        loop.add_signal_handler(signal.SIGHUP, gateway.reloader.reload)


async def guard_loop(limit_s: float) -> None:
    """Until cancelled. Where the event loop stands still for so long, the process ends with 1, all stacks on stderr:
    its supervisor starts another, and callers try again."""
    try:
        while True:
            arm_stall_guard(limit_s)  # where no thread is to be had for it, the next turn tries again
            await asyncio.sleep(TURN_S)
    finally:
        disarm_stall_guard()


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
