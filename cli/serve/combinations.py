"""Checks, before any process is started, that weights, cache, deterministic mode and device go together, as far as the
settings alone tell."""

import contextlib
from importlib.metadata import PackageNotFoundError, version

from octavo.cli.errors import usage
from octavo.cli.settings.groups import ServeSettings, WorkerSettings


def check_combinations(settings: ServeSettings | WorkerSettings) -> None:
    """Raises CliError for settings that exclude each other."""
    from octavo.worker.loading.combinations import why_no_cache_format, why_no_format, why_not_deterministic

    device = _device_type(settings.device)
    quantization = None if settings.quantization == "none" else settings.quantization
    cache = None if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    if settings.deterministic:
        why = why_not_deterministic(
            device,
            attention_backend=None if settings.attention_backend == "auto" else settings.attention_backend,
            is_checking_numerics=settings.check_numerics == "on",
            dtype=settings.dtype,
            quantization=quantization,
        )
        if why is not None:
            advice = "leave --deterministic out, or what is named here"
            raise usage("deterministic mode cannot be had so", why, advice)
    why = why_no_format(device, quantization=quantization)
    why = why or why_no_cache_format(kv_cache_dtype=cache, is_deterministic=settings.deterministic)
    if why is not None:
        advice = "change --quantization, --kv-cache-dtype or --device, or leave them out"
        raise usage("the weights cannot be had in that form", why, advice)


def _device_type(device: str) -> str | None:
    """cpu or cuda; None if `auto` may become either."""
    if device != "auto":
        return device.partition(":")[0]
    with contextlib.suppress(PackageNotFoundError):
        return "cpu" if version("torch").endswith("+cpu") else None
    return None
