"""Parts of a row and warps of the one-pass sampler."""

from unittest import mock

from bench.gpu.steps import Bench
from bench.gpu.sweeps.step import time_step
from octavo.model.kernels.sampling import sample


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
