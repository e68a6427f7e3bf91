"""Settings that exclude each other, judged from their values alone: checked by `octavo serve` before it starts a
process, and by a worker before it loads. Knows no torch.

device: "cpu" or "cuda"; None if it is not known yet.
"""


def why_not_deterministic(
    device: str | None,
    *,
    attention_backend: str | None,
    is_checking_numerics: bool,
    dtype: str | None,
    quantization: str | None,
) -> str | None:
    """Why deterministic mode is not available with these settings, in a sentence; None if it is."""
    if attention_backend is not None or is_checking_numerics:
        return "deterministic mode goes with no --attention-backend and no --check-numerics"
    if device == "cuda" and quantization is not None:
        return "deterministic mode on a GPU is for plain weights: no --quantization"
    if device == "cpu" and dtype == "float16":
        return "deterministic mode on a CPU is for bfloat16 and float32, not float16"
    return None


def why_no_format(device: str | None, *, quantization: str | None) -> str | None:
    """Why the device does not support such weights for any model, in a sentence; None if it does."""
    if device == "cpu" and quantization == "fp8":
        return "fp8 weights need a GPU; on a CPU, --quantization int8 halves the bytes"
    return None


def why_no_cache_format(*, kv_cache_dtype: str | None, is_deterministic: bool) -> str | None:
    """Why the KV cache cannot have this dtype, in a sentence; None if it can."""
    if kv_cache_dtype is not None and is_deterministic:
        return "deterministic mode keeps keys and values in the model's dtype: no --kv-cache-dtype"
    return None
