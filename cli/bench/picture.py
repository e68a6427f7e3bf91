"""A picture of runs, as SVG: of one how its latencies are spread, of several how they change with the load. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from octavo.cli.bench.report import LATENCIES, Figures

WIDTH, HEIGHT = 960, 640
_LEFT, _TOP, _PANEL_WIDTH, _PANEL_HEIGHT, _GAP_X, _GAP_Y = 70, 70, 380, 210, 90, 80
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#334155}.t{font-size:18px;font-weight:600}.p{font-weight:600}"
    ".a{stroke:#94a3b8}.g{stroke:#e2e8f0}.l{fill:none;stroke-width:2}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram: named lines over the same positions. labels: of positions, at most a dozen."""

    title: str
    labels: Sequence[str]
    lines: Sequence[tuple[str, Sequence[float]]]


def picture(title: str, runs: Sequence[Figures], latencies_ms: dict[str, list[float]]) -> str:
    """The whole SVG file. latencies_ms: every value, if there is a single run."""
    panels = _spread(latencies_ms) if len(runs) == 1 else _sweep(runs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_LEFT}" y="34" class="t">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        x = _LEFT + index % 2 * (_PANEL_WIDTH + _GAP_X)
        y = _TOP + index // 2 * (_PANEL_HEIGHT + _GAP_Y)
        parts.append(f'<g transform="translate({x},{y})">{_draw(panel)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _spread(latencies_ms: dict[str, list[float]]) -> list[Panel]:
    """Quantiles from 0 to 100 %."""
    labels = [f"{percent} %" if percent % 20 == 0 else "" for percent in range(101)]
    return [
        Panel(title=f"{title}, ms, by percentile", labels=labels, lines=[(short, _quantiles(latencies_ms[name]))])
        for name, short, title in LATENCIES
    ]


def _quantiles(values: Sequence[float]) -> list[float]:
    ranked = sorted(values) or [0.0]
    return [ranked[min(len(ranked) - 1, percent * len(ranked) // 100)] for percent in range(101)]


def _sweep(runs: Sequence[Figures]) -> list[Panel]:
    """Throughput and latencies against what was varied between the runs."""
    names = {"request_rate": "requests/s asked for", "max_concurrency": "requests at once"}
    changed = [name for name in names if len({str(run[name]) for run in runs}) > 1] or ["max_concurrency"]
    what = " × ".join(names[name] for name in changed)
    labels = [" × ".join("all" if run[name] is None else _number(run[name]) for name in changed) for run in runs]
    throughput = Panel(
        title=f"Output tokens/s by {what}", labels=labels, lines=[("tokens/s", _values(runs, "output_throughput"))]
    )
    return [throughput] + [
        Panel(
            title=f"{title}, ms, by {what}",
            labels=labels,
            lines=[(kind, _values(runs, f"{kind}_{name}_ms")) for kind in ("median", "p99")],
        )
        for name, _, title in (LATENCIES[0], LATENCIES[1], LATENCIES[3])
    ]


def _values(runs: Sequence[Figures], name: str) -> list[float]:
    return [value if isinstance(value := run[name], float) else 0.0 for run in runs]


def _draw(panel: Panel) -> str:
    top = _round_up(max((value for _, values in panel.lines for value in values), default=0.0))
    step_x = _PANEL_WIDTH / max(1, len(panel.labels) - 1)
    parts = [f'<text x="0" y="-12" class="p">{escape(panel.title)}</text>']
    for tick in range(5):
        y = _PANEL_HEIGHT * (1 - tick / 4)
        parts.append(f'<line class="g" x1="0" x2="{_PANEL_WIDTH}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text x="-8" y="{y + 4:g}" text-anchor="end">{_number(top * tick / 4)}</text>')
    for index, label in enumerate(panel.labels):
        if label:
            x = step_x * index
            parts.append(f'<text x="{x:.1f}" y="{_PANEL_HEIGHT + 18}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<line class="a" x1="0" x2="{_PANEL_WIDTH}" y1="{_PANEL_HEIGHT}" y2="{_PANEL_HEIGHT}"/>')
    for index, (name, values) in enumerate(panel.lines):
        colour = _COLOURS[index % len(_COLOURS)]
        points = [(step_x * at, _PANEL_HEIGHT * (1 - value / top)) for at, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="l" stroke="{colour}" points="{path}"/>')
        if len(points) <= 20:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        if len(panel.lines) > 1:
            x = _PANEL_WIDTH - 70 * (len(panel.lines) - index) + 20
            parts.append(f'<text x="{x}" y="6" style="fill:{colour}">{escape(name)}</text>')
    return "".join(parts)


def _round_up(value: float) -> float:
    """The next larger value among 1, 2, 2.5 and 5 times a power of ten."""
    size = 1.0
    while size < value:
        size *= 10
    while size / 10 >= value > 0:
        size /= 10
    return next(size * part for part in (0.1, 0.2, 0.25, 0.5, 1.0) if size * part >= value)


def _number(value: object) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, int | float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, int | float) else str(value))
    )
