"""Figures after they have been measured: percentiles, and a file of all.

Must not know: what is measured.
"""

import json
from collections.abc import Sequence
from pathlib import Path


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile by nearest rank. Raises IndexError if there are no values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def write_json(path: Path | None, content: object) -> None:
    """Write the figures to a file, making its folder if needed; None: write nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
