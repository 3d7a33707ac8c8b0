"""Figures and the HTML report: correct values, readable text, distinct lines."""

import dataclasses
import functools
import html
import itertools
import re
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from firstlayer.analysis import plot, report
from firstlayer.analysis.lookup import BATCHES, ROWS, WIDTHS, Lookups, Reading
from firstlayer.analysis.memory import OPTIMIZERS, SCENARIOS, Bytes, Footprint
from firstlayer.analysis.position_study import (
    RULES,
    SCHEMES,
    Curve,
    Profile,
    Setting,
    Study,
    Trained,
)
from firstlayer.analysis.svg_chart import BOTTOM, TOP, Series, line_chart

SETTING = Setting()
SPREAD = 0.0123


def curve(scheme, rule, start):
    losses = [start + 0.1 * i for i in range(5)]
    if (scheme, rule) == ("learned", None):
        losses[1:] = [None] * 4
    spreads = tuple(None if loss is None else SPREAD for loss in losses)
    return Curve(scheme, rule, SETTING.lengths, tuple(losses), spreads)


def trained(index, scheme):
    curves = tuple(
        curve(scheme, rule, 2 + 0.03 * index + 0.01 * place)
        for place, rule in enumerate((None, *RULES.get(scheme, ())))
    )
    what = "cosine" if scheme in ("learned", "sinusoidal", "rotary") else "bias"
    heads = 1 if what == "cosine" else 4
    values = tuple(tuple(index - head * d / 10 for d in range(9)) for head in range(heads))
    profile = None if scheme == "none" else Profile(what, tuple(range(9)), values)
    return Trained(scheme, 100, 1.0, (5.5,), curves, profile)


STUDY = Study(SETTING, 10**6, tuple(trained(i, s) for i, s in enumerate(SCHEMES)))
LIBRARIES = ("firstlayer", "numpy", "firstlayer.torch", "torch")
LOOKUPS = Lookups(
    2,
    2e10,
    (),
    tuple(
        Reading(library, *size, 128, size[2] * size[1] * 1e-7 * (1 + place))
        for size in sorted({
            *((rows, 256, 64) for rows in ROWS),
            *((100_000, 256, batch) for batch in BATCHES),
            *((100_000, width, 64) for width in WIDTHS),
        })
        for place, library in enumerate(LIBRARIES)
    ),
)
FOOTPRINTS = [
    Footprint(name, rows, width, "float32", optimizer, 4096, cost, None, None)
    for name, (rows, width) in SCENARIOS.items()
    for optimizer in OPTIMIZERS
    for cost in [Bytes(4 * rows * width, 4 * rows * width, 8 * rows * width, 10**6)]
]
FIGURES: dict[str, Any] = {
    "positions": lambda: plot.positions(STUDY),
    "lookups": lambda: plot.lookups(LOOKUPS),
    "memory": lambda: plot.memory(FOOTPRINTS),
}


@functools.cache
def positions_figure() -> Any:
    """Return the figure of all schemes. Tests only read it, so it is drawn once."""
    return plot.positions(STUDY)


def losses_axes() -> Any:
    return positions_figure().subfigs[0].axes[0]


