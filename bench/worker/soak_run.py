"""A soak of an engine in this process: load, cancels and a canary, looked at every ten seconds, and what must be so in
the end.

Must not know: the device, the runner.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.in_process import InProcess
from bench.worker.soak_load import Canary, Load
from bench.worker.soak_watch import Sample, sample, slopes
from octavo.worker.config import Deterministic

SAMPLE_S, CANARY_S = 10.0, 5.0
NEAR_TIE_NATS = 2 / 32  # two spacings of logits between 4 and 8 in bf16
GOOD_ENDS = {"LENGTH", "STOP", "CANCELLED"}


@dataclass(kw_only=True)
class Soak:
    """A run. samples: what was seen."""

    engine: InProcess
    load: Load
    canary: Canary
    clock: Callable[[], float]
    samples: list[Sample] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Under load for so long, then to the end of everything asked for."""
        next_sample_s = next_canary_s = 0.0
        while self.clock() < seconds:
            self.load.fill_up()
            self.load.cancel_some()
            if self.clock() >= next_canary_s:
                self.canary.ask()
                next_canary_s = self.clock() + CANARY_S
            self._step()
            if self.clock() >= next_sample_s:
                self._look()
                next_sample_s = self.clock() + SAMPLE_S
        while self.load.open or self.canary.handle is not None:
            self._step()
        for _ in range(4):  # steps in flight for nobody
            self._step()
        self._look()

    def _step(self) -> None:
        self.engine.step()
        self.load.take_ended()
        self.canary.take()

    def _look(self) -> None:
        now = sample(self.engine, self.clock())
        self.samples.append(now)
        print(
            f"{now.at_s:7.1f} s  {now.num_tokens:9d} tokens  {now.num_steps:7d} steps  "
            f"{self.load.ended.total():6d} ended  "
            f"{now.num_preemptions:5d} preempted  RSS {now.rss / 2**20:7.1f} MiB  "
            f"CUDA {now.cuda_allocated / 2**20:8.1f} MiB  blocks {now.num_free}/{now.num_cached}/{now.num_active}  "
            f"canary {self.canary.num_answers - len(self.canary.partings)}/{self.canary.num_answers}  "
            f"violations {len(now.violations)}",
            flush=True,
        )


def verdicts(soak: Soak, mode: Deterministic) -> dict[str, bool]:
    """What must be so, by name."""
    last, ended, partings = soak.samples[-1], soak.load.ended, soak.canary.partings
    found = {
        "audits clean": not any(each.violations for each in soak.samples),
        "no block held in the end": last.num_active == 0,
        "no row without finite logits": ended["NUMERICAL"] == 0,
        "no errors": set(ended) <= GOOD_ENDS and soak.canary.num_failed == 0,
        "answers of the right length": soak.load.num_mistakes == 0,
        "preemptions and hits happened": bool(last.num_preemptions and last.num_hit_tokens),
        "cancels happened": bool(ended["CANCELLED"]),
        "memory flat": all(each["is_flat"] for each in slopes(soak.samples[:-1]).values()),
    }
    if mode is Deterministic.ON:
        found["canary gave one answer"] = not partings
    else:
        found["canary parted at near-ties only"] = all(each.gap <= NEAR_TIE_NATS for each in partings)
    return found
