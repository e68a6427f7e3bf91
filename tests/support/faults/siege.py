"""An attack beside honest callers: what it cost the gateway, and whether anybody noticed."""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import psutil

from octavo import AsyncClient
from tests.support.faults.bench import NO_RETRIES, POOL_THREADS, FaultBench
from tests.support.faults.callers import Call, run
from tests.support.faults.figures import percentile

MIB = 1 << 20
SAMPLE_S = 0.02
CANARY_TOKENS = 8
ResultT = TypeVar("ResultT")


@dataclass(slots=True, kw_only=True)
class Siege(Generic[ResultT]):
    """result: of the attack. canaries: calls that ran beside it, one after another. Memory and CPU seconds are the
    gateway's; the attacker and the canaries share this process, whose waits are included in the times."""

    result: ResultT
    seconds: float
    canaries: list[Call] = field(repr=False)
    before_mib: float
    peak_mib: float
    after_mib: float
    cpu_s: float

    @property
    def canary_p99_ms(self) -> float:
        """From the call to its last token, 8 tokens."""
        return round(1000 * percentile([call.ended_s - call.sent_s for call in self.canaries], 99), 1)

    def figures(self) -> dict[str, object]:
        """Figures for the table."""
        return {
            "seconds": round(self.seconds, 2),
            "canaries": len(self.canaries),
            "canary_p99_ms": self.canary_p99_ms,
            "gateway_mib": f"{self.before_mib:.0f} → {self.peak_mib:.0f} (peak) → {self.after_mib:.0f}",
            "gateway_cpu_s": round(self.cpu_s, 2),
        }


async def besiege(
    faults: FaultBench, attack: Callable[[], ResultT], *, canary_s: float = 15.0, victims: Collection[str] = ()
) -> Siege[ResultT]:
    """Run the attack in a thread, with one canary after another beside it; each must complete within canary_s. Then
    check the eight invariants.

    victims: reasons that canaries may end with; "UNKNOWN" is the library's own refusal, which is not counted.
    """
    gateway = faults.service.children("gateway")[0]
    before, cpu_s, start_s = _rss(gateway), _cpu_s(gateway), time.monotonic()
    over = asyncio.Event()
    watch = asyncio.create_task(_peak(gateway, over))
    calls = asyncio.create_task(_canaries(faults, over))
    try:
        result = await asyncio.to_thread(attack)
        seconds = time.monotonic() - start_s
    finally:
        over.set()
        canaries, peak = await asyncio.gather(calls, watch)
    cpu_s = _cpu_s(gateway) - cpu_s
    let_pool_threads_be(faults)
    faults.num_rpcs -= sum(call.reason == "UNKNOWN" for call in canaries)
    await settle(faults)
    await faults.check(canaries, limit_s=canary_s, victims=victims)
    return Siege(
        result=result,
        seconds=seconds,
        canaries=canaries,
        before_mib=before / MIB,
        peak_mib=peak / MIB,
        after_mib=_rss(gateway) / MIB,
        cpu_s=cpu_s,
    )


def let_pool_threads_be(faults: FaultBench) -> None:
    """Allow a few more threads than before."""
    faults.gateways = [replace(each, thread_room=POOL_THREADS) for each in faults.gateways]


async def settle(faults: FaultBench) -> None:
    """Wait until nothing runs, then add the attacker's calls, which only the gateway has counted, to the number of
    calls."""
    await asyncio.to_thread(faults.service.wait_until_idle)
    last, num_alike = -1, 0
    for _ in range(600):
        ended = await faults.num_ended()
        num_alike = num_alike + 1 if ended == last else 0
        last = ended
        if num_alike == 3 and ended >= faults.num_rpcs:  # thrice: one look may come before the gateway goes on
            break
        await asyncio.sleep(0.1)
    assert last >= faults.num_rpcs, f"M: {faults.num_rpcs} honest calls, {last} ends"
    faults.num_rpcs = last


async def _canaries(faults: FaultBench, over: asyncio.Event) -> list[Call]:
    """Each over its own connection, so that new callers must be admitted too."""
    done: list[Call] = []
    while not over.is_set() or not done:
        call = Call(prompt=[3, 1, 4, len(done) % 50], max_tokens=CANARY_TOKENS, seed=len(done))
        faults.num_rpcs += 1
        async with AsyncClient(faults.service.target, options=NO_RETRIES) as client:
            done.append(await run(client, call))
        await asyncio.sleep(SAMPLE_S)
    return done


async def _peak(gateway: psutil.Process, over: asyncio.Event) -> int:
    peak = 0
    while not over.is_set():
        peak = max(peak, _rss(gateway))
        await asyncio.sleep(SAMPLE_S)
    return max(peak, _rss(gateway))


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
