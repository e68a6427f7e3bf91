"""A model on a CPU whose every row has the same bits whatever else is in the batch: deterministic mode
(docs/decisions/0006-deterministic-mode.md).

`make_invariant` puts other products, norms and angles in the place of those that a library chooses by the batch's size,
and the backend "invariant" does attention. On a GPU, model/gpu/invariant_steps.py does the same.

Must not know: requests, batches.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from octavo.model.causal_lm import CausalLM
from octavo.model.config import ModelConfig
from octavo.model.cpu import invariant
from octavo.model.cpu.native import kernels_fingerprint, native_library, why_missing
from octavo.model.cpu.ops import rms_norm, silu_mul
from octavo.model.cpu.products import pack_bf16
from octavo.model.layers.decoder import Mlp, RmsNorm, Rope, RopeAngles
from octavo.model.layers.linear import Linear, WeightFormat, packed
from octavo.model.parallel import Sums

DTYPES = (torch.float32, torch.bfloat16)
LANES = 32
"""Widths must be multiples of it: the kernels have no code for a rest."""


class InvarianceUnavailable(ValueError):
    """This model, or this machine, has no kernels whose rows are independent of the batch; says what is missing."""


class InvariantNorm(RmsNorm):
    """RmsNorm that uses the compiled kernels for fp32 too."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """See RmsNorm.forward."""
        if x_TD.dtype == torch.float32:
            return rms_norm(x_TD, self.weight, self.epsilon)
        return super().forward(x_TD)


class InvariantMlp(torch.nn.Module):
    """Mlp that uses the compiled kernels for fp32 too."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = mlp.gate_up_proj, mlp.down_proj

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """See Mlp.forward."""
        return self.down_proj(self.activate(x_TD))

    def activate(self, x_TD: torch.Tensor) -> torch.Tensor:
        """See Mlp.activate."""
        return silu_mul(self.gate_up_proj(x_TD))


class TabulatedRope(Rope):
    """Looks angles up in a table: computed angles may be rounded differently in the tail of a vector than in its body,
    and so depend on the batch."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, max_positions: int) -> None:
        super().__init__(config, dtype, torch.device("cpu"))
        angle_LH = torch.arange(max_positions, dtype=torch.float32)[:, None] * self._frequencies
        angle_LH = torch.cat([angle_LH, angle_LH], dim=-1).double()
        self._cos_LH = (angle_LH.cos() * self._amplitude).float().to(dtype)
        self._sin_LH = (angle_LH.sin() * self._amplitude).float().to(dtype)

    def angles(self, positions_T: torch.Tensor) -> RopeAngles:
        """See Rope.angles. Raises IndexError for a position that is not in the table."""
        return RopeAngles(F.embedding(positions_T.long(), self._cos_LH), F.embedding(positions_T.long(), self._sin_LH))


def make_invariant(model: CausalLM, *, max_positions: int, wanted: WeightFormat = WeightFormat.BF16) -> None:
    """Call once, after loading, instead of `pack_weights`; then use the backend "invariant". max_positions: tokens of
    the longest request. Raises InvarianceUnavailable, model.layers.linear.FormatUnavailable."""
    check_available(model)
    for module in list(model.modules()):
        if isinstance(module, Linear) and module._packed is None:
            if wanted is not WeightFormat.BF16:
                module._packed = packed(module.weight.data, module.bias, wanted)
            elif module.weight.dtype == torch.bfloat16:
                module._packed = pack_bf16(module.weight.data, module.bias)
            else:
                module._packed = invariant.InvariantWeight.pack(module.weight.data, module.bias)
            del module.weight
    for layer in model.decoder_layers:
        layer.input_layernorm = _norm(layer.input_layernorm)
        layer.post_attention_layernorm = _norm(layer.post_attention_layernorm)
        attention = layer.self_attn
        if attention.q_norm is not None and attention.k_norm is not None:
            attention.q_norm, attention.k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
        layer.mlp = InvariantMlp(layer.mlp)  # type: ignore[assignment]
        layer.fuse()  # whose stages are the same kernels, in bf16; fp32 has none
    model.ranks = replace(model.ranks, sums=Sums.BY_RANK)
    model.norm = _norm(model.norm)
    model.rope = TabulatedRope(model.config, model.dtype, max_positions=max_positions)


def check_available(model: CausalLM) -> None:
    """Raises InvarianceUnavailable."""
    if model.device.type != "cpu":
        raise InvarianceUnavailable(f"this is for CPUs; the model is on {model.device}")
    if native_library() is None:
        raise InvarianceUnavailable(
            f"deterministic mode on a CPU needs kernels, and {why_missing() or 'OCTAVO_NATIVE is off'}"
        )
    if any(isinstance(module, Linear) and module.quantized is not None for module in model.modules()):
        raise InvarianceUnavailable("deterministic mode has no products for the checkpoint's quantised weights")
    check_kernels(model.config, model.dtype, num_ranks=model.ranks.size)


def check_kernels(config: ModelConfig, dtype: torch.dtype, *, num_ranks: int) -> None:
    """config: of one rank's part. Raises InvarianceUnavailable if the CPU kernels do not support it."""
    if dtype not in DTYPES:
        raise InvarianceUnavailable(f"deterministic mode on a CPU is for bfloat16 and float32, not {dtype}")
    widths = (config.hidden_size, config.intermediate_size, config.head_dim)
    if any(width % LANES for width in widths):
        where = f" of each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise InvarianceUnavailable(f"hidden, intermediate and head sizes {widths}{where} must be multiples of {LANES}")


def arithmetic(device: torch.device) -> str:
    """Identifies everything that affects rounding in a deterministic model on this device: two workers with the same
    weights and arithmetic give the same tokens."""
    if device.type != "cuda":
        return f"cpu {kernels_fingerprint()}"
    import triton

    capability, kernels = torch.cuda.get_device_capability(device), sources_hash(Path(__file__).parent / "kernels")
    return f"cuda {torch.cuda.get_device_name(device)} {capability} triton {triton.__version__} kernels {kernels}"


def sources_hash(folder: Path) -> str:
    """A hash of the Python files below the folder, which determine the order in which GPU kernels add."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)} ".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def _norm(norm: RmsNorm) -> InvariantNorm:
    return InvariantNorm(norm.weight.data, norm.epsilon)
