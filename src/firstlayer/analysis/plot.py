"""Draw measurements with matplotlib. Nothing else in the package draws.

Each function takes a result and returns a matplotlib figure; :func:`render` returns it as
the bytes of a file. Figures are made without pyplot, so there is no window and no global
state. Colours are Okabe and Ito's, which are distinct for readers with any colour vision,
and no two lines differ only in colour.
"""

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .._check import one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .lookup import Lookups, Reading
    from .memory import Footprint
    from .position_study import Study, Trained

FORMATS = ("png", "svg", "pdf")
#: Okabe and Ito's without yellow, which is too light for lines, plus grey, wine red and
#: indigo.
COLOURS = {
    "none": "#7F7F7F",
    "learned": "#CC79A7",
    "sinusoidal": "#D55E00",
    "rotary": "#0072B2",
    "randomised": "#56B4E9",
    "alibi": "#009E73",
    "t5": "#E69F00",
    "kerple": "#000000",
    "fire": "#882255",
    "xpos": "#332288",
}
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES: dict[str | None, Any] = {
    None: "-",
    "linear": (0, (1, 1.5)),
    "ntk": (0, (5, 2)),
    "yarn": (0, (6, 1.5, 1, 1.5)),
    "resized": (0, (3, 2)),
}
SIZES = ("batch", "rows", "width")
PARTS = ("parameters", "gradient", "state", "activations")
HATCHES = ("", "///", "...", "xxx")
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    # Inches around each panel, so that labels of neighbouring panels do not touch.
    "figure.constrained_layout.w_pad": 0.08,
    "grid.alpha": 0.3,
    "hatch.linewidth": 0.6,
    "legend.handlelength": 3.5,
    "svg.hashsalt": "firstlayer",
}

Drawing = TypeVar("Drawing", bound=Callable[..., Any])


