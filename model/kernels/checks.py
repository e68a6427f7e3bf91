"""What launchers check before a kernel touches memory.

Must not know: any particular kernel.
"""

import torch


def check_tensor(name: str, tensor: torch.Tensor, *, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
    """Raises ValueError naming the tensor where its dtype, shape (None: any length) or contiguity is not as needed."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == actual for wanted, actual in zip(shape, tensor.shape, strict=False)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below the number (at least 1)."""
    return 1 << max(0, number - 1).bit_length()
