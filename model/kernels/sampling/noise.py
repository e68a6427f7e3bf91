"""Noise of a draw on the device: the same bits as model/sampling/noise.py, a function of (seed, output index, token
id).

Must not know: logits, rows of a batch.
"""

import triton
import triton.language as tl

_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw_key(seed, index):
    """The two uint32 of a draw's key. seed: int64, the bits of a uint64. index: of the token in the output."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix64(seed.to(tl.uint64, bitcast=True) + golden) + index.to(tl.uint64) * golden
    key = _mix64(key)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def _bits(token, key_low, key_high):
    """The same bits as hash_bits in model/sampling/noise.py; only the lower 31 are used."""
    h = token.to(tl.uint32) * 0x9E3779B9 + key_low
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= key_high
    h ^= h >> 15
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def log2_exponential(token, key_low, key_high, FAST: tl.constexpr):
    """Logarithm to base 2 of one Exponential(1) variate per token."""
    # For u near 0 a series, since 1 - u would lose its bits.
    h = _bits(token, key_low, key_high)
    u = tl.minimum(((h & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / 2147483648.0), 1.0 - 1.0 / 16777216.0)
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    exponential = tl.where(u < 0.015625, series, -0.6931471805599453 * _log2(1.0 - u, FAST))
    return _log2(exponential, FAST)


@triton.jit
def log2_exponential_bound(token, key_low, key_high, FAST: tl.constexpr):
    """At most 32 + log2_exponential of the same arguments, and hardly less where that is small, since -ln(1 - u) is
    little more than u. Takes a third of the instructions."""
    h = _bits(token, key_low, key_high)
    return _log2((h + h + 1).to(tl.float32), FAST)


@triton.jit
def log_exponential(token, key_low, key_high, FAST: tl.constexpr):
    """The natural logarithm: ``argmax(logits - log_exponential)`` draws from the logits' softmax. Between -23 and 3."""
    return log2_exponential(token, key_low, key_high, FAST) * _LOG_2
