"""Kernels on trial: right where they were tried, but not yet run on a device as they are here, so that they are off.

`OCTAVO_KERNELS=invariant_attention` switches some on, `all` every one, for tests and benches on a device.
Each has a twin that serves without it, so one that proves itself loses its name here, and one that does not goes.

Must not know: any particular kernel.
"""

import os
from enum import Enum

VARIABLE = "OCTAVO_KERNELS"


class Trial(Enum):
    """What is on trial, by the name that switches it on."""

    INVARIANT_ATTENTION = "invariant_attention"
    """Deterministic mode's attention by Hopper's own kernels (docs/decisions/0006)."""

    @property
    def is_on(self) -> bool:
        """Whether the environment says so."""
        return bool({"all", self.value} & set(os.environ.get(VARIABLE, "").replace(",", " ").split()))
