"""Models of published shapes with random weights on the device, prepared as a runner prepares them.

Must not know: steps, engines.
"""

import torch

from bench.shapes import MAX_POSITIONS
from octavo.model import CausalLM, ModelConfig
from octavo.model.gpu.weights import GpuWeights
from octavo.model.layers.linear import Linear, WeightFormat
from octavo.model.quantization.rounding import round_to_groups

WEIGHTS = {
    "bf16": WeightFormat.BF16,
    "fp8": WeightFormat.FP8,
    "int8": WeightFormat.INT8,
    "int4": WeightFormat.BF16,
}
"""Formats in which the model's weights are taken; those for int4 are rounded before."""


def random_model(config: ModelConfig) -> CausalLM:
    """A model with bf16 weights drawn on the device, which is fast, at a scale that keeps activations finite."""
    model = CausalLM(config, dtype=torch.bfloat16, device="cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.normal_(1.0, 0.1)
    return model


def round_to_int4(model: CausalLM) -> None:
    """Round every matrix of the layers as a GPTQ checkpoint would hold it."""
    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.hold(round_to_groups(module.weight.data, bits=4, group_size=128))


def take_weights(model: CausalLM, weights: str) -> tuple[int, GpuWeights]:
    """The bytes of weights that a step reads, and the weights. weights: a key of WEIGHTS."""
    if weights == "int4":
        round_to_int4(model)
    taken = GpuWeights.take(model, max_positions=MAX_POSITIONS, weight_format=WEIGHTS[weights])
    linears = [module for module in model.layers.modules() if isinstance(module, Linear)]
    plain = sum(module.weight.numel() * 2 for module in linears if hasattr(module, "weight"))
    head = model.config.vocab_size * model.config.hidden_size * 2
    return plain + sum(module.packed_bytes for module in linears) + head, taken
