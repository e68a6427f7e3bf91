"""A wall clock that jumps inside a running process: what Python calls the time follows a file that holds seconds.

Touches what code asks for the date (`time.time`, `time.time_ns`, `datetime.now`); monotonic clocks and those of native
libraries go on as they are. gRPC turns a monotonic deadline into a date natively when a call comes, and what remains of
it back with `time.time` at once, in the interceptor's name: on a machine whose clock was set both have the same clock,
so here that second half is left alone too.
"""

import contextlib
import datetime
import sys
import time
from pathlib import Path
from typing import Any

_REAL_S, _REAL_NS, _REAL_DATE = time.time, time.time_ns, datetime.datetime


def follow(file: Path) -> None:
    """From now on the clock is ahead by what the file says; by nothing where there is none."""

    def offset_s() -> float:
        with contextlib.suppress(OSError, ValueError):
            return float(file.read_text())
        return 0.0

    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, _REAL_DATE)

    class Shifted(_REAL_DATE, metaclass=Meta):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return _REAL_DATE.fromtimestamp(_REAL_S() + offset_s(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    def now_s() -> float:
        is_grpc = sys._getframe(1).f_globals.get("__name__", "").startswith("octavo.gateway.rpc.interceptor")
        return _REAL_S() + (0.0 if is_grpc else offset_s())

    time.time = now_s
    time.time_ns = lambda: _REAL_NS() + round(1e9 * offset_s())
    datetime.datetime = Shifted  # type: ignore[misc]
