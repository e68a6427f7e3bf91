"""One step of a sweep: which way a batch goes, and what it takes.

Must not know: what is varied.
"""

import numpy as np
import torch

from bench.gpu.steps import Bench, time_recorded
from octavo.model.gpu.autotune import StepPath


def ragged(batch: int) -> tuple[int, ...]:
    """Contexts as they are in the middle of a nano bench."""
    rng = np.random.default_rng(0)
    return tuple((rng.integers(100, 1025, batch) + rng.integers(0, 1025, batch) * rng.random(batch)).astype(int))


def time_step(bench: Bench, batch: int, context: int | tuple[int, ...]) -> float:
    """Median milliseconds of a recorded decode step."""
    contexts = torch.tensor(context, dtype=torch.int32, device="cuda").expand(batch)
    bench.spread(batch, int(contexts.max()))
    return time_recorded(bench, batch, contexts, num_steps=20)


def take(bench: Bench, batch: int, path: StepPath) -> None:
    """From now on this batch size goes this way."""
    bench.decode.paths._candidates["swept"] = path
    bench.decode.paths.names[batch] = "swept"
