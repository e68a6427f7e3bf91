"""Takes every source of chance away from the product for the length of a run: clocks, random numbers, log files.

What the product logs as a defect of its own is collected instead.
"""

import logging
import random
import secrets
import time
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from sim.loop import SimLoop

LogLine = MutableMapping[str, Any]


@contextmanager
def isolated(loop: SimLoop, seed: int) -> Iterator[list[LogLine]]:
    """Inside, time and randomness belong to the run. Yields the lines logged as errors so far.

    Every thread computes all the time in every other seed, and never in the rest: gateways send tokens in rounds there.
    """
    rng = random.Random(f"{seed}:secrets")
    replaced = [
        (time, "monotonic", loop.time),
        (time, "time", loop.time),
        (time, "thread_time", loop.time if seed % 2 else lambda: 0.0),
        (secrets, "token_hex", lambda num_bytes=32: rng.randbytes(num_bytes).hex()),
        (secrets, "token_bytes", lambda num_bytes=32: rng.randbytes(num_bytes)),
        (secrets, "randbits", rng.getrandbits),
        (uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128))),
    ]
    former = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    config, lines = structlog.get_config(), list[LogLine]()
    for module, name, value in replaced:
        setattr(module, name, value)
    structlog.configure(
        processors=[_collect_into(lines)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    try:
        yield lines
    finally:
        structlog.configure(**config)
        for module, name, value in former:
            setattr(module, name, value)


def _collect_into(lines: list[LogLine]) -> Any:
    def collect(logger: Any, method: str, line: LogLine) -> LogLine:
        lines.append(line)
        raise structlog.DropEvent

    return collect
