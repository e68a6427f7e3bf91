"""Checks that launchers make before a kernel touches memory.

Must not know: any particular kernel.
"""

from functools import cache

import torch


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device has Hopper's instructions, which later devices lack."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def check_tensor(name: str, tensor: torch.Tensor, *, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
    """Raises ValueError naming the tensor if its dtype or shape (None: any length) is wrong or it is not contiguous."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == actual for wanted, actual in zip(shape, tensor.shape, strict=False)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def check_pools(
    k_pool_PKSH: torch.Tensor, v_pool_PKSH: torch.Tensor, *, shape: tuple[int | None, ...], dtype: torch.dtype
) -> None:
    """`check_tensor` for both: this dtype, or e4m3 for both, which kernels convert as they read and write."""
    held = k_pool_PKSH.dtype if k_pool_PKSH.dtype == torch.float8_e4m3fn else dtype
    check_tensor("k_pool_PKSH", k_pool_PKSH, shape=shape, dtype=held)
    check_tensor("v_pool_PKSH", v_pool_PKSH, shape=tuple(k_pool_PKSH.shape), dtype=held)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below the number; at least 1."""
    return 1 << max(0, number - 1).bit_length()
