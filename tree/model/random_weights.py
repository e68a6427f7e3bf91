"""Random weights by a seed, for tests, benchmarks and examples that have no checkpoint.

Must not know: checkpoints.
"""

import torch

from model.fingerprint import fingerprint
from model.qwen2 import Qwen2ForCausalLM

VECTOR_DEVIATION = 0.1


def fill_random(model: Qwen2ForCausalLM, *, seed: int) -> None:
    """Matrices from N(0, 1 / columns), so that activations stay near 1 and attention is not flat whatever the shape;
    biases from N(0, 0.1²) and norm weights from N(1, 0.1²), so that one that is left out shows.
    Drawn in fp32 on the CPU, in the order of `named_parameters`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        deviation = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else VECTOR_DEVIATION
        values = torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
        if name.endswith("norm.weight"):
            values += 1.0
        parameter.data.copy_(values)
    model.fingerprint = fingerprint(model)
