"""The soak: rounds of load with faults in them, each followed by a quiesce point at which everything must hold."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from octavo.worker.runners.oracle.model import OracleModel
from tests.soak.asked import Asked
from tests.soak.bench import SoakBench
from tests.soak.config import INJECTED, LENGTHY, NUM_SLOTS, SETTINGS, SHARE, SoakConfig
from tests.soak.deck import Deck
from tests.soak.faults import Fault, Field, Takes
from tests.soak.load import Load
from tests.soak.memory import Sample
from tests.soak.probes import Probes
from tests.soak.processes import NUM_WORKERS, Processes
from tests.soak.strangers import OUTER
from tests.support.services.service import free_port, serve


@dataclass(slots=True, kw_only=True)
class Soak:
    """What came of it so far. seconds: of everything; loaded_s: of these, with the load on."""

    config: SoakConfig
    show: Callable[[str], None]
    capacity_per_s: float = 0.0
    seconds: float = 0.0
    loaded_s: float = 0.0
    own_cpu_s: float = 0.0
    late_s: float = 0.0
    num_rounds: int = 0
    num_checks: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)  # of those who were patient
    others: Counter[str] = field(default_factory=Counter)  # of culprits, and of those who left
    violations: list[str] = field(default_factory=list)
    repairs: list[tuple[str, float]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    probes: Probes = field(default_factory=lambda: Probes(target=""))

    async def run(self, folder: Path) -> None:
        """All of it, on a service of its own, whose files are in that folder."""
        metrics_port = free_port()
        with (
            serve(
                folder, *SETTINGS, f"--metrics-port={metrics_port}", injector=INJECTED, injected=self._injected(folder)
            ) as service,
            _nice(),
        ):
            bench = SoakBench(service=service, model=OracleModel(), metrics_port=metrics_port)
            load = Load(target=service.target, seed=self.config.seed)
            self.probes = Probes(target=service.target)
            await self._measure(bench, load)
            await self._rounds(
                Field(
                    bench=bench,
                    load=load,
                    clock=folder / "clock",
                    processes=Processes(bench=bench, min_life_s=self.config.min_life_s),
                )
            )

    def _injected(self, folder: Path) -> dict[str, object]:
        injected: dict[str, object] = {"marked": True, "nan_output_index": 5, "clock_file": str(folder / "clock")}
        if self.config.leak is not None:
            injected |= {"leak_in": self.config.leak[0], "leak_mib_per_h": self.config.leak[1]}
        return injected

    async def _measure(self, bench: SoakBench, load: Load) -> None:
        bench.born_s = time.monotonic()
        await bench.settle_in()
        self.capacity_per_s = await load.capacity(num_callers=2 * NUM_SLOTS * NUM_WORKERS, for_s=self.config.capacity_s)
        self.show(f"seed {self.config.seed}: capacity {self.capacity_per_s:.1f} requests per s")

    async def _rounds(self, field: Field) -> None:
        await self._rehearse(field)
        start_s = time.monotonic()
        deck = Deck(faults=self.config.faults, drawn=random.Random(f"{self.config.seed}: faults"))
        try:
            while (
                now_s := time.monotonic() - start_s
            ) < self.config.seconds or self.num_rounds < self.config.min_rounds:
                hand = deck.deal(lambda takes: may_take(field.processes, takes)) if self.num_rounds else []
                await self._round(field, hand)
                await self._quiesce(field, hand, start_s)
                self.show(self._line(now_s, hand))
        except* (AssertionError, TimeoutError, grpc.RpcError, psutil.Error) as group:
            for error in group.exceptions:
                self.violations.append(f"at {time.monotonic() - start_s:.0f} s, the soak ended: {error!r}")
        self.seconds = time.monotonic() - start_s
        self.own_cpu_s = sum(psutil.Process().cpu_times()[:2])
        self.late_s, self.repairs, self.num_checks = field.load.late_s, field.processes.repairs, field.bench.num_checks

    async def _round(self, field: Field, hand: list[Fault]) -> None:
        begin_s, over, drawn = time.monotonic(), asyncio.Event(), self._random("load")
        probing = asyncio.create_task(self.probes.run(over))
        try:
            async with asyncio.TaskGroup() as group:
                for index, fault in enumerate(hand):
                    group.create_task(self._inject(field, fault, self._random(f"fault {index}")))
                await field.load.run(drawn, per_s=SHARE * self.capacity_per_s, for_s=self.config.round_s)
                self.loaded_s += time.monotonic() - begin_s
            await field.load.end()
        finally:
            over.set()
            await probing

    async def _rehearse(self, field: Field) -> None:
        for fault in OUTER if self.config.rehearses else ():
            if fault in self.config.faults and fault.name not in LENGTHY:
                await fault.inject(field, self._random(f"rehearsal of {fault.name}"))

    async def _inject(self, field: Field, fault: Fault, drawn: random.Random) -> None:
        await asyncio.sleep(drawn.uniform(0.05, 0.6) * self.config.round_s)
        self.injected[fault.name] += 1
        try:
            await fault.inject(field, drawn)
        except (OSError, ValueError, psutil.Error) as error:  # whom it was meant for is being replaced
            self.show(f"  {fault.name} met nobody: {error!r}")
        except AssertionError as error:
            self.violations.append(f"{fault.name}: {error}")

    async def _quiesce(self, field: Field, hand: list[Fault], start_s: float) -> None:
        """Nothing is asked any more: everything must hold."""
        bench, asked, probes = field.bench, field.load.asked, self.probes.calls
        await field.processes.until_whole()
        bench.count(asked, probes)
        gateways = {each.pid for each in bench.service.children("gateway")}
        if gateways != {each.pid for each in bench.gateways}:
            await bench.settle_in()
            await self._rehearse(field)
        allowed = frozenset[str]().union(*(fault.costs for fault in hand))
        found = await bench.violations(asked, probes, allowed=allowed)
        now_s = time.monotonic() - start_s
        names = ", ".join(fault.name for fault in hand) or "no fault"
        self.violations += [f"at {now_s:.0f} s, after {names}: {each}" for each in found]
        for each in asked:
            (self.outcomes if each.is_patient else self.others)[f"{_sort(each)}{each.outcome}"] += 1
        self.samples += bench.samples(now_s)
        self.num_rounds += 1
        asked.clear()
        probes.clear()

    def _line(self, now_s: float, hand: list[Fault]) -> str:
        rss = {f"{each.role} {each.rss_bytes >> 20}" for each in self.samples[-1 - NUM_WORKERS :]}
        names = ", ".join(fault.name for fault in hand) or "no fault"
        return (
            f"round {self.num_rounds} from {now_s:.0f} s ({names}): {self.outcomes.total()} requests, "
            f"{self.outcomes['complete']} complete, {len(self.violations)} violations, MiB {', '.join(sorted(rss))}"
        )

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self.config.seed}: round {self.num_rounds}: {name}")


def may_take(processes: Processes, takes: Takes) -> bool:
    """Whether those who would die have lived long enough."""
    if takes is Takes.GATEWAY:
        return bool(processes.old_enough("gateway"))
    needed = {Takes.WORKER: 1, Takes.BOTH_WORKERS: NUM_WORKERS}.get(takes, 0)
    return len(processes.old_enough("worker")) >= needed


def _sort(asked: Asked) -> str:
    return "" if asked.is_patient else f"{asked.kind}: "


@contextmanager
def _nice() -> Iterator[None]:
    """This process and its attackers give way to the service, which was started before."""
    os.nice(10)
    yield
