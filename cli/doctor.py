"""`octavo doctor`: is this machine ready to serve?"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cli import doctor_checks as checks
from cli.doctor_checks import Finding, Verdict
from cli.doctor_cpu import check_cpu
from cli.doctor_deterministic import check_deterministic
from cli.doctor_model import check_models
from cli.settings import ServeSettings

_MARKS = {Verdict.GOOD: "[green]✓[/]", Verdict.WARNING: "[yellow]![/]", Verdict.BAD: "[bold red]✗[/]"}


def examine(settings: ServeSettings) -> list[Finding]:
    """Every finding, in the order shown."""
    return [
        checks.check_python(),
        *check_cpu(settings),
        *checks.check_packages(),
        *checks.check_torch(),
        *check_deterministic(settings),
        *check_models(settings),
        checks.check_memory(),
        checks.check_shared_memory(),
        checks.check_run_folder(settings),
        *checks.check_ports(settings),
        checks.check_file_limit(),
        *checks.check_variables(),
    ]


def doctor(settings: ServeSettings) -> int:
    """Print the findings; the exit code is 1 where one is bad."""
    findings = examine(settings)
    Console().print(findings_table(findings))
    return 1 if any(each.verdict is Verdict.BAD for each in findings) else 0


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row each, with advice below what needs some."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for each in findings:
        advice = f"\n[green]→ {each.advice}[/]" if each.advice else ""
        table.add_row(_MARKS[each.verdict], each.name, each.detail + advice)
    return table
