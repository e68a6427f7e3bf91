"""Finds where numbers go wrong: the first module whose output is NaN, infinite, or larger than a limit.

By forward hooks, so that a model that is not watched pays nothing. Watching reads every activation (and waits for the
device): for diagnosis, not for service.

Legend: T tokens in this step.
Must not know: requests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from octavo.model.causal_lm import CausalLM
from octavo.model.cpu.products import LayerRest

LARGEST_USUAL = 1e6
"""Published Qwen2.5 models have a few activations of about 1e4; nothing that works has 1e6."""


class NumericFault(Enum):
    """What is wrong with an activation."""

    NAN = "NaN"
    INFINITE = "infinite"
    OVER_LIMIT = "over the limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFinding:
    """The first bad output. module: its name, as in `named_modules` ("layers.3.mlp.down_proj").

    row: first token row with a bad value. num_bad: bad values in all rows. largest: greatest finite magnitude.
    """

    module: str
    fault: NumericFault
    row: int
    num_bad: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.module}: output is {self.fault.value}: {self.num_bad} values, first in row {self.row}; "
            f"largest finite magnitude {self.largest:.3g}"
        )


def default_limit(dtype: torch.dtype) -> float:
    """Half of the dtype's range, at most LARGEST_USUAL."""
    return min(torch.finfo(dtype).max / 2, LARGEST_USUAL)


class NumericsWatch:
    """Watches every module of a model from `attach` to `detach`. first: the earliest finding since the last `reset`."""

    def __init__(self, model: CausalLM, *, limit: float | None = None) -> None:
        self._model = model
        self._limit = default_limit(model.dtype) if limit is None else limit
        self._handles: list[RemovableHandle] = []
        self._rests: list[LayerRest | None] = []
        self.first: NumericFinding | None = None

    def attach(self) -> None:
        """Start watching. Idempotent. Until `detach`, layers run their stages one by one."""
        if not self._handles:
            self._rests = [layer.rest for layer in self._model.decoder_layers]
            for layer in self._model.decoder_layers:
                layer.rest = None
            for name, module in self._model.named_modules():
                self._handles.append(module.register_forward_hook(self._hook(name or "model")))

    def detach(self) -> None:
        """Stop watching; the finding is kept. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
        for layer, rest in zip(self._model.decoder_layers, self._rests, strict=False):
            layer.rest = rest
        self._rests = []

    def reset(self) -> None:
        """Forget the finding."""
        self.first = None

    def _hook(self, name: str) -> Any:
        def look(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            if self.first is None:
                self.first = examine(name, output, self._limit)

        return look


@contextmanager
def watch_numerics(model: CausalLM, *, limit: float | None = None) -> Iterator[NumericsWatch]:
    """`with watch_numerics(model) as watch:` run steps, then read `watch.first`. limit: None takes `default_limit`."""
    watch = NumericsWatch(model, limit=limit)
    watch.attach()
    try:
        yield watch
    finally:
        watch.detach()


def examine(name: str, output: torch.Tensor, limit: float) -> NumericFinding | None:
    """None if every value is finite and within the limit."""
    rows = output.detach().reshape(output.shape[0], -1)
    if float(rows.abs().max()) <= limit:  # NaN and infinity fail this too
        return None
    is_bad = ~(rows.abs() <= limit)
    finite = rows[rows.isfinite()].abs()
    if bool(rows.isnan().any()):
        fault = NumericFault.NAN
    else:
        fault = NumericFault.INFINITE if bool(rows.isinf().any()) else NumericFault.OVER_LIMIT
    return NumericFinding(
        module=name,
        fault=fault,
        row=int(is_bad.any(1).nonzero()[0]),
        num_bad=int(is_bad.sum()),
        largest=float(finite.max()) if finite.numel() else float("nan"),
    )
