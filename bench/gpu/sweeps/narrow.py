"""Cuts of the narrow path, for one or two rows, and the candidates of the choice beside one another."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from bench.gpu.steps import Bench
from bench.gpu.sweeps.step import take, time_step
from octavo.model.gpu.autotune import Narrow, Wide, candidates
from octavo.model.gpu.small_batch_layers import NarrowCuts, cuts_of
from octavo.model.kernels.small_batch.launch import Cut, Overlap

NARROW_ROWS = {
    "qkv": (2, 4, 8), "output": (2, 4, 8), "gate_up": (2, 4, 8), "down": (1, 2, 4), "head": (8, 16),
}  # fmt: skip
NARROW_WARPS = (2, 4, 8)
CASES = ((1, 256), (1, 8192), (1, 30000), (2, 256), (4, 256), (8, 256))


def variants(cuts: NarrowCuts) -> Iterator[tuple[str, NarrowCuts]]:
    """Cuts that differ in one product."""
    for name, choices in NARROW_ROWS.items():
        for rows, warps in itertools.product(choices, NARROW_WARPS):
            yield f"{name} {rows}x{warps}", replace(cuts, **{name: Cut(rows=rows, warps=warps)})  # type: ignore[arg-type]
    for warps in (1, 2, 8):
        yield f"attention {warps}", replace(cuts, attention_warps=warps)


def sweep_narrow(bench: Bench, batches: tuple[int, ...] = (1,)) -> None:
    """Coordinate descent from the rule's cuts, then what they do elsewhere."""
    for batch in batches:
        best = cuts_of(bench.config, factor=1.0)
        take(bench, batch, Narrow(best))
        least = time_step(bench, batch, 256)
        print(f"narrow {batch}x256 start {least:.4f} {best}", flush=True)
        for field in (*NARROW_ROWS, "attention"):
            found = {}
            for name, cuts in variants(best):
                if name.startswith(field):
                    take(bench, batch, Narrow(cuts))
                    found[name] = time_step(bench, batch, 256), cuts
            print("  " + " ".join(f"{name} {ms:.4f}" for name, (ms, _) in found.items()), flush=True)
            ms, cuts = min(found.values(), key=lambda pair: pair[0])
            if ms < least:
                least, best = ms, cuts
        print(f"narrow {batch}x256 best {least:.4f} {best}", flush=True)
        compare(bench, best)


def compare(bench: Bench, cuts: NarrowCuts) -> None:
    """These cuts against the wide path at several batches and contexts, with and without overlap."""
    for batch, context in CASES:
        times = []
        for path in (Narrow(cuts), Wide()):
            take(bench, batch, path)
            times.append(time_step(bench, batch, context))
        print(f"  {batch}x{context}: narrow {times[0]:.4f} wide {times[1]:.4f}", flush=True)
    with mock.patch.object(bench.decode._narrow, "_overlap", Overlap.NONE):
        take(bench, 1, Narrow(cuts))
        print(f"  1x256 without overlap {time_step(bench, 1, 256):.4f}", flush=True)


def sweep_paths(bench: Bench) -> None:
    """Every candidate of the choice at small batches, then the wide path at large ones."""
    for batch, context in CASES:
        times = {}
        for name, path in candidates(bench.config).items():
            take(bench, batch, path)
            times[name] = time_step(bench, batch, context)
        print(f"paths {batch}x{context} " + " ".join(f"{name} {ms:.4f}" for name, ms in times.items()), flush=True)
    for batch, context in ((8, 256), (32, 256), (128, 256), (256, 256), (256, 560), (16, 8192)):
        take(bench, batch, Wide())
        print(f"paths {batch}x{context} wide {time_step(bench, batch, context):.4f}", flush=True)
