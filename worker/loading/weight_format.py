"""Quantised weights and KV cache: which format the settings ask for, whether the device supports it and has kernels for
the model, and what it adds to the model's fingerprint.

Used before anything is loaded: knows no weights.
"""

import hashlib

import torch

from octavo.model.cpu.products import multiplies_integers
from octavo.model.errors import ConfigError
from octavo.model.layers.linear import FormatUnavailable, WeightFormat
from octavo.model.quantization.rounding import FP8
from octavo.model.quantization.settings import GroupSettings
from octavo.worker.loading.combinations import why_no_cache_format, why_no_format

CUDA_HEAD_DIMS = (16, 32, 64, 128, 256)
"""Powers of two, since a tile of keys is as wide as a head."""
CUDA_CAPABILITY = (8, 0)
"""Older GPUs have no bfloat16 products, and less shared memory than a tile of prompt attention needs."""
FP8_CAPABILITY = (8, 9)
"""The first GPUs that convert e4m3 in hardware (Ada, Hopper)."""


def weight_format(quantization: str | None) -> WeightFormat:
    """The format that `quantization` names. Raises ValueError for an unknown name."""
    if quantization is None:
        return WeightFormat.BF16
    known = [each.value for each in WeightFormat if each is not WeightFormat.BF16]
    if quantization not in known:
        raise ValueError(f"quantization {quantization!r} is none of {', '.join(known)}")
    return WeightFormat(quantization)


def check_format(wanted: WeightFormat, device: torch.device, *, is_packed: bool, has_cuda_runner: bool) -> None:
    """Raises FormatUnavailable if the device does not support the format, saying what to do instead. is_packed: whether
    the checkpoint is in GPTQ or AWQ format."""
    if wanted is WeightFormat.BF16:
        return
    if device.type == "cuda" and not has_cuda_runner:
        raise FormatUnavailable(
            f"{wanted.value} weights on a GPU need triton, and neither --attention-backend nor --check-numerics"
        )
    if device.type == "cuda" and is_packed:
        raise FormatUnavailable(f"the checkpoint is quantised already: leave out --quantization {wanted.value}")
    if wanted is not WeightFormat.FP8:
        return
    if (why := why_no_format(device.type, quantization=wanted.value)) is not None:
        raise FormatUnavailable(why)
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise FormatUnavailable("fp8 weights need a GPU of compute capability 8.9 or more; try --quantization int8")


def check_kernels(head_dim: int, device: torch.device, *, has_cuda_runner: bool) -> None:
    """Raises ConfigError for a head size that the CUDA kernels do not support, FormatUnavailable for a GPU that is too
    old for them."""
    if not has_cuda_runner:
        return
    if head_dim not in CUDA_HEAD_DIMS:
        sizes = ", ".join(map(str, CUDA_HEAD_DIMS))
        raise ConfigError(
            "head_dim",
            f"{head_dim} is none of the sizes that the CUDA kernels take ({sizes}); "
            "--attention-backend sdpa serves it on a GPU without them, slower",
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CUDA_CAPABILITY:
        raise FormatUnavailable(
            "the CUDA kernels need a GPU of compute capability 8.0 or more; --attention-backend sdpa serves on this "
            "one without them, slower"
        )


def cache_dtype(kv_cache_dtype: str | None) -> torch.dtype | None:
    """The cache's dtype; None for the model's own. Raises ValueError for an unknown name."""
    if kv_cache_dtype is None:
        return None
    if kv_cache_dtype != "fp8":
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is not fp8")
    return FP8


def rounding_of_cache(kv_cache_dtype: str | None) -> bytes:
    """What the cache's dtype adds to the fingerprint."""
    return b"" if kv_cache_dtype is None else f"kv {kv_cache_dtype}".encode()


def check_cache_dtype(kv_cache_dtype: str | None, device: torch.device, *, is_deterministic: bool) -> None:
    """Raises FormatUnavailable if the cache cannot have this dtype, ValueError for an unknown name."""
    if cache_dtype(kv_cache_dtype) is None:
        return
    why = why_no_cache_format(kv_cache_dtype=kv_cache_dtype, is_deterministic=is_deterministic)
    if why is not None:
        raise FormatUnavailable(why)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise FormatUnavailable("an fp8 KV cache needs a GPU of compute capability 8.9 or more")


def rounding_of(quantization: str | None, device: torch.device) -> bytes:
    """What quantization adds to the model's fingerprint: workers that round differently do not have the same model. A
    GPU folds norms into matrices before it rounds them, so its integers differ from a CPU's; a CPU also rounds the
    inputs of products if it can and may."""
    wanted = weight_format(quantization)
    if wanted is WeightFormat.BF16:
        return b""
    rounded = wanted.value.removesuffix("-weights")
    if device.type != "cpu":
        return f"{rounded} folded".encode()
    return f"{rounded} inputs".encode() if wanted is WeightFormat.INT8 and multiplies_integers() else rounded.encode()


def described_bits(quantization: str | None, kv_cache_dtype: str | None, packed: GroupSettings | None) -> str:
    """For the start's summary: ", int4 weights (…), fp8 cache"; empty if nothing is quantised."""
    weights = f"int{packed.bits} weights ({packed.packing.value})" if packed else None
    weights = f"{quantization.removesuffix('-weights')} weights" if quantization else weights
    cache = f"{kv_cache_dtype} cache" if kv_cache_dtype else None
    return "".join(f", {part}" for part in (weights, cache) if part)


def with_rounding(fingerprint: bytes, *roundings: bytes) -> bytes:
    """The fingerprint of a model with these roundings; unchanged if there are none."""
    rounding = b"\0".join(roundings).strip(b"\0")
    return hashlib.blake2b(fingerprint + rounding, digest_size=32).digest() if rounding else fingerprint
