"""Common to the products for Hopper: which matrices they support, and whether their kernels work on a device.

Legend: T tokens · O outputs · K inputs. Must not know: any particular kernel.
"""

import warnings
from collections.abc import Callable

import torch

from octavo.model.kernels.checks import is_hopper
from octavo.model.kernels.precompile import is_compiling

BLOCK = 64
"""Inputs of a block; a matrix must have whole blocks."""
MULTIPROCESSORS = 132
"""Of an H100 and an H200."""

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(y_TK, weight_OK, out_TO): enqueues out = y @ weight^T."""


def takes(weight_OK: torch.Tensor) -> bool:
    """Whether such a product supports this matrix: 16-bit numbers in whole blocks of inputs, on a Hopper device."""
    is_of_16_bits = weight_OK.is_cuda and weight_OK.element_size() == 2
    return is_of_16_bits and weight_OK.shape[-1] % BLOCK == 0 and is_hopper(weight_OK.device)


class ProductTrial:
    """A small product that shows at startup whether a kernel compiles for a device and multiplies correctly there: the
    language that such kernels are written in may be missing or have changed. If so, layers use other paths, which are
    only slower."""

    def __init__(self, products: str, multiply: Multiply) -> None:
        """products: name of what steps do without if the trial fails."""
        self._products, self._multiply = products, multiply
        self._compiled = set[torch.device]()
        self._passed: dict[torch.device, bool] = {}

    def passes(self, device: torch.device) -> bool:
        """Whether the kernel multiplies correctly. While kernels are only being compiled: True, and the trial's kernel
        is compiled too."""
        if is_compiling():
            if device not in self._compiled:
                self.run(device)
                self._compiled.add(device)
            return True
        if device not in self._passed:
            self._passed[device] = self._try(device)
        return self._passed[device]

    def run(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The product, and what it must be. Raises whatever the compiler raises."""
        y, weight = (torch.arange(n * 512, device=device).view(n, 512).remainder(7).bfloat16() for n in (3, 96))
        out = y.new_empty(3, 96)
        self._multiply(y, weight, out)
        return out, (y.float() @ weight.float().T).bfloat16()

    def _try(self, device: torch.device) -> bool:
        try:
            return torch.equal(*self.run(device))
        except Exception as error:  # whatever the compiler or the driver raises
            warnings.warn(f"steps do without {self._products}, whose kernel failed: {error!r}", stacklevel=2)
            return False
