"""Draws the dashboard: `python -m tests.support.services.dashboard_picture docs/pictures/dashboard.png`.

The picture is not made by Grafana but from the dashboard's JSON, with the answers of a real Prometheus that scrapes a
service with the embedded model under load. Positions, titles, units, legends and expressions are the dashboard's own.
"""

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tests.support.services.dashboard_load import Watched, watched
from tests.support.services.prometheus import HOW_TO_GET, SCRAPE_S, Line, concrete, is_installed
from tests.support.services.service import REPOSITORY

SECONDS = 45.0
RATE_INTERVAL = "4s"
COLUMNS, COLUMN_IN, LINE_IN = 24, 0.6, 0.26  # of Grafana's grid
GAP_IN, TITLE_IN, SIDE_IN, FOOT_IN = 0.06, 0.3, 0.62, 0.25
LEGEND_LINE_IN, LETTER_IN, MAX_LEGEND_LINES = 0.15, 0.064, 3
PAGE, PANEL, EDGE, INK, PALE = "#111217", "#181b1f", "#2c3235", "#d8d9da", "#8e8e8e"
COLOURS = (
    "#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#f2495c", "#b877d9", "#37872d", "#fade2a", "#8ab8ff", "#ffb357",
    "#ff9830", "#c4162a",
)  # fmt: skip
DPI = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A panel of the dashboard, with its lines and their legends."""

    panel: Mapping[str, Any]
    lines: Sequence[tuple[str, Line]]
    empty: Sequence[str]
    """Expressions that gave no series."""

    @property
    def title(self) -> str:
        """The title in the dashboard."""
        return str(self.panel["title"])

    @property
    def moves(self) -> bool:
        """Whether the panel shows anything but 0."""
        return any(value and math.isfinite(value) for _, line in self.lines for _, value in line.points)


def dashboard() -> Mapping[str, Any]:
    """The content of the file that Grafana reads."""
    found: Mapping[str, Any] = json.loads((REPOSITORY / "deploy/grafana/dashboards/octavo.json").read_text())
    return found


def evaluated(service: Watched) -> list[Drawn]:
    """Every panel of the dashboard during the load; rows have no lines."""
    return [_evaluated(panel, service) for panel in dashboard()["panels"]]


def _evaluated(panel: Mapping[str, Any], service: Watched) -> Drawn:
    lines: list[tuple[str, Line]] = []
    empty = []
    for target in panel.get("targets", ()):
        expression = concrete(target["expr"], rate_interval=RATE_INTERVAL)
        found = service.prometheus.over(expression, service.start_s, service.end_s)
        lines += [(legend(target["legendFormat"], line.labels), line) for line in found]
        if not any(math.isfinite(value) for line in found for _, value in line.points):
            empty.append(target["expr"])
    return Drawn(panel=panel, lines=lines, empty=empty)


def legend(template: str, labels: Mapping[str, str]) -> str:
    """A legend as Grafana writes it: `{{name}}` becomes the label's value."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), template).strip()


def tick(unit: str) -> Callable[[float, object], str]:
    """A function that formats a value of that unit as Grafana does."""

    def text(value: float, _: object = None) -> str:
        if unit == "s":
            for factor, name in ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")):
                if abs(value) < 1000 * factor or factor == 1.0:
                    return "0 s" if value == 0 else f"{value / factor:.3g} {name}"
        if unit == "percentunit":
            return f"{100 * value:.3g}%"
        if unit in ("bytes", "Bps"):
            return _scaled(value, 1024 if unit == "bytes" else 1000, _SIZES[unit])
        return _scaled(value, 1000, ("", " K", " Mil")) + (" req/s" if unit == "reqps" else "")

    return text


_SIZES = {"bytes": (" B", " KiB", " MiB", " GiB"), "Bps": (" B/s", " kB/s", " MB/s", " GB/s")}


def _scaled(value: float, base: int, names: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g}{names[power]}"


