"""Line charts as SVG for HTML pages: in the colors of the page, with values on hover."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

#: Margins around the plot: left, right, top and bottom.
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 44


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Args:
        name: Name, shown with each value.
        style: CSS class of the line, which has its color.
        points: Pairs of x and y.
        spreads: Half the length of the error bar of each point; empty for none.
        dash: Dashes of the line, as in ``stroke-dasharray``.
        marked: Whether each point has a mark that shows its value.
    """

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    spreads: Sequence[float | None] = ()
    dash: str = ""
    marked: bool = True


def line_chart(
    series: Sequence[Series],
    *,
    size: tuple[int, int],
    label: str,
    x_ticks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    mark_x: float | None = None,
) -> str:
    """Return a chart as an SVG element.

    Args:
        series: The lines.
        size: Width and height in CSS pixels; the page may scale them.
        label: Description for readers who cannot see it.
        x_ticks: Values and texts of the ticks below; a line feed starts a second line.
        x_label: Label of the horizontal axis.
        y_label: Label of the vertical axis.
        log_x: Whether the horizontal axis is logarithmic.
        mark_x: Value at which a wide grey line stands, or None.
    """
    width, height = size
    place = math.log if log_x else float
    xs = [place(x) for each in series for x, _ in each.points]
    ys = [y for each in series for y in _ends(each)]
    low, high, step = nice_range(min(ys), max(ys))
    left, right = min(xs), max(xs)

    def across(x: float) -> float:
        share = (place(x) - left) / ((right - left) or 1)
        return round(LEFT + share * (width - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        share = (y - low) / ((high - low) or 1)
        return round(height - BOTTOM - share * (height - TOP - BOTTOM), 1)

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    ]
    for i in range(round((high - low) / step) + 1):
        y = low + i * step
        parts.append(
            f'<path class="grid" d="M{LEFT} {down(y)}H{width - RIGHT}"/>'
            f'<text class="y" x="{LEFT - 7}" y="{down(y) + 4}">{number(y, step)}</text>'
        )
    if mark_x is not None:
        parts.append(f'<path class="mark" d="M{across(mark_x)} {TOP}V{height - BOTTOM}"/>')
    for x, text in x_ticks:
        for line, part in enumerate(text.split("\n")):
            bottom = height - BOTTOM + 15 + 13 * line
            parts.append(f'<text x="{across(x)}" y="{bottom}">{escape(part)}</text>')
    parts.append(
        f'<text x="{(width + LEFT) / 2}" y="{height - 3}">{escape(x_label)}</text>'
    )
    turned = f'transform="rotate(-90 12 {height / 2 - 12})"'
    parts.append(f'<text x="12" y="{height / 2 - 12}" {turned}>{escape(y_label)}</text>')
    for each in series:
        places = " ".join(f"{across(x)},{down(y)}" for x, y in each.points)
        dash = f' stroke-dasharray="{each.dash}"' if each.dash else ""
        parts.append(f'<g class="{each.style}"><polyline points="{places}"{dash}/>')
        if each.marked:
            parts += [
                _mark(each, i, across(x), down(y), down)
                for i, (x, y) in enumerate(each.points)
            ]
        parts.append("</g>")
    return "".join(parts) + "</svg>"


def _ends(each: Series) -> list[float]:
    """Return the ends of the error bars of a line, or its points if it has none."""
    spreads = [spread or 0.0 for spread in each.spreads] or [0.0] * len(each.points)
    pairs = zip(each.points, spreads, strict=True)
    return [end for (_, y), spread in pairs for end in (y - spread, y + spread)]


def _mark(
    each: Series, index: int, x: float, y: float, down: Callable[[float], float]
) -> str:
    """Return a point with its error bar; its value appears on hover."""
    at, value = each.points[index]
    spread = each.spreads[index] if each.spreads else None
    bar, text = "", f"{each.name} at {at:g}: {value:.3f}"
    if spread is not None:
        low, high = down(value - spread), down(value + spread)
        bar, text = f'<path class="bar" d="M{x} {low}V{high}"/>', f"{text} ± {spread:.3f}"
    return f'{bar}<circle cx="{x}" cy="{y}" r="4"><title>{escape(text)}</title></circle>'


def nice_range(low: float, high: float) -> tuple[float, float, float]:
    """Return the ends and the step of an axis with about five round ticks.

    Example:
        >>> nice_range(1.93, 3.4)
        (1.5, 3.5, 0.5)
        >>> nice_range(0.0, 0.0)
        (-1.0, 1.0, 0.5)
    """
    if high - low < 1e-12:
        low, high = low - 1, high + 1
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= rough * 0.999)
    return math.floor(low / step) * step, math.ceil(high / step) * step, step


def number(value: float, step: float) -> str:
    """Return a tick's value with the digits that its step needs."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    digits += abs(step * 10**digits - round(step * 10**digits)) > 1e-6
    return f"{value + 0.0:.{digits}f}"
