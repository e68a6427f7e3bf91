"""The device's own clock. Recorded work is timed by `model.gpu.autotune.time_graph`.

Must not know: models, steps.
"""

from collections.abc import Callable

import torch


def elapsed_ms(run: Callable[[], object], count: int) -> float:
    """Milliseconds per call, by events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count
