"""Which cuts, tiles and limits make whole steps fastest: one thing is varied at a time, inside the recorded step.

    python -m bench.gpu_sweep [--shape 0.5B] narrow attention split sampler prefill profile

A kernel timed alone misleads: it neither overlaps with its neighbours nor shares the cache with them.
Prints milliseconds of every variant; what is best goes into the code by hand.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from bench.gpu.clock import elapsed_ms
from bench.gpu.device import need_cuda
from bench.gpu.kernels import kernels_of
from bench.gpu.steps import Bench, capture, time_prefill
from bench.gpu_step import profile
from bench.shapes import PUBLISHED
from model.gpu import decode_step
from model.gpu.choice import Narrow, StepPath, Wide, candidates
from model.gpu.decode_step import DecodeStep
from model.gpu.layers import Attend
from model.gpu.narrow_layers import NarrowCuts, cuts_of
from model.gpu.split_layers import SplitCuts, SplitLayers
from model.kernels import prefill_attention, sample
from model.kernels.ahead import compiling
from model.kernels.decode_attention import DecodeTiles, partial_buffers
from model.kernels.decode_work import DecodeWork, WorkLimits
from model.kernels.narrow import Cut, Overlap
from model.kernels.split_product import SplitCut, SplitRoom

NARROW_ROWS = {
    "qkv": (2, 4, 8), "output": (2, 4, 8), "gate_up": (2, 4, 8), "down": (1, 2, 4), "head": (8, 16),
}  # fmt: skip
NARROW_WARPS = (2, 4, 8)
DECODE_TILES = [
    (DecodeTiles(tokens=tokens, warps=warps, stages=stages), programs)
    for tokens, warps, stages, programs in (
        (64, 4, 3, 396), (64, 4, 3, 528), (64, 4, 3, 792), (64, 4, 3, 1056), (64, 4, 5, 528), (64, 2, 3, 528),
        (32, 4, 3, 528), (32, 2, 3, 792), (128, 4, 3, 396), (64, 8, 3, 264), (64, 8, 3, 396), (128, 8, 3, 264),
        (32, 4, 4, 396), (32, 4, 4, 528), (64, 4, 3, 264),
    )
]  # fmt: skip
PREFILL_TILES = [
    (128, 128, 4, 2), (128, 128, 4, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3),
    (64, 64, 4, 4), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4),
]  # fmt: skip


def ragged(batch: int) -> tuple[int, ...]:
    """Contexts as they are in the middle of a nano bench."""
    rng = np.random.default_rng(0)
    return tuple((rng.integers(100, 1025, batch) + rng.integers(0, 1025, batch) * rng.random(batch)).astype(int))


def time_step(bench: Bench, batch: int, context: int | tuple[int, ...]) -> float:
    """Median milliseconds of a recorded decode step."""
    contexts = torch.tensor(context, dtype=torch.int32, device="cuda").expand(batch)
    bench.spread(batch, int(contexts.max()))
    bench.state.position_R[:batch] = contexts
    graph = capture(bench, batch)
    times = []
    for _ in range(5):
        bench.state.position_R[:batch] = contexts
        graph.replay()
        times.append(elapsed_ms(graph.replay, 20))
    return statistics.median(times)


def take(bench: Bench, batch: int, path: StepPath) -> None:
    """From now on this batch size goes this way."""
    bench.decode.paths._candidates["swept"] = path
    bench.decode.paths.names[batch] = "swept"


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


CASES = ((1, 256), (1, 8192), (1, 30000), (2, 256), (4, 256), (8, 256))


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


def tiled(step: DecodeStep, tiles: DecodeTiles) -> Callable[[torch.Tensor], object]:
    """The step's plan with other tiles."""
    plan = type(step).plan
    return lambda rows_B: replace(plan(step, rows_B), tiles=tiles)


