"""Figures that fault tests measure: shown always, kept where `OCTAVO_FIGURES` names a file of JSON.

One entry a row of the matrix: its figures, with date, commit and machine of the run that gave them. An empty commit is
one that the history no longer has: a rebase takes it away.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]


def record(row: str, **figures: Any) -> None:
    """Show a row's figures and keep them. row: of the matrix, or the name of a long proof."""
    show(f"row {row}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    path = os.environ.get("OCTAVO_FIGURES")
    if not path:
        return
    file = Path(path)
    rows = json.loads(file.read_text()) if file.exists() else {}
    rows[row] = {"figures": figures, **_where()}
    ordered = dict(sorted(rows.items(), key=lambda pair: (len(pair[0]), pair[0])))
    file.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def show(line: str) -> None:
    """Print a line; `pytest -s` shows it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _where() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
