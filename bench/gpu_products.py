"""cuBLASLt's proposals for the products of a decode step against torch's choice, alone and inside the recorded step.

    python -m bench.gpu_products [--rows 96 128 192 256] [--context 560]

Alone: one product of every layer in turn as a CUDA graph, so that weights come from memory as they do in a step.
Prints microseconds of every proposal and milliseconds of whole steps, writes nothing.
"""

import argparse
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from bench.cublaslt import Algorithm, BlasError, multiply, propose
from bench.gpu.device import need_cuda
from bench.gpu.steps import Bench
from bench.gpu.sweeps.step import take, time_step
from octavo.model.gpu import decode_step
from octavo.model.gpu.autotune import Wide, time_graph
from octavo.model.gpu.layers import Attend, LayerBuffers
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.products.activation import silu_mul

NAMES = ("qkv", "output", "gate_up", "down", "head")
MATRICES = {"qkv": "qkv_CD", "output": "o_DA", "gate_up": "gate_up_ED", "down": "down_DI"}
ADDS = {"output", "down"}
Chosen = dict[str, Algorithm]


def graph_us(work: Callable[[], None], count: int) -> float:
    """Median microseconds of one of the `count` products that the work launches."""
    return time_graph(work, steps=4) * 1e3 / count


def weights_of(bench: Bench, name: str) -> list[torch.Tensor]:
    """The matrix of every layer, or the head alone."""
    weights = bench.decode.weights
    return [weights.head_VD] if name == "head" else [getattr(layer, MATRICES[name]) for layer in weights.layers]


def compare(bench: Bench, name: str, rows: int) -> tuple[float, list[tuple[float, Algorithm]]]:
    """Microseconds of torch's product, and of each proposal, fastest first. Wrong ones are told and left out."""
    all_weights = weights_of(bench, name)
    O, K = all_weights[0].shape
    y = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, O, device="cuda", dtype=torch.bfloat16)
    adds = name in ADDS

    def plain() -> None:
        for weight in all_weights:
            out.addmm_(y, weight.T) if adds else torch.mm(y, weight.T, out=out)

    def run(algorithm: Algorithm) -> None:
        for weight in all_weights:
            multiply(y, weight, out, algorithm, beta=float(adds))

    out.zero_()
    plain_us = graph_us(plain, len(all_weights))
    wanted = y.float() @ all_weights[0].float().T
    found = []
    for algorithm in propose(rows, all_weights[0]):
        try:
            out.zero_() if adds else out.fill_(float("nan"))
            multiply(y, all_weights[0], out, algorithm, beta=float(adds))
            error = ((out.float() - wanted).norm() / wanted.norm()).item()
            if not error < 1e-2:
                print(f"  {name} {rows}: error {error}", flush=True)
                continue
            out.zero_()
            found.append((graph_us(partial(run, algorithm), len(all_weights)), algorithm))
        except BlasError as refusal:
            print(f"  {name} {rows}: {refusal}", flush=True)
    return plain_us, sorted(found, key=lambda pair: pair[0])


class ChosenLayers:
    """The decoder layers with these algorithms; torch's product where there is none."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen

    def product(self, name: str, y: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """One."""
        algorithm = self.chosen.get(name)
        if algorithm is not None:
            multiply(y, weight, out, algorithm, beta=float(name in ADDS))
        elif name in ADDS:
            out.addmm_(y, weight.T)
        else:
            torch.mm(y, weight.T, out=out)

    def run(self, weights: GpuWeights, buffers: LayerBuffers, num_tokens: int, attend: Attend) -> torch.Tensor:
        """As model.gpu.layers.run_layers."""
        x, qkv = buffers.x_TD[:num_tokens], buffers.qkv_TC[:num_tokens]
        out, gate_up, act = buffers.out_TNH[:num_tokens], buffers.gate_up_T2I[:num_tokens], buffers.act_TI[:num_tokens]
        for index, layer in enumerate(weights.layers):
            self.product("qkv", x, layer.qkv_CD, qkv)
            attend(index, layer, qkv, x, out)
            self.product("output", out.flatten(1), layer.o_DA, x)
            self.product("gate_up", x, layer.gate_up_ED, gate_up)
            silu_mul(gate_up, x, act, weights.config.rms_norm_eps)
            self.product("down", act, layer.down_DI, x)
        return x

    def logits(self, step: decode_step.DecodeStep, x_TD: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
        """As DecodeStep.compute_logits."""
        hidden, logits = step.hidden_BD[: len(index_B)], step.logits_BV[: len(index_B)]
        decode_step.rms_norm(x_TD, index_B, step.weights.norm_D, hidden, step.weights.config.rms_norm_eps)
        self.product("head", hidden, step.weights.head_VD, logits)
        return logits


def whole(bench: Bench, rows: int, context: int, chosen: Chosen) -> float:
    """Milliseconds of a recorded step."""
    layers = ChosenLayers(chosen)
    with (
        mock.patch.object(decode_step, "run_layers", layers.run),
        mock.patch.object(bench.decode, "compute_logits", partial(layers.logits, bench.decode)),
    ):
        take(bench, rows, Wide())
        return time_step(bench, rows, context)


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[80, 96, 128, 160, 192, 224, 256])
    parser.add_argument("--context", type=int, default=560)
    arguments = parser.parse_args()
    need_cuda()
    bench = Bench("0.5B", pool_tokens=300_000)
    bench.state.temperature_R.fill_(0.6)
    for rows in arguments.rows:
        chosen: Chosen = {}
        for name in NAMES:
            plain_us, found = compare(bench, name, rows)
            line = " ".join(f"{us:.2f}" for us, _ in found[:12])
            print(f"{rows} {name:8s} torch {plain_us:.2f} of {len(found)}: {line}", flush=True)
            if found and found[0][0] < plain_us:
                chosen[name] = found[0][1]
        before = whole(bench, rows, arguments.context, {})
        each = {name: whole(bench, rows, arguments.context, {name: chosen[name]}) for name in chosen}
        after = whole(bench, rows, arguments.context, chosen)
        again = whole(bench, rows, arguments.context, {})
        alone = " ".join(f"{name} {ms:.4f}" for name, ms in each.items())
        print(
            f"{rows} x {arguments.context} step: torch {before:.4f} {again:.4f}, chosen {after:.4f}; {alone}",
            flush=True,
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
