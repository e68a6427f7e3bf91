"""What `octavo doctor` says of this CPU: which instructions are used, and what multiplies matrices by them."""

import os

from octavo.cli.settings.groups import ServeSettings
from octavo.cli.settings.setting import variable_of
from octavo.cli.tools.doctor_checks import Finding, Verdict

NAME = "instructions"


def check_cpu(settings: ServeSettings) -> list[Finding]:
    """Before torch is imported, from which the settings may hide instructions."""
    if settings.cpu_isa != "auto":
        os.environ[variable_of("cpu_isa")] = settings.cpu_isa
    try:
        from octavo.model.cpu.isa import cpu_isa, machine_isa
        from octavo.model.cpu.native import kernels_arithmetic, why_missing

        used, there = cpu_isa(), machine_isa()
    except ImportError as error:
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=str(error), advice="install torch first")]
    except ValueError as error:
        os.environ.pop(variable_of("cpu_isa"), None)  # the other checks look at the whole machine
        numbers, change = getattr(error, "numbers", str(error)), getattr(error, "change", "")
        return [Finding(name=NAME, verdict=Verdict.BAD, detail=numbers, advice=change)]
    hidden = f" ({there.word} is hidden by --cpu-isa)" if used < there else ""
    if kernels := kernels_arithmetic():
        return [Finding(name=NAME, verdict=Verdict.GOOD, detail=f"{used.word}{hidden}; own kernels: {kernels}")]
    detail = f"{used.word}{hidden}; torch alone is slower: {why_missing() or 'OCTAVO_NATIVE is off'}"
    advice = "install a C compiler; OCTAVO_NATIVE must not be off"
    return [Finding(name=NAME, verdict=Verdict.WARNING, detail=detail, advice=advice)]
