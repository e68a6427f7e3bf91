"""Kernels on trial: measured on a device by themselves, but not yet inside of the service, so that they are off.

`OCTAVO_KERNELS=ring,warp_groups` switches some on, `OCTAVO_KERNELS=all` every one, for tests and benches on a device.
Each has a twin that serves without it, so one that proves itself loses its name here, and one that does not goes.

Must not know: any particular kernel.
"""

import os
from enum import Enum

VARIABLE = "OCTAVO_KERNELS"


class Trial(Enum):
    """What is on trial, by the name that switches it on."""

    RING = "ring"
    """Decode attention over a ring of tiles (docs/decisions/0031)."""
    OVERLAPPING = "overlapping"
    """Products of decode steps that fetch their weights before their turn (docs/decisions/0032)."""
    WARP_GROUPS = "warp_groups"
    """Prompt attention by turns of warp groups (docs/decisions/0033)."""

    @property
    def is_on(self) -> bool:
        """Whether the environment says so."""
        return bool({"all", self.value} & set(os.environ.get(VARIABLE, "").replace(",", " ").split()))
