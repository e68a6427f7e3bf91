"""Compiles every kernel that a CUDA runner may launch, before it is made: on a disk where Triton has none yet, a minute
of compiling one after the other becomes seconds.

Must not know: the KV pool's size, requests.
"""

from dataclasses import replace

import torch

from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.precompile import OnProgress, compiling
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig
from octavo.worker.runners.cuda.runner import CudaRunner


def compile_kernels(weights: GpuWeights, config: CudaRunnerConfig, on_progress: OnProgress) -> None:
    """For these shapes, on every path of a step. Needs the memory of a runner with a pool of one block, and leaves
    none taken; kernels that are on disk already are only loaded."""
    first_layer = replace(weights, layers=weights.layers[:1])
    try:
        with torch.inference_mode():
            programs = CudaRunner(first_layer, replace(config, num_blocks=1)).programs
            with compiling(on_progress):
                programs.run_all()
            torch.cuda.synchronize(weights.embed_VD.device)
        del programs
    except torch.OutOfMemoryError:
        pass  # the rehearsal tells what does not fit, and what to do about it
    torch.cuda.empty_cache()
