"""An engine whose runner computes nothing and whose outbox throws away: all that its steps cost is Python and numpy.

Must not know: what is asked, what is measured.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.assembly import assemble
from bench.mailbox import Mailbox
from octavo.blockmgr.ids import PrefixCache
from octavo.wire.messages import StepOutput
from octavo.worker.engine.engine import Engine
from octavo.worker.runners.interface import StepMasks
from octavo.worker.scheduler.plan import StepPlan, StepResult
from octavo.worker.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 10_000


class NullRunner:
    """Gives the same token to everybody, at once."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Remember it."""
        self._plans.append(plan)

    def constrain(self, masks: StepMasks) -> None:
        """Nobody has a grammar."""

    def collect(self) -> StepResult:
        """Tokens that stop nobody."""
        plan = self._plans.popleft()
        num_sampled = len(plan.sampled_slots)
        return StepResult(
            step=plan.step, tokens_S=np.full(num_sampled, 7, np.int32), is_finite_S=np.ones(num_sampled, np.bool_)
        )

    def close(self) -> None:
        """Nothing."""


class Nowhere(Mailbox):
    """What a step gives is thrown away."""

    def take(self, output: StepOutput) -> None:
        """Packed it is by now, and that is what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Room that the null runner would have."""

    num_blocks: int
    max_slots: int
    block_size: int = BLOCK_SIZE
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE


class Bench(NamedTuple):
    """What a measurement drives."""

    engine: Engine
    scheduler: Scheduler
    mail: Nowhere


def make_engine(*, num_blocks: int, max_num_seqs: int, max_in_flight: int, max_batch_tokens: int) -> Bench:
    """An engine around the null runner."""
    sizes, mail = Sizes(num_blocks=num_blocks, max_slots=max_num_seqs), Nowhere()
    parts = assemble(
        NullRunner(max_in_flight),
        sizes,
        mail,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=PrefixCache.ON,
        eos_token_ids=(2, 3),
        max_waiting=1_000_000,
    )
    return Bench(parts.engine, parts.scheduler, mail)
