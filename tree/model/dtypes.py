"""What a model can be computed in, by the names that configs and flags use."""

import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """By name or as torch has it; None stays None. Raises ValueError for a name that is not in DTYPES."""
    if not isinstance(dtype, str):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
