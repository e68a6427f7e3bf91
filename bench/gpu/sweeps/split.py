"""Products of our own with their inputs split, instead of cuBLAS's: which are faster, and how they are cut."""

import itertools
from dataclasses import replace
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from bench.gpu.steps import Bench
from bench.gpu.sweeps.step import take, time_step
from octavo.model.gpu import decode_step
from octavo.model.gpu.autotune import Wide
from octavo.model.gpu.layers import Attend
from octavo.model.gpu.split_k_layers import SplitCuts, SplitLayers
from octavo.model.kernels.precompile import compiling
from octavo.model.kernels.products.split_k import SplitCut, SplitRoom

BATCHES = (8, 32, 64, 128, 256)


def split_cuts(batch: int) -> dict[str, list[SplitCut]]:
    """Cuts of each product that are tried for a batch."""
    tokens = min(64, max(16, batch))
    inputs, stages = (128, 4) if tokens < 64 else (64, 4)

    def cut(outputs: int, splits: int, **changes: int) -> SplitCut:
        return replace(SplitCut(outputs=outputs, tokens=tokens, inputs=inputs, splits=splits, stages=stages), **changes)

    small = [cut(64, 1), cut(64, 3), cut(64, 7), cut(32, 3)]
    down = [cut(64, 5), cut(64, 10), cut(64, 19), cut(32, 5)]
    gate_up = [cut(32, 1), cut(64, 1), cut(32, 1, inputs=64), cut(64, 1, inputs=64)]
    if batch >= 128:
        wide = {"tokens": 128, "inputs": 64, "warps": 8}
        down += [cut(128, 4, **wide), cut(128, 8, **wide), cut(64, 4, tokens=128)]
        gate_up = [cut(64, 1, tokens=128, warps=8), cut(64, 1), cut(64, 1, tokens=128, stages=3)]
    return {"qkv": small, "output": small, "gate_up": gate_up, "down": down}


class SplitSweep:
    """The steps of a bench with split products. cuts: those that they have now."""

    def __init__(self, bench: Bench) -> None:
        room = SplitRoom.allocate(num_elements=32 << 20, num_tiles=4096, device="cuda")
        self.bench, self.cuts = bench, SplitCuts()
        self._layers = SplitLayers(bench.decode.weights, bench.decode.buffers, room)

    def run_layers(self, weights: object, buffers: object, num_tokens: int, attend: Attend) -> torch.Tensor:
        """As `model.gpu.decode_step.run_layers`."""
        return self._layers.run(num_tokens, attend, self.cuts)

    def compile(self) -> None:
        """Every kernel that will be tried, several at once."""
        with compiling(lambda done, total: None):
            for batch, name in itertools.product(BATCHES, split_cuts(8)):
                take(self.bench, batch, Wide())
                for cut in split_cuts(batch)[name]:
                    self.cuts = replace(SplitCuts(), **{name: cut})
                    self.bench.decode.run(batch)
        torch.cuda.synchronize()

    def sweep(self, batch: int) -> None:
        """Product after product: the fastest cut is kept where it beats what is chosen so far."""
        self.cuts = chosen = SplitCuts()
        best = time_step(self.bench, batch, 256)
        print(f"split {batch}x256 cuBLAS {best:.4f}", flush=True)
        for name, tried in split_cuts(batch).items():
            times = self._time(batch, chosen, name, tried)
            fastest = min(times, key=lambda cut: times[cut])
            if times[fastest] < best:
                best, chosen = times[fastest], replace(chosen, **{name: fastest})
        apart = self._apart(batch, SplitCuts(), chosen)
        print(f"split {batch}x256 best {best:.4f} logits differ by {apart:.4f} {chosen}", flush=True)

    def _time(self, batch: int, chosen: SplitCuts, name: str, tried: list[SplitCut]) -> dict[SplitCut, float]:
        """Milliseconds by cut of this product, those left out that do not fit."""
        times: dict[SplitCut, float] = {}
        for cut in tried:
            self.cuts = replace(chosen, **{name: cut})
            try:
                times[cut] = time_step(self.bench, batch, 256)
            except OutOfResources as error:
                print(f"  {cut}: {error}", flush=True)
        line = " ".join(
            f"{c.outputs}x{c.tokens}x{c.inputs}x{c.splits}x{c.warps}x{c.stages}:{ms:.4f}" for c, ms in times.items()
        )
        print(f"  {name} {line}", flush=True)
        return times

    def _apart(self, batch: int, before: SplitCuts, after: SplitCuts) -> float:
        """Relative difference of the logits of one step."""
        before_BV, after_BV = (self._logits(batch, cuts) for cuts in (before, after))
        return float((after_BV - before_BV).norm() / before_BV.norm())

    def _logits(self, batch: int, cuts: SplitCuts) -> torch.Tensor:
        self.cuts, state = cuts, self.bench.state
        state.position_R[:batch], state.last_token_R[:batch] = 256, 77
        self.bench.decode.run(batch)
        return self.bench.decode.logits_BV[:batch].float()


def sweep_split(bench: Bench) -> None:
    """Which products of our own are faster than cuBLAS, and how they are cut, one after the other."""
    sweep = SplitSweep(bench)
    with mock.patch.object(decode_step, "run_layers", sweep.run_layers):
        sweep.compile()
        for batch in BATCHES:
            sweep.sweep(batch)
