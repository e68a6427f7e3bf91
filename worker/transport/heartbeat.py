"""The heartbeat: a thread that reports to every gateway, by its own connection, whether the engine's steps advance.

A thread, so that a long step does not silence the worker; sockets of its own, because ZeroMQ's are not thread safe.
Reads the engine's last snapshot and nothing else of it.

A failed beat is retried at the next: if a busy host refuses a thread, a descriptor or memory for a moment, the worker
must not go on without heartbeats and never end. Only beats that were sent feed the watchdog, so that a worker which
cannot send any for long ends like one that hangs.
"""

import threading
import time
from collections.abc import Callable, Mapping

import structlog
import zmq

from octavo.wire.codec import encode
from octavo.wire.curve import CurveKeys, new_gateway_dealer
from octavo.wire.messages import Heartbeat
from octavo.worker.engine.interfaces import EngineStats
from octavo.worker.transport.watchdog import Watchdog

log = structlog.get_logger(__name__)


class HeartbeatThread:
    """Sends heartbeats from ``start`` to ``close``."""

    def __init__(
        self,
        epoch: str,
        snapshot: Callable[[], EngineStats],
        welcomed: Callable[[], Mapping[str, bool]],
        *,
        interval_s: float,
        curve: CurveKeys | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """snapshot: safe from any thread. welcomed: the current gateways by endpoint, and whether to report to them;
        safe from any thread."""
        self._epoch = epoch
        self._snapshot = snapshot
        self._welcomed = welcomed
        self._interval_s = interval_s
        self._curve = curve
        self._watchdog = watchdog
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Call once. The watchdog runs from here on, because even the first step, before any beat, may hang."""
        if self._watchdog is not None:
            self._watchdog.arm()
        self._thread.start()

    def close(self) -> None:
        """Stop and wait for the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets: dict[str, zmq.Socket[bytes]] = {}
        has_failed = False
        try:
            while True:
                try:
                    self._dial(context, sockets)
                    if self._stop.wait(self._interval_s):
                        break
                    self._dial(context, sockets)
                    self._beat(sockets)
                    has_failed = False
                except Exception:
                    if not has_failed:  # once for each time that it begins to fail
                        log.exception("heartbeat_failed")
                    has_failed = True
                    if self._stop.wait(self._interval_s):
                        break
        finally:
            context.destroy(linger=0)
            if self._watchdog is not None:
                self._watchdog.close()

    def _dial(self, context: "zmq.Context[zmq.Socket[bytes]]", sockets: "dict[str, zmq.Socket[bytes]]") -> None:
        """Exactly one socket per current gateway."""
        endpoints = self._welcomed()
        for address in [each for each in sockets if each not in endpoints]:
            sockets.pop(address).close()
        for address in [each for each in endpoints if each not in sockets]:
            sockets[address] = new_gateway_dealer(context, address, self._curve)
            sockets[address].connect(address)

    def _beat(self, sockets: "Mapping[str, zmq.Socket[bytes]]") -> None:
        stats = self._snapshot()
        frame = encode(heartbeat_of(stats, self._epoch))
        for address, is_welcomed in self._welcomed().items():
            if is_welcomed and address in sockets:
                try:
                    sockets[address].send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    continue  # not connected, or it takes nothing: the next beat says the same
        if self._watchdog is not None:
            self._watchdog.feed(stats, time.monotonic())


def heartbeat_of(stats: EngineStats, epoch: str) -> Heartbeat:
    """The engine's snapshot as a message. Requests that wait for grammars are reported as paused if nothing else is
    left: gateways must not expect steps then."""
    num_held = stats.num_waiting if stats.awaits_grammars else 0
    return Heartbeat(
        epoch=epoch,
        num_steps=stats.num_steps,
        has_work=stats.has_work,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting - num_held,
        num_free_blocks=stats.num_free_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_paused=stats.num_paused + num_held,
        is_draining=stats.is_draining,
        num_prefill_tokens=stats.num_prefill_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        num_preemptions=stats.num_preemptions,
        num_queried_tokens=stats.num_queried_tokens,
        num_hit_tokens=stats.num_hit_tokens,
    )
