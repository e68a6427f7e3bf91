"""`octavo doctor`: checks whether this machine is ready to serve, also in deterministic mode."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools import doctor_checks as checks
from octavo.cli.tools.doctor_checks import Finding, Verdict, check_cpu
from octavo.cli.tools.doctor_model import check_models
from octavo.cli.tools.doctor_ranks import check_ranks

_MARKS = {Verdict.GOOD: "[green]✓[/]", Verdict.WARNING: "[yellow]![/]", Verdict.BAD: "[bold red]✗[/]"}
NAME = "deterministic"


def check_deterministic(settings: ServeSettings) -> list[Finding]:
    """Empty unless the mode is asked for."""
    if not settings.deterministic:
        return []
    try:
        import torch

        from octavo.model.invariant import arithmetic
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


def examine(settings: ServeSettings) -> list[Finding]:
    """Every finding, in the order shown."""
    return [
        checks.check_python(),
        *check_cpu(settings),
        *checks.check_packages(),
        *checks.check_torch(),
        *check_deterministic(settings),
        *check_ranks(settings),
        *check_models(settings),
        checks.check_memory(),
        checks.check_shared_memory(),
        checks.check_run_folder(settings),
        *checks.check_ports(settings),
        *checks.check_certificates(settings),
        checks.check_file_limit(),
        *checks.check_variables(),
    ]


def doctor(settings: ServeSettings) -> int:
    """Print the findings. Returns 1 if one of them is bad."""
    findings = examine(settings)
    Console().print(findings_table(findings))
    return 1 if any(each.verdict is Verdict.BAD for each in findings) else 0


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row each, followed by advice where it helps."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for each in findings:
        advice = f"\n[green]→ {escape(each.advice)}[/]" if each.advice else ""
        table.add_row(_MARKS[each.verdict], escape(each.name), escape(each.detail) + advice)
    return table
