"""What `octavo doctor` says of deterministic mode: whether the settings ask for it, and whether this machine has it."""

from cli.doctor_checks import Finding, Verdict
from cli.settings import ServeSettings

NAME = "deterministic"


def check_deterministic(settings: ServeSettings) -> list[Finding]:
    """Nothing where the mode is not asked for."""
    if not settings.deterministic:
        return []
    try:
        import torch

        from model.invariant import arithmetic
    except ImportError as error:
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=str(error), advice="install torch first")]
    wants_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if wants_gpu else "cpu")
    try:
        how = arithmetic(device)
    except (ImportError, RuntimeError, AssertionError) as error:
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=f"on, but {error}", advice="pip install triton")]
    if how.strip() == "cpu":
        detail, advice = (
            "on, but the kernels for a CPU are not there",
            "install a C compiler; OCTAVO_NATIVE must not be off",
        )
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=detail, advice=advice)]
    return [Finding(name=NAME, verdict=Verdict.GOOD, detail=f"on: the same bits in any batch ({how})")]
