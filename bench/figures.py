"""What becomes of figures once they are measured: a percentile of many, a file of all.

Must not know: what is measured.
"""

import json
from collections.abc import Sequence
from pathlib import Path


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank. Raises IndexError where there are no values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def write_json(path: Path | None, content: object) -> None:
    """The figures as a file, its folder made where it is missing; nothing where no file was asked for."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
