"""The bench of a decode step on a CPU: its parts are those of the model that it steps."""

import time

import torch

from bench.cpu.step import CpuStep, measure
from octavo.model import CausalLM, ModelConfig
from octavo.model.layers.linear import Linear
from tests.support.model.checkpoints import tiny_config


def tiny() -> CausalLM:
    model = CausalLM.random(ModelConfig.from_dict(tiny_config()), seed=0, dtype=torch.bfloat16)
    model.pack_weights()
    return model


@torch.inference_mode()
def test_every_product_of_a_step_is_counted_once() -> None:
    model = tiny()
    step = CpuStep(model, rows=2, context=20, num_steps=3)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(linears) == 4 * len(model.layers) + 1
    seen: list[Linear] = []
    for linear in linears:
        linear.register_forward_hook(lambda module, _inputs, _output: seen.append(module))
    step.products()
    assert seen == linears
    assert step.weight_bytes == sum(linear.packed_bytes or linear.weight.numel() * 2 for linear in linears)


@torch.inference_mode()
def test_the_parts_are_shares_of_the_step() -> None:
    parts = measure(tiny(), rows=3, context=20, num_steps=5, clock=time.perf_counter)
    assert parts.rows == 3
    assert min(parts.step_ms, parts.products_ms, parts.attention_ms, parts.read_gb_s) > 0
    assert parts.rest_ms == parts.step_ms - parts.products_ms - parts.attention_ms
