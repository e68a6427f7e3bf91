"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) in the half-split layout of HF checkpoints, with YaRN.

Legend: T tokens in this step · N heads · H head dim.
Must not know: attention, caches.
"""

import math
from dataclasses import dataclass

import torch

from octavo.model.config import ModelConfig
from octavo.model.layers.rope_scaling import YarnScaling


@dataclass(frozen=True, slots=True, eq=False)
class RopeAngles:
    """cos_TH / sin_TH: the cosines and sines of this step's positions, in the dtype of the activations."""

    cos_TH: torch.Tensor
    sin_TH: torch.Tensor


class Rope:
    """Angles for positions. Frequencies and angles are fp32 whatever the model's dtype: a bf16 position would be wrong
    from 257 on."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._frequencies = rotary_frequencies(config).to(device)
        self._amplitude = yarn_amplitude(config.yarn) if config.yarn else 1.0

    def angles(self, positions_T: torch.Tensor) -> RopeAngles:
        """positions_T: any integer dtype, 0-based."""
        half = positions_T.float()[:, None] * self._frequencies
        angles_TH = torch.cat([half, half], dim=-1)
        cos_TH, sin_TH = angles_TH.cos() * self._amplitude, angles_TH.sin() * self._amplitude
        return RopeAngles(cos_TH.to(self._dtype), sin_TH.to(self._dtype))


def rotate(x_TNH: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
    """Turn each pair (h, h + H/2) of every head by its angle. Returns a new tensor of the same dtype."""
    first, second = x_TNH.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_TNH * angles.cos_TH[:, None] + turned * angles.sin_TH[:, None]


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """fp32 [H/2]: radians per position of each pair."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    periods = config.rope_theta**exponents
    if config.yarn is None:
        return 1.0 / periods
    keep = yarn_keep_share(config, config.yarn)
    return (1.0 / (config.yarn.factor * periods)) * (1 - keep) + (1.0 / periods) * keep


def yarn_keep_share(config: ModelConfig, yarn: YarnScaling) -> torch.Tensor:
    """fp32 [H/2]: 1 where a frequency turns often enough within the original context to be kept, 0 where it is
    divided by the factor, a ramp between (YaRN, "NTK-by-parts")."""

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that turns this many times within the original context."""
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), config.head_dim - 1)
    width = (high - low) or 0.001
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - low) / width).clamp(0, 1)


def yarn_amplitude(yarn: YarnScaling) -> float:
    """What YaRN multiplies cosine and sine with, so that attention keeps its temperature over the longer context."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    return 0.1 * math.log(yarn.factor) + 1.0
