"""Figures by name, each told as it comes, beside the floor where there is one.

Must not know: engines, workloads.
"""

Figures = dict[str, float]


class Report:
    """found: everything noted so far."""

    def __init__(self) -> None:
        self.found: dict[str, Figures] = {}

    def note(self, name: str, value: float | Figures, *, floor_ms: float | None = None) -> None:
        """Keep and print it. value: milliseconds, or figures with `seconds` among them where there is a floor."""
        figures = dict(value) if isinstance(value, dict) else {"ms": value}
        if floor_ms is not None:
            ms = figures["ms"] if "ms" in figures else 1e3 * figures["seconds"]
            figures |= {"floor_ms": floor_ms, "percent_of_floor": 100 * floor_ms / ms}
        self.found[name] = figures
        cells = [f"{name} {value:.{3 if value < 100 else 0}f}" for name, value in figures.items()]
        print(f"  {name:24s}", "  ".join(cells), flush=True)
