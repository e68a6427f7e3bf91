"""Random weights by a seed, for tests, benchmarks and examples that have no checkpoint.

Must not know: checkpoints.
"""

import torch

from model.fingerprint import fingerprint
from model.qwen2 import Qwen2ForCausalLM

STANDARD_DEVIATION = 0.02
"""initializer_range of every published Qwen2.5 config."""


def fill_random(model: Qwen2ForCausalLM, *, seed: int) -> None:
    """Matrices and biases from N(0, 0.02²), norm weights from N(1, 0.02²): nothing is zero, so that a bias or a norm
    that is left out shows. Drawn in fp32 on the CPU, in the order of `named_parameters`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape).normal_(0.0, STANDARD_DEVIATION, generator=generator)
        if name.endswith("norm.weight"):
            values += 1.0
        parameter.data.copy_(values)
    model.fingerprint = fingerprint(model)
