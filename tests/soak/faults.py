"""Faults of a running service, as many kinds as rows 1 to 59 inject that make sense there; drawn from a seed.

Each says which reasons it may cost people who did nothing wrong. Those of the front door are in `tests.soak.strangers`.
"""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from octavo import AsyncClient
from octavo.client.requests import generate_request
from tests.soak.asked import Asked, draw
from tests.soak.bench import SoakBench
from tests.soak.load import OWN_CONNECTION, Load
from tests.soak.processes import HEARTBEAT_TIMEOUT_S, Processes
from tests.support.faults.bench import NO_RETRIES

MARK = 2  # the end token: no output has it, so what goes on elsewhere carries it only if it was asked for
MARKED = {"crash": 11, "nan": 12, "raise": 13, "oom": 14, "seize": 15}
BURN = [sys.executable, "-c", "while True: pass"]


class Takes(Enum):
    """Which processes a fault ends."""

    NOTHING = "nothing"
    WORKER = "worker"
    BOTH_WORKERS = "both workers"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What faults work on. clock: the file that the service's wall clocks follow."""

    bench: SoakBench
    processes: Processes
    load: Load
    clock: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """rows: of the matrix. costs: reasons that bystanders may get. weight: how often it is drawn."""

    name: str
    rows: str
    inject: Callable[[Field, random.Random], Awaitable[None]]
    costs: frozenset[str] = frozenset()
    takes: Takes = Takes.NOTHING
    weight: float = 1.0


async def _killed_worker(field: Field, drawn: random.Random) -> None:
    await field.processes.kill_worker()


async def _killed_gateway(field: Field, drawn: random.Random) -> None:
    await field.processes.kill_gateway()


async def _long_freeze(field: Field, drawn: random.Random) -> None:
    await field.processes.freeze_worker()


async def _short_freeze(field: Field, drawn: random.Random) -> None:
    process = drawn.choice(field.bench.service.children("worker"))
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(drawn.uniform(0.1, HEARTBEAT_TIMEOUT_S / 2))
    process.send_signal(signal.SIGCONT)


async def culprit(field: Field, drawn: random.Random, kind: str, num_more: int = 0) -> Asked:
    """A request that the injected runner knows by its first two tokens."""
    prompt = [MARK, MARKED[kind], *(drawn.randrange(10, 900) for _ in range(4 + num_more))]
    request = generate_request(
        token_ids=prompt, temperature=0, seed=drawn.getrandbits(62), max_tokens=20, ignore_eos=True, output="token_ids"
    )
    async with AsyncClient(field.load.target, options=(*NO_RETRIES, OWN_CONNECTION)) as client:
        return await field.load.send(client, Asked(kind=f"culprit: {kind}", request=request))


async def _poison(field: Field, drawn: random.Random) -> None:
    await field.processes.lose_both_to("poison", asyncio.create_task(culprit(field, drawn, "crash")))


async def _seized(field: Field, drawn: random.Random) -> None:
    await field.processes.lose_both_to("seize", asyncio.create_task(culprit(field, drawn, "seize")))


async def _raising(field: Field, drawn: random.Random) -> None:
    await culprit(field, drawn, "raise")


async def _out_of_memory(field: Field, drawn: random.Random) -> None:
    await culprit(field, drawn, "oom", num_more=200)


async def _not_a_number(field: Field, drawn: random.Random) -> None:
    await culprit(field, drawn, "nan")


async def _no_cpu(field: Field, drawn: random.Random) -> None:
    burners = [subprocess.Popen(BURN) for _ in range(2)]  # noqa: ASYNC220
    try:
        await asyncio.sleep(drawn.uniform(1.0, 3.0))
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


async def _cancels(field: Field, drawn: random.Random) -> None:
    async with AsyncClient(field.load.target, options=(*NO_RETRIES, OWN_CONNECTION)) as client:
        asking = []
        for _ in range(100):
            asked = draw(drawn, "cancel")
            asked.cancel_after_s = drawn.uniform(0, 0.05)
            asking.append(field.load.send(client, asked))
            await asyncio.sleep(0.01)
        await asyncio.gather(*asking)


async def _jumping_clock(field: Field, drawn: random.Random) -> None:
    for ahead_s in (drawn.choice((3600, -3600, 86400)), drawn.choice((3600, -3600, 0)), 0):
        field.clock.write_text(str(ahead_s))
        await asyncio.sleep(drawn.uniform(0.2, 1.0))


async def _lost_socket(field: Field, drawn: random.Random) -> None:
    with suppress(FileNotFoundError):
        (field.bench.service.log.parent / "run" / "gateway-0.sock").unlink()
    await asyncio.sleep(2.0)


_RESTART = frozenset({"NO_WORKER", "QUEUE_FULL"})
INNER = (
    Fault(name="kill worker", rows="1-3", inject=_killed_worker, takes=Takes.WORKER, costs=frozenset({"QUEUE_FULL"})),
    Fault(
        name="kill gateway", rows="9, 25", inject=_killed_gateway, takes=Takes.GATEWAY, weight=0.5,
        costs=frozenset({"UNKNOWN", "NO_WORKER"}),
    ),
    Fault(name="freeze worker", rows="7", inject=_long_freeze, takes=Takes.WORKER, costs=frozenset({"QUEUE_FULL"})),
    Fault(name="poison", rows="5", inject=_poison, takes=Takes.BOTH_WORKERS, costs=_RESTART, weight=0.5),
    Fault(name="seize", rows="13", inject=_seized, takes=Takes.BOTH_WORKERS, costs=_RESTART, weight=0.25),
    Fault(name="short freeze", rows="6", inject=_short_freeze),
    Fault(name="raise", rows="10", inject=_raising, costs=frozenset({"ENGINE_ERROR"})),
    Fault(name="out of memory", rows="11", inject=_out_of_memory),
    Fault(name="not a number", rows="12", inject=_not_a_number),
    Fault(name="no CPU", rows="15", inject=_no_cpu),
    Fault(name="cancels", rows="16, 17", inject=_cancels),
    Fault(name="jumping clock", rows="59", inject=_jumping_clock),
    Fault(name="lost socket", rows="56", inject=_lost_socket, weight=0.3),
)  # fmt: skip
