"""What a soak is made of: the service, its faults, its lengths."""

from dataclasses import dataclass
from pathlib import Path

from tests.soak.asked import MODEL_LEN
from tests.soak.faults import INNER, Fault
from tests.soak.processes import HEARTBEAT_TIMEOUT_S, NUM_WORKERS
from tests.soak.strangers import OUTER

INJECTED = Path(__file__).parents[1] / "faults" / "injected"
FAULTS = (*INNER, *OUTER)
LENGTHY = ("silent connections", "few descriptors")  # and nothing is kept of them
SHARE = 0.7  # of the capacity that was measured
NUM_SLOTS = 8  # a worker
SETTINGS = (
    "--model=oracle", "--runner=oracle", "--oracle-step-delay-s=0.015", "--num-blocks=128",
    f"--max-num-seqs={NUM_SLOTS}", "--max-waiting=256", f"--max-model-len={MODEL_LEN}", f"--workers={NUM_WORKERS}",
    f"--heartbeat-timeout-s={HEARTBEAT_TIMEOUT_S}", "--heartbeat-interval-s=0.2", "--stall-timeout-s=5",
    "--stall-exit-s=4", "--write-stall-s=5", "--keepalive-time-s=5", "--keepalive-timeout-s=5", "--log-format=json",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig:
    """capacity_s: of the measurement at full load. round_s: load between two quiesce points. min_life_s: who is younger
    is not killed. rehearses: every new gateway meets each stranger once without load, since what an attack makes the
    allocator keep is used again by the next one, and is no growth. leak: processes of that word (gateway, worker) keep
    so many MiB an hour, to see that it is told. min_rounds: however long they take."""

    seconds: float
    seed: int
    round_s: float = 20.0
    capacity_s: float = 15.0
    min_life_s: float = 35.0
    rehearses: bool = True
    leak: tuple[str, float] | None = None
    min_rounds: int = 0
    faults: tuple[Fault, ...] = FAULTS
