"""Random numbers that are a function of (seed, output index, token id) and of nothing else.

There is no generator to advance: a draw is the same whatever else is in the batch, after a preemption, and on a
cache hit. Integer operations only, wrapping at 32 bits, so that any device gives the same bits.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) for counters instead of state;
splitmix64 (Steele et al., OOPSLA 2014) for the row's key; the constants of ``lowbias32`` (C. Wellons, hash-prospector)
for the token's hash.

Legend: S sampled rows · V vocabulary (or a row's candidates).
"""

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


def _signed(word: int) -> int:
    """The int32 with the bits of this uint32."""
    return word - (1 << 32) if word >= 1 << 31 else word


_C0, _C1, _C2 = _signed(0x9E37_79B9), _signed(0x7FEB_352D), _signed(0x846C_A68B)
_LARGEST_U = 1.0 - 2.0**-24


def _mix64(z_S: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser on uint64."""
    z_S = (z_S ^ (z_S >> _S30)) * _MIX_1
    z_S = (z_S ^ (z_S >> _S27)) * _MIX_2
    return z_S ^ (z_S >> _S31)


def row_keys(seeds_S: np.ndarray, indices_S: np.ndarray) -> np.ndarray:
    """Key of each draw: int32 [S, 2] from uint64 seeds and the index of the output token that is drawn."""
    keys_S = _mix64(_mix64(seeds_S + _GOLDEN) + indices_S.astype(np.uint64) * _GOLDEN)
    low_S, high_S = keys_S & np.uint64(0xFFFF_FFFF), keys_S >> _S32
    return np.stack([low_S, high_S], axis=1).astype(np.uint32).view(np.int32)


def hash_bits(keys_S2: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int32 hashes [S, V] of (key, token id); token_ids int32 [V] or [S, V]."""
    h_SV = token_ids * _C0 + keys_S2[:, :1]
    h_SV ^= (h_SV >> 16).bitwise_and_(0xFFFF)
    h_SV *= _C1
    h_SV ^= keys_S2[:, 1:]
    h_SV ^= (h_SV >> 15).bitwise_and_(0x1FFFF)
    h_SV *= _C2
    h_SV ^= (h_SV >> 16).bitwise_and_(0xFFFF)
    return h_SV


def log_exponential(keys_S2: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Logarithm of one Exponential(1) variate per (key, token id): float32 [S, V], finite everywhere.

    ``argmax(logits - log_exponential)`` draws from ``softmax(logits)`` (Gumbel-max, the exponential race).
    u is taken near 0 and not near 1, where float32 would round the rare large Gumbel values away.
    """
    u_SV = hash_bits(keys_S2, token_ids).bitwise_and_(0x7FFF_FFFF).to(torch.float32)
    u_SV.add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_U)
    return u_SV.neg_().log1p_().neg_().log_()