def picture(drawn: Sequence[Drawn], start_s: float, end_s: float) -> Figure:
    """The dashboard as one figure."""
    places = [each.panel["gridPos"] for each in drawn]
    width = COLUMNS * COLUMN_IN + GAP_IN
    height = max(place["y"] + place["h"] for place in places) * LINE_IN + GAP_IN
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAGE)
    for each, place in zip(drawn, places, strict=True):
        left, top = place["x"] * COLUMN_IN + GAP_IN, height - place["y"] * LINE_IN - GAP_IN
        across, down = place["w"] * COLUMN_IN - GAP_IN, place["h"] * LINE_IN - GAP_IN
        if each.panel["type"] == "row":
            figure.text(left / width, (top - down) / height, f"⌄ {each.title}", color=INK, fontsize=11, va="bottom")
            continue
        box = (left / width, (top - down) / height, across / width, down / height)
        figure.add_axes(box, facecolor=PANEL, xticks=[], yticks=[]).spines[:].set_color(EDGE)
        rows = _legend_rows([name for name, _ in each.lines], across - 2 * GAP_IN)
        foot = FOOT_IN + LEGEND_LINE_IN * len(rows) + GAP_IN
        inner = (left + SIDE_IN, top - down + foot, across - SIDE_IN - 2 * GAP_IN, down - foot - TITLE_IN)
        axes = figure.add_axes(
            (inner[0] / width, inner[1] / height, inner[2] / width, inner[3] / height), label=each.title
        )
        axes.set_title(each.title, color=INK, fontsize=8.5, loc="left", x=(2 * GAP_IN - SIDE_IN) / inner[2], pad=6)
        _plot(axes, each, start_s, end_s)
        for number, row in enumerate(rows):
            x = left + 2 * GAP_IN
            y = top - down + GAP_IN + LEGEND_LINE_IN * (len(rows) - number - 0.5)
            for index, name in row:
                colour = COLOURS[index % len(COLOURS)]
                figure.text(x / width, y / height, "▬", color=colour, fontsize=6.5, va="center")
                figure.text((x + 0.12) / width, y / height, name, color=INK, fontsize=6.5, va="center")
                x += _legend_width(name)
    return figure


def _legend_width(name: str) -> float:
    return 0.25 + LETTER_IN * len(name)


def _legend_rows(names: Sequence[str], width: float) -> list[list[tuple[int, str]]]:
    """Legend entries that fit side by side, in rows. Grafana scrolls the rest, a picture leaves it out."""
    rows: list[list[tuple[int, str]]] = [[]]
    used = 0.0
    for index, name in enumerate(names):
        if rows[-1] and used + _legend_width(name) > width:
            if len(rows) == MAX_LEGEND_LINES:
                rows[-1].append((index, "…"))
                break
            rows.append([])
            used = 0.0
        rows[-1].append((index, name))
        used += _legend_width(name)
    return rows


def _plot(axes: Any, drawn: Drawn, start_s: float, end_s: float) -> None:
    axes.set_facecolor(PANEL)
    axes.spines[:].set_visible(False)
    axes.grid(color=EDGE, linewidth=0.6)
    axes.tick_params(colors=PALE, labelsize=6.5, length=0)
    for (name, line), colour in zip(drawn.lines, cycle(COLOURS), strict=False):
        at, values = _with_gaps(line.points)
        axes.plot([each - start_s for each in at], values, color=colour, linewidth=1.1, label=name)
    if not drawn.lines:
        axes.text(0.5, 0.5, "No data", color=PALE, ha="center", va="center", transform=axes.transAxes)
    axes.set_xlim(0, end_s - start_s)
    top = max((value for _, line in drawn.lines for _, value in line.points if math.isfinite(value)), default=0.0)
    axes.set_ylim(0, 1.08 * top or 1.0)
    unit = drawn.panel["fieldConfig"]["defaults"]["unit"]
    if unit == "bytes":
        step = 2.0 ** math.ceil(math.log2(max(top, 4.0) / 4))
        axes.set_yticks([number * step for number in range(int(top / step) + 1)])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 2.5, 5, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(tick(unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, prune="both"))
    clock = FuncFormatter(lambda value, _: f"{datetime.fromtimestamp(start_s + value):%H:%M:%S}")
    axes.xaxis.set_major_formatter(clock)


def _with_gaps(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The points with gaps where there are no values, as in Grafana."""
    at: list[float] = []
    values: list[float] = []
    for time_s, value in points:
        if at and time_s - at[-1] > 1.5 * SCRAPE_S:
            at.append(time_s - SCRAPE_S)
            values.append(math.nan)
        at.append(time_s)
        values.append(value)
    return at, values


def titles(drawn: Sequence[Mapping[str, Any]]) -> str:
    """The picture's description of itself: the titles of its panels."""
    return "; ".join(panel["title"] for panel in drawn)


def main(path: Path) -> None:
    """Run the load, query Prometheus, draw the picture."""
    if not is_installed():
        sys.exit(HOW_TO_GET)
    with tempfile.TemporaryDirectory() as folder, watched(Path(folder), seconds=SECONDS) as service:
        drawn = evaluated(service)
        page = picture(drawn, service.start_s, service.end_s)
    page.savefig(path, metadata={"Description": titles([each.panel for each in drawn])})
    for each in drawn:
        for expression in each.empty:
            sys.stderr.write(f"no data: {each.title}: {expression}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
