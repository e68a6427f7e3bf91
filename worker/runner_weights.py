"""What a worker's `quantization` means on its device, checked before anything is loaded.

Must not know: tensors of a model, sockets.
"""

import hashlib

import torch

from model.errors import ConfigError
from model.linear import FormatUnavailable, WeightFormat
from model.quantization.rounding import FP8
from model.quantization.settings import GroupSettings

CUDA_HEAD_DIMS = (16, 32, 64, 128, 256)
"""Powers of two: a tile of keys is as wide as a head."""

FP8_CAPABILITY = (8, 9)
"""The first GPUs that convert e4m3 in hardware (Ada, Hopper)."""


def weight_format(quantization: str | None) -> WeightFormat:
    """Raises ValueError for a name that there is not."""
    if quantization is None:
        return WeightFormat.BF16
    if quantization not in (WeightFormat.INT8.value, WeightFormat.FP8.value):
        raise ValueError(f"quantization {quantization!r} is neither int8 nor fp8")
    return WeightFormat(quantization)


def check_format(wanted: WeightFormat, device: torch.device, *, is_packed: bool, has_cuda_runner: bool) -> None:
    """Raises FormatUnavailable saying what to do instead. is_packed: the checkpoint is GPTQ's or AWQ's."""
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
    if device.type != "cuda":
        raise FormatUnavailable("fp8 weights need a GPU; on a CPU, --quantization int8 halves the bytes")
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise FormatUnavailable("fp8 weights need a GPU of compute capability 8.9 or more; try --quantization int8")


def check_head_dim(head_dim: int, *, has_cuda_runner: bool) -> None:
    """Raises ConfigError for heads that the CUDA kernels have no tiles for."""
    if has_cuda_runner and head_dim not in CUDA_HEAD_DIMS:
        sizes = ", ".join(map(str, CUDA_HEAD_DIMS))
        raise ConfigError(
            "head_dim",
            f"{head_dim} is none of the sizes that the CUDA kernels take ({sizes}); "
            "--attention-backend sdpa serves it on a GPU without them, slower",
        )


def cache_dtype(kv_cache_dtype: str | None) -> torch.dtype | None:
    """None for the model's own. Raises ValueError for a name that there is not."""
    if kv_cache_dtype is None:
        return None
    if kv_cache_dtype != "fp8":
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is not fp8")
    return FP8


def rounding_of_cache(kv_cache_dtype: str | None) -> bytes:
    """What enters the fingerprint for it."""
    return b"" if kv_cache_dtype is None else f"kv {kv_cache_dtype}".encode()


def check_cache_dtype(kv_cache_dtype: str | None, device: torch.device, *, is_deterministic: bool) -> None:
    """Raises FormatUnavailable, ValueError."""
    if cache_dtype(kv_cache_dtype) is None:
        return
    if is_deterministic:
        raise FormatUnavailable("deterministic mode keeps keys and values in the model's dtype: no --kv-cache-dtype")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise FormatUnavailable("an fp8 KV cache needs a GPU of compute capability 8.9 or more")


def rounding_of(quantization: str | None, device: torch.device) -> bytes:
    """What enters the model's fingerprint: workers that round differently are not the same model. A GPU folds norms
    into matrices before it rounds them, so its integers are others than a CPU's."""
    if quantization is None:
        return b""
    return quantization.encode() if device.type == "cpu" else f"{quantization} folded".encode()


def spoken(quantization: str | None, kv_cache_dtype: str | None, packed: GroupSettings | None) -> str:
    """For people: ", int4 weights, fp8 cache"; empty where nothing has fewer bits."""
    weights = f"int{packed.bits} weights ({packed.packing.value})" if packed else None
    weights = f"{quantization} weights" if quantization else weights
    cache = f"{kv_cache_dtype} cache" if kv_cache_dtype else None
    return "".join(f", {part}" for part in (weights, cache) if part)


def with_rounding(fingerprint: bytes, *roundings: bytes) -> bytes:
    """The fingerprint of a model that is also rounded so; as it is without any."""
    said = b"\0".join(roundings).strip(b"\0")
    return hashlib.blake2b(fingerprint + said, digest_size=32).digest() if said else fingerprint