def visible_texts(figure):
    """Return the visible texts, without tick labels outside the axis limits."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            beyond = [t for t in axis.get_major_ticks() if not low <= t.get_loc() <= high]
            hidden |= {label for tick in beyond for label in (tick.label1, tick.label2)}
        if not axes.get_visible():
            hidden |= set(axes.findobj(Text))
    texts = figure.findobj(Text)
    return [
        t for t in texts if t.get_text().strip() and t.get_visible() and t not in hidden
    ]


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_cut_off_or_overlaps_another(name):
    figure = FIGURES[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    page, boxes = figure.bbox, {}
    for text in visible_texts(figure):
        box = boxes[text] = text.get_window_extent(canvas.get_renderer())
        assert page.x0 <= box.x0 and box.x1 <= page.x1, text.get_text()
        assert page.y0 <= box.y0 and box.y1 <= page.y1, text.get_text()
    assert len(boxes) > 20
    for one, other in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one.get_text(), other.get_text())


def test_lines_show_the_losses():
    axes = losses_axes()
    drawn = {line.get_label(): line for line in axes.get_lines()}
    for each in STUDY.curves:
        known = [(n, x) for n, x in zip(each.lengths, each.losses, strict=True) if x]
        label = each.name + (" (no rows beyond)" if None in each.losses else "")
        np.testing.assert_allclose(drawn[label].get_xydata(), known)


def test_every_loss_line_has_its_own_style():
    axes = losses_axes()
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert len(lines) == len(STUDY.curves)
    looks = {
        (line.get_color(), line.get_linestyle(), str(line._dash_pattern)) for line in lines
    }
    assert len(looks) == len(lines)
    # Schemes also differ in their markers.
    markers = {line.get_label().split(" ")[0]: line.get_marker() for line in lines}
    assert len(set(markers.values())) == len(SCHEMES)


def test_the_legend_is_in_the_order_of_the_line_ends():
    legend = positions_figure().subfigs[0].legends[0]
    names = [text.get_text() for text in legend.get_texts()]
    ends = {c.name: c.losses[-1] for c in STUDY.curves}
    known = [ends[name] or 0.0 for name in names if name in ends]
    assert known == sorted(known, reverse=True) and len(names) == len(ends)


def test_every_profile_has_a_panel():
    below = positions_figure().subfigs[1]
    panels: dict[str, Any] = {axes.get_title(loc="left"): axes for axes in below.axes}
    assert set(panels) == set(SCHEMES) - {"none"}
    for each in STUDY.trained:
        if each.profile is not None:
            lines = panels[each.scheme].get_lines()[: len(each.profile.values)]
            for line, values in zip(lines, each.profile.values, strict=True):
                np.testing.assert_allclose(line.get_ydata(), values)


@pytest.mark.parametrize("count, across", [(1, 1), (4, 4), (5, 3), (7, 4), (8, 4)])
def test_panels_fill_their_rows(count, across):
    shown = tuple(each for each in STUDY.trained if each.profile)[:count]
    assert len(shown) == count
    below = plot.positions(dataclasses.replace(STUDY, trained=shown)).subfigs[1]
    tops = [axes.get_position().y1 for axes in below.axes]
    assert tops.count(max(tops)) == across and len(tops) == count


def test_schemes_with_the_same_profile_share_a_panel():
    rotary = STUDY.trained[SCHEMES.index("rotary")]
    other = dataclasses.replace(rotary, scheme="randomised")
    below = plot.positions(dataclasses.replace(STUDY, trained=(rotary, other))).subfigs[1]
    assert [axes.get_title(loc="left") for axes in below.axes] == ["rotary"]


def test_a_comparison_without_profiles_is_drawn():
    alone = dataclasses.replace(STUDY, trained=STUDY.trained[:1])
    assert plot.render(plot.positions(alone)).startswith(b"\x89PNG")


def test_lines_show_how_the_time_grows_and_the_memory_bandwidth():
    panels: list[Any] = plot.lookups(LOOKUPS).axes
    sizes = {
        "ids": ("100,000 rows, width 256", [128 * batch for batch in BATCHES]),
        "rows": ("width 256, 8,192 ids", [*ROWS]),
        "width": ("100,000 rows, 8,192 ids", [*WIDTHS]),
    }
    assert [axes.get_xlabel() for axes in panels] == [*sizes]
    for axes, (name, (title, values)) in zip(panels, sizes.items(), strict=True):
        assert axes.get_title(loc="left") == title
        drawn = {line.get_label(): line for line in axes.get_lines()}
        ids = np.array(values if name == "ids" else [8192] * len(values))
        width = np.array(values if name == "width" else [256] * len(values))
        for place, library in enumerate(LIBRARIES):
            want = np.stack([values, ids / 128 * width * 1e-7 * (1 + place)], axis=1)
            np.testing.assert_allclose(drawn[library].get_xydata(), want)
        # Rows are read and written, and an id has eight bytes.
        limit = np.stack([values, ids * (8 * width + 8) / 2e10], axis=1)
        np.testing.assert_allclose(drawn["memory bandwidth"].get_xydata(), limit)


def test_a_single_size_is_one_panel():
    found = dataclasses.replace(LOOKUPS, readings=LOOKUPS.readings[:4])
    (panel,) = plot.lookups(found).axes
    assert panel.get_xlabel() == "ids" and len(panel.get_lines()) == 5


def test_memory_bars_add_up_to_the_total():
    axes = plot.memory(FOOTPRINTS).axes[3]
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    totals = [f.best.total / 1e9 for f in FOOTPRINTS if f.name == "GPT-3"]
    np.testing.assert_allclose(ends, totals)
    assert axes.get_xlabel() == "GB"
    assert [label.get_text() for label in axes.get_yticklabels()] == list(OPTIMIZERS)


def test_unused_axes_are_hidden():
    figure = plot.memory([f for f in FOOTPRINTS if f.name != "small"])
    assert [axes.get_visible() for axes in figure.axes] == [True, True, True, False]


@pytest.mark.parametrize("name", FIGURES)
def test_rendering_is_deterministic_and_keeps_matplotlib_settings(name):
    before = dict(matplotlib.rcParams)
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for format in plot.FORMATS if name == "lookups" else ("svg",):
        one, other = (plot.render(FIGURES[name](), format) for _ in range(2))
        assert one == other and one.startswith(starts[format])
    assert dict(matplotlib.rcParams) == before


@pytest.mark.rejects
def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="format must be 'png', 'svg' or 'pdf', got 'gif'"):
        plot.render(plot.lookups(LOOKUPS), "gif")


# Simulated dichromatic vision in linear light (Viénot et al. 1999).
VISION = {
    "protan": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deutan": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
    "all": np.eye(3).tolist(),
}


def lab(colour, vision):
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_distinct_for_any_colour_vision(vision):
    for one, other in itertools.combinations(plot.PALETTE, 2):
        assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 50, (one, other)
    # The nine schemes also have different markers.
    for one, other in itertools.combinations(plot.COLOURS.values(), 2):
        assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 10, (one, other)


# The HTML report.


@pytest.fixture(scope="module")
def page():
    return report.html(STUDY)


def test_the_report_has_every_loss_and_marks_the_best(page):
    spread = " <small>± 0.012</small>"
    for each in STUDY.curves:
        cells = "".join(
            rf'<td(?: class="best")?>{report.number(loss)}{spread if loss else ""}</td>'
            for loss in each.losses
        )
        name = re.escape(each.name)
        assert re.search(rf'<tr><th scope="row">{name}</th>{cells}', page), each.name
    assert page.count('class="best"') == 5
    assert '<tr><th scope="row">none</th><td class="best">2.000' in page


def test_the_report_states_the_settings_and_labels_the_figure(page):
    assert "3 layers of width 96 with 4 heads, 600 steps of 16 × 128 bytes" in page
    assert 'role="img" aria-label="Loss by context length' in page
    assert "seeds 0 to 2" in page
    setting = dataclasses.replace(SETTING, layers=1)
    small = Study(setting, 10**6, STUDY.trained[:1])
    assert "<p>1 layer of width 96" in report.html(small)


def test_every_element_is_closed_and_wide_ones_scroll(page):
    whole = re.sub(r"<!doctype html>|<meta [^>]*>|<br>", "", page)
    tree = ElementTree.fromstring(whole)
    boxes = [box for box in tree.iter("div") if "wide" in box.get("class", "").split()]
    inside = [child.tag.rpartition("}")[2] for box in boxes for child in box]
    assert inside == ["table", "svg"]


def test_the_chart_shows_each_value_with_its_spread_on_hover(page):
    for each in STUDY.curves:
        for length, loss in zip(each.lengths, each.losses, strict=True):
            text = f"<title>{each.name} at {length}: {loss or 0:.3f} ± 0.012</title>"
            assert (text in page) == (loss is not None)
    names = re.findall(r"</span>([^<]*)</li>", page)
    assert len(names) == len(STUDY.curves) and "learned (no rows beyond)" in names


def test_error_bars_end_inside_of_the_chart():
    series = Series("a", "s0", [(1, 2.9), (2, 2.0)], spreads=[0.7, None])
    options = {"label": "", "x_ticks": [], "x_label": "", "y_label": ""}
    chart = line_chart([series], size=(600, 300), **options)
    (ends,) = re.findall(r'class="bar" d="M\S+ (\S+)V(\S+)"', chart)
    assert TOP <= float(ends[1]) < float(ends[0]) <= 300 - BOTTOM


def test_lines_have_a_color_for_both_themes(page):
    for scheme, color in plot.COLOURS.items():
        assert f".{scheme} {{ stroke: light-dark({color}, " in page
    assert "kerple { stroke: light-dark(#000000, #ffffff)" in page


def test_the_report_concludes_what_the_seeds_support(page):
    first, last = STUDY.conclusion()
    # Losses of neighboring schemes differ by 0.03, and the spread is 0.0123.
    assert first == (
        "At 128 bytes (the training length) the lowest loss is none's, 2.000 ± 0.012; "
        "learned follows with 0.030 more."
    )
    assert last.startswith(
        "At 1024 bytes (8× the training length) the lowest loss is none's"
    )
    assert f"<p>{html.escape(first)}</p>" in page


def test_schemes_within_chance_are_not_told_apart():
    def two(gap, spread, seeds=4):
        curves = [
            Curve(name, None, (128,), (loss,), (spread,) if seeds > 1 else ())
            for name, loss in (("rotary", 1.5), ("t5", 1.5 + gap))
        ]
        trained = [Trained(c.scheme, 1, 1.0, (), (c,), None) for c in curves]
        setting = dataclasses.replace(SETTING, stretches=(1.0,), seeds=seeds)
        return Study(setting, 1, tuple(trained)).conclusion()

    # The deviation of the difference of two averages of 4 is 0.02 * sqrt(2 / 4) = 0.0141.
    assert two(0.028, 0.02)[0].endswith("± 0.020; not told apart from it: t5.")
    assert two(0.029, 0.02)[0].endswith("± 0.020; t5 follows with 0.029 more.")
    one = two(0.029, 0.02, seeds=1)
    assert one[0].endswith("1.500; t5 follows with 0.029 more.")
    assert one[1] == "With one seed, differences may be chance; compare several."


def test_the_report_has_no_external_resources(page):
    assert "<script" not in page and "url(" not in page
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith("#") for link in links)