def _styled(draw: Drawing) -> Drawing:
    """Make a function draw in this file's style without changing matplotlib's settings."""

    @functools.wraps(draw)
    def styled(*args: Any, **options: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(*args, **options)

    return styled  # pyright: ignore[reportReturnType]


@_styled
def render(figure: "Figure", format: str = "png") -> bytes:
    """Return a figure as the bytes of a file.

    Args:
        figure: A figure from one of the functions here.
        format: ``"png"``, ``"svg"`` or ``"pdf"``.

    Example:
        >>> from firstlayer.analysis import lookup
        >>> found = lookup.measure([9], batches=[1], widths=[4], length=2, rounds=1)
        >>> render(lookups(found))[:4]
        b'\\x89PNG'
    """
    one_of("format", format, FORMATS)
    # With a date, two files of the same figure would differ.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
    out = io.BytesIO()
    figure.savefig(out, format=format, dpi=150, metadata=metadata)
    return out.getvalue()


@_styled
def positions(study: "Study") -> "Figure":
    """Return the loss of every scheme by length, and the effect of distance below."""
    # Schemes that differ only in training, such as randomised and rotary, share a profile.
    by_profile = {trained.profile: trained for trained in reversed(study.trained)}
    shown = [by_profile[key] for key in reversed(by_profile) if key is not None]
    down = math.ceil(len(shown) / 4)
    across = math.ceil(len(shown) / max(down, 1))
    figure = _figure(10.0, 5.0 + 2.4 * down)
    heights = [5.0, max(2.4 * down, 0.01)]
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    axes = above.subplots()
    _losses(axes, study)
    above.legend(loc="outside right center", frameon=False)
    for index, trained in enumerate(shown):
        axes = below.add_subplot(down, across, index + 1)
        _profile(axes, trained, trained_length=study.setting.length)
    return figure


@_styled
def lookups(
    found: "Lookups", *, palette: Sequence[str] = PALETTE, limit: str = "0.3"
) -> "Figure":
    """Return the time of a lookup by ids, rows and width, with a panel for each.

    A size that does not vary has no panel. The dotted line is the time in which a copy
    moves as many bytes.

    Args:
        found: Times of lookups.
        palette: Colours of the libraries.
        limit: Colour of the dotted line.
    """
    sweeps = {size: _sweep(found.readings, size) for size in SIZES}
    varied = {
        size: readings
        for size, readings in sweeps.items()
        if len({getattr(reading, size) for reading in readings}) > 1
    }
    shown = varied or {"batch": sweeps["batch"]}
    figure = _figure(max(4.5, 3.6 * len(shown)), 4.4)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (size, readings) in zip(panels, shown.items(), strict=True):
        _times(axes, readings, size=size, palette=palette)
        _limit(axes, readings, size=size, bandwidth=found.bandwidth, colour=limit)
    panels[0].set_ylabel("time of a lookup")
    _legend_below(figure, panels[0])
    return figure


@_styled
def memory(footprints: Sequence["Footprint"]) -> "Figure":
    """Return the memory by optimizer, with a panel per table, each with its own scale."""
    tables: dict[Any, list[Footprint]] = {}
    for each in footprints:
        table = (each.name, each.rows, each.width, each.dtype)
        tables.setdefault(table, []).append(each)
    most = max(map(len, tables.values()))
    across = min(2, len(tables))
    down = math.ceil(len(tables) / across)
    figure = _figure(5.5 * across, down * (1.3 + 0.35 * most) + 0.5)
    panels = figure.subplots(down, across, squeeze=False).flat
    for axes, own in zip(panels, tables.values(), strict=False):
        _bars(axes, own)
    for axes in figure.axes[len(tables) :]:
        axes.set_visible(False)
    _legend_below(figure, figure.axes[0])
    return figure


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _legend_below(figure: "Figure", axes: "Axes") -> None:
    """Draw the legend of the panels below them, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    # An entry has a line of 3.5 letters, gaps and its text, of about 0.085 inches a letter.
    widest = 0.085 * (max(map(len, labels)) + 8)
    columns = max(1, min(len(labels), int(figure.get_figwidth() / widest)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _losses(axes: "Axes", study: "Study") -> None:
    setting = study.setting
    # The legend lists curves in the order of their right ends, from the top.
    ordered = sorted(study.curves, key=lambda curve: -(curve.losses[-1] or math.inf))
    for curve in ordered:
        points = zip(curve.lengths, curve.losses, strict=True)
        points = [(length, loss) for length, loss in points if loss is not None]
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[curve.scheme],
            linestyle=DASHES[curve.rule],
            marker=MARKERS[list(COLOURS).index(curve.scheme)],
            markersize=5,
            label=curve.name + (" (no rows beyond)" if None in curve.losses else ""),
        )
    axes.axvline(setting.length, color="0.6", linewidth=6, alpha=0.3, zorder=0)
    axes.set_xscale("log", base=2)
    labels = [
        f"{n}\n{s:g}×" for n, s in zip(setting.lengths, setting.stretches, strict=True)
    ]
    axes.set_xticks(setting.lengths, labels)
    axes.minorticks_off()
    axes.set_xlabel(f"context length in bytes (training length {setting.length})")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Loss beyond the training length", loc="left")


def _profile(axes: "Axes", trained: "Trained", *, trained_length: int) -> None:
    profile = trained.profile
    if profile is None:
        return
    shades = [1.0 - 0.7 * head / max(1, len(profile.values)) for head in range(99)]
    for values, alpha in zip(profile.values, shades, strict=False):
        colour = COLOURS[trained.scheme]
        axes.plot(profile.distances, values, color=colour, alpha=alpha, linewidth=1.2)
    axes.axvline(trained_length, color="0.6", linewidth=4, alpha=0.3, zorder=0)
    axes.set_title(trained.scheme, loc="left")
    axes.set_ylabel("cosine" if profile.what == "cosine" else "bias per head")
    axes.set_xlabel("distance")


def _sweep(readings: Sequence["Reading"], size: str) -> list["Reading"]:
    """Return the readings in which only ``size`` varies: the most that agree otherwise."""
    groups: dict[Any, list[Reading]] = {}
    for reading in readings:
        others = tuple(getattr(reading, other) for other in SIZES if other != size)
        groups.setdefault(others, []).append(reading)
    return max(groups.values(), key=len)


def _times(
    axes: "Axes", readings: Sequence["Reading"], *, size: str, palette: Sequence[str]
) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator

    libraries = dict.fromkeys(reading.library for reading in readings)
    for index, library in enumerate(libraries):
        own = [reading for reading in readings if reading.library == library]
        points = sorted((_value(reading, size), reading.seconds) for reading in own)
        axes.plot(
            *zip(*points, strict=True),
            color=palette[index % len(palette)],
            marker=MARKERS[index],
            label=library,
            # The first library is this one: its line is above the others.
            zorder=3 - 0.1 * index,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator())
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    values = sorted({_value(reading, size) for reading in readings})
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel("ids" if size == "batch" else size)
    first = readings[0]
    fixed = {
        "rows": f"{first.rows:,} rows",
        "width": f"width {first.width:,}",
        "batch": f"{first.batch * first.length:,} ids",
    }
    del fixed[size]
    axes.set_title(", ".join(fixed.values()), loc="left")


def _limit(
    axes: "Axes",
    readings: Sequence["Reading"],
    *,
    size: str,
    bandwidth: float,
    colour: str,
) -> None:
    """Draw the time in which a copy moves as many bytes as a lookup."""
    limits = {_value(each, size): each.moved_bytes / bandwidth for each in readings}
    points = zip(*sorted(limits.items()), strict=True)
    axes.plot(*points, color=colour, linestyle=":", label="memory bandwidth")


def _value(reading: "Reading", size: str) -> int:
    """Return a size of a reading, in ids instead of sequences."""
    return reading.batch * reading.length if size == "batch" else getattr(reading, size)


def _bars(axes: "Axes", footprints: Sequence["Footprint"]) -> None:
    unit, size = _unit(max(f.best.total for f in footprints))
    names = [f.optimizer for f in footprints]
    ends = [0.0] * len(names)
    for part, colour, hatch in zip(PARTS, PALETTE, HATCHES, strict=True):
        widths = [getattr(f.best, part) / size for f in footprints]
        axes.barh(
            names,
            widths,
            left=ends,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
            label=part,
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    first = footprints[0]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    title = f"{first.name} {first.rows:,} × {first.width:,}, {first.dtype}"
    axes.set_title(title.strip(), loc="left")


def _unit(largest: int) -> tuple[str, float]:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest >= size:
            return unit, size
    return "bytes", 1.0