def sweep_attention(bench: Bench) -> None:
    """Tiles, and how finely the work is cut, of the wide path's attention."""
    step, config, K = bench.decode, bench.config, bench.config.num_key_value_heads
    cases: dict[str, tuple[int, int | tuple[int, ...]]] = {
        "256x560": (256, 560), "256 ragged": (256, ragged(256)), "64 ragged": (64, ragged(64)), "16x8192": (16, 8192),
        "32x256": (32, 256), "128x256": (128, 256),
    }  # fmt: skip
    for name, (batch, _) in cases.items():
        take(bench, batch, Wide())
        print(f"attention {name}: as it is {time_step(bench, *cases[name]):.4f}", flush=True)
    for tiles, programs in DECODE_TILES:
        limits = WorkLimits(target_items=programs // K)
        rows = len(step.token_B)
        work = DecodeWork.allocate(rows, K, "cuda", limits)
        partials = partial_buffers(rows, config.num_attention_heads, config.head_dim, "cuda", limits)
        with (
            mock.patch.object(step, "_work", work),
            mock.patch.object(step, "_partials", partials),
            mock.patch.object(step, "plan", tiled(step, tiles)),
        ):
            times = [time_step(bench, *case) for case in cases.values()]
        line = f"{tiles.tokens}x{tiles.warps}x{tiles.stages} programs {programs}"
        print(f"attention {line}: " + " ".join(f"{ms:.4f}" for ms in times), flush=True)


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


def sweep_split(bench: Bench) -> None:
    """Which products of our own are faster than cuBLAS, and how they are cut, one after the other."""
    room = SplitRoom.allocate(num_elements=32 << 20, num_tiles=4096, device="cuda")
    layers = SplitLayers(bench.decode.weights, bench.decode.buffers, room)
    now = SplitCuts()

    def run(weights: object, buffers: object, num_tokens: int, attend: Attend) -> torch.Tensor:
        return layers.run(num_tokens, attend, now)

    batches = (8, 32, 64, 128, 256)
    with mock.patch.object(decode_step, "run_layers", run):
        with compiling(lambda done, total: None):
            for batch, name in itertools.product(batches, split_cuts(8)):
                take(bench, batch, Wide())
                for cut in split_cuts(batch)[name]:
                    now = replace(SplitCuts(), **{name: cut})
                    bench.decode.run(batch)
        torch.cuda.synchronize()
        for batch in batches:
            now = SplitCuts()
            best = time_step(bench, batch, 256)
            print(f"split {batch}x256 cuBLAS {best:.4f}", flush=True)
            chosen = now
            for name, tried in split_cuts(batch).items():
                times = {}
                for cut in tried:
                    now = replace(chosen, **{name: cut})
                    try:
                        times[cut] = time_step(bench, batch, 256)
                    except OutOfResources as error:
                        print(f"  {cut}: {error}", flush=True)
                line = " ".join(
                    f"{c.outputs}x{c.tokens}x{c.inputs}x{c.splits}x{c.warps}x{c.stages}:{ms:.4f}"
                    for c, ms in times.items()
                )
                print(f"  {name} {line}", flush=True)
                fastest = min(times, key=lambda cut: times[cut])
                if times[fastest] < best:
                    best, chosen = times[fastest], replace(chosen, **{name: fastest})
            logits = []
            for cuts in (SplitCuts(), chosen):
                now = cuts
                bench.state.position_R[:batch], bench.state.last_token_R[:batch] = 256, 77
                bench.decode.run(batch)
                logits.append(bench.decode.logits_BV[:batch].float())
            apart = (logits[1] - logits[0]).norm() / logits[0].norm()
            print(f"split {batch}x256 best {best:.4f} logits differ by {apart:.4f} {chosen}", flush=True)


def sweep_sampler(bench: Bench) -> None:
    """Parts of a row and warps of the one-pass sampler, every row drawn."""
    bench.state.temperature_R.fill_(0.6)
    for part, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)):
        with mock.patch.multiple(sample, PART=part, WARPS=warps):
            parts = sample.SampleParts(len(bench.decode.token_B), bench.decode._parts.vocab_size, "cuda")
            with mock.patch.object(bench.decode, "_parts", parts):
                drawn = time_step(bench, 256, 256)
        print(f"sampler {part}x{warps} {drawn:.4f}", flush=True)
    bench.state.temperature_R.fill_(0.0)
    print(f"sampler greedy {time_step(bench, 256, 256):.4f}", flush=True)


def sweep_prefill(bench: Bench) -> None:
    """Tiles of chunk attention."""
    print(f"prefill as it is {time_prefill(bench, 1, 8192):.3f} {time_prefill(bench, 8, 2048):.3f} ms", flush=True)
    for queries, keys, warps, stages in PREFILL_TILES:
        tiles = prefill_attention.PrefillTiles(keys=keys, warps=warps, stages=stages)
        with (
            mock.patch.object(prefill_attention.PrefillTiles, "of", lambda _, tiles=tiles: tiles),
            mock.patch.object(prefill_attention, "QUERY_TILE", queries),
        ):
            times = time_prefill(bench, 1, 8192), time_prefill(bench, 8, 2048)
        print(f"prefill {queries}x{keys}x{warps}x{stages} {times[0]:.3f} {times[1]:.3f} ms", flush=True)


def profile_all(bench: Bench) -> None:
    """Kernels of some steps and of a prefill."""
    for batch, context in ((1, 256), (256, 560)):
        profile(bench, batch, context)
    for prompts, length in ((1, 8192), (8, 2048)):
        kernels = kernels_of(partial(time_prefill, bench, prompts, length))
        print(f"-- kernels of prefills {prompts} x {length}, percent")
        total_us = sum(kernel.total_us for kernel in kernels)
        for kernel in kernels[:14]:
            print(f"  {kernel.total_us / total_us:6.1%} {kernel.num_launches:6d} x  {kernel.name[:90]}")


SWEEPS: dict[str, Callable[[Bench], None]] = {
    "narrow": sweep_narrow, "attention": sweep_attention, "sampler": sweep_sampler, "prefill": sweep_prefill,
    "profile": profile_all, "paths": sweep_paths, "split": sweep_split,
}  # fmt: skip


def main() -> None:
    """Run the sweeps that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PUBLISHED, default="0.5B")
    parser.add_argument("sweeps", nargs="+", choices=SWEEPS)
    arguments = parser.parse_args()
    need_cuda()
    bench = Bench(arguments.shape, pool_tokens=660_000)
    for name in arguments.sweeps:
        SWEEPS[name](bench)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
