"""A comparison of position schemes as an HTML page: a conclusion, a table and charts.

The page is one file without scripts or links to other files. It follows the reader's light
or dark theme.
"""

from html import escape

from .plot import COLOURS
from .position_study import Curve, Study, Trained
from .svg_chart import Series, line_chart

# Dashes of a line by the rule that extends the model.
DASHES = {None: "", "linear": "2 3", "ntk": "8 4", "yarn": "9 3 2 3", "resized": "5 4"}
# Black lines are white on a dark page, and dark ones lighter.
DARK = {
    "#000000": "#ffffff",
    "#882255": "#dd6fa3",
    "#332288": "#9b8fe8",
    "#0072B2": "#4aa3df",
}
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; max-width: 60rem;
       margin: 2rem auto; padding: 0 1rem; color: light-dark(#1d1f21, #e8e8e6);
       background: light-dark(#ffffff, #16181b) }
h1 { line-height: 1.2 }
.conclusion { font-size: 1.1em; border-left: 4px solid light-dark(#0b5cad, #7db8f5);
              padding-left: .8rem }
.conclusion p { margin: .3rem 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #8884 }
td small { opacity: .7 }
th:first-child { text-align: left; position: sticky; left: 0;
                 background: light-dark(#ffffff, #16181b) }
tbody th { font-weight: normal }
.best { font-weight: bold }
figure { margin: 1.5rem 0 }
figcaption { margin-top: .5rem }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; list-style: none; padding: 0;
          margin: 0 0 .4rem; font-size: .9em }
.legend li { display: flex; align-items: center; gap: .4rem }
.legend svg { width: 2.2rem; height: .8rem }
svg { display: block; width: 100%; height: auto; fill: none; stroke-width: 2 }
.main svg { min-width: 34rem }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr));
         gap: 1rem }
.small h3 { margin: 0; font-size: 1rem }
svg text { fill: currentColor; stroke: none; font-size: 12px; text-anchor: middle }
svg text.y { text-anchor: end }
.grid { stroke: #8883; stroke-width: 1 }
.mark { stroke: #8883; stroke-width: 7 }
.bar { stroke-width: 1.5; opacity: .7 }
circle { stroke: none }
circle:hover { r: 6px }
@media (max-width: 40rem) { th, td { padding: .2rem .5rem } }
"""


def html(study: Study) -> str:
    """Return the page."""
    setting = study.setting
    head = "".join(
        f'<th scope="col">{length}<br>{stretch:g}×</th>'
        for length, stretch in zip(setting.lengths, setting.stretches, strict=True)
    )
    best = [next(iter(study.ranking(length)), None) for length in setting.lengths]
    rows = "\n".join(_row(curve, best) for curve in study.curves)
    conclusion = "".join(f"<p>{escape(sentence)}</p>" for sentence in study.conclusion())
    profiles = "".join(_profile(each, setting.length) for each in _profiles(study))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Position schemes compared</title>
<style>{STYLE}{_colors(study)}</style>
</head>
<body>
<h1>Position schemes compared</h1>
<div class="conclusion">{conclusion}</div>
<p>{escape(_models(study))} was trained on sequences of {setting.length} bytes. The table
shows the loss in nats per byte when it predicts the same held-out bytes with a longer and
longer context{_averaged(study)}. A scheme that works beyond its training length keeps its
loss. The last column is the rise from the first length to the last. The lowest loss at each
length is bold. A name with a plus is the model above it, extended to each length without
further training.</p>
<div class="wide" tabindex="0">
<table>
<thead><tr><th scope="col">scheme</th>{head}<th scope="col">rise</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<figure>
<ul class="legend">{"".join(_legend(curve) for curve in _ordered(study))}</ul>
<div class="wide main" tabindex="0">{_losses(study)}</div>
<figcaption>The losses of the table; point at a mark to read its value. The grey bar marks
the training length.</figcaption>
</figure>
<figure>
<div class="small">{profiles}</div>
<figcaption>The effect of distance in each scheme: the similarity of two positions (cosine),
or the bias on the attention score, a line per head.</figcaption>
</figure>
<p>{escape(_conditions(study))}</p>
</body>
</html>
"""


def _conditions(study: Study) -> str:
    setting = study.setting
    return (
        f"{_counted(setting.layers, 'layer')} of width {setting.width} with "
        f"{_counted(setting.heads, 'head')}, {_counted(setting.steps, 'step')} of "
        f"{setting.batch} × {setting.length} bytes, {_seeds(study)}; {study.bytes:,} "
        f"bytes of text, the last tenth held out; {setting.windows * setting.targets:,} "
        "bytes predicted, the same at every length."
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _seeds(study: Study) -> str:
    first, count = study.setting.seed, study.setting.seeds
    return f"seed {first}" if count == 1 else f"seeds {first} to {first + count - 1}"


def _models(study: Study) -> str:
    count = study.setting.seeds
    return (
        "One small transformer"
        if count == 1
        else f"A small transformer for each of {count} seeds"
    )


def _averaged(study: Study) -> str:
    if study.setting.seeds == 1:
        return ""
    return ", averaged over the seeds, with the standard deviation between them"


def _row(curve: Curve, best: list[Curve | None]) -> str:
    cells = []
    for length, loss, lowest in zip(curve.lengths, curve.losses, best, strict=True):
        spread = curve.spread_at(length)
        text = number(loss) + ("" if spread is None else f" <small>± {spread:.3f}</small>")
        style = ' class="best"' if lowest is curve else ""
        cells.append(f"<td{style}>{text}</td>")
    rise = number(curve.rise, "+.3f")
    name = escape(curve.name)
    return f'<tr><th scope="row">{name}</th>{"".join(cells)}<td>{rise}</td></tr>'


def number(loss: float | None, form: str = ".3f") -> str:
    """Return a loss as text; a dash for None.

    Example:
        >>> number(1.23456), number(None)
        ('1.235', '–')
    """
    return "–" if loss is None else format(loss, form)


def _colors(study: Study) -> str:
    """Return the rules that give the lines of each scheme its color in both themes."""
    rules = []
    for scheme in dict.fromkeys(trained.scheme for trained in study.trained):
        light = COLOURS[scheme]
        color = f"light-dark({light}, {DARK.get(light, light)})"
        rules.append(
            f".{scheme} {{ stroke: {color} }} .{scheme} circle {{ fill: {color} }}"
        )
    return "\n".join(rules)


def _ordered(study: Study) -> list[Curve]:
    """Return the curves from the highest to the lowest loss at the longest length."""
    lost = float("inf")
    return sorted(
        study.curves, key=lambda c: -(lost if c.losses[-1] is None else c.losses[-1])
    )


def _legend(curve: Curve) -> str:
    missing = " (no rows beyond)" if None in curve.losses else ""
    dash = f' stroke-dasharray="{DASHES[curve.rule]}"' if curve.rule else ""
    line = f'<svg viewBox="0 0 44 12" aria-hidden="true"><path d="M1 6H43"{dash}/>'
    line += '<circle cx="22" cy="6" r="4"/></svg>'
    return (
        f'<li><span class="{curve.scheme}">{line}</span>{escape(curve.name)}{missing}</li>'
    )


def _losses(study: Study) -> str:
    setting = study.setting
    lines = []
    for curve in _ordered(study):
        known = [i for i, loss in enumerate(curve.losses) if loss is not None]
        lines.append(
            Series(
                curve.name,
                curve.scheme,
                [(curve.lengths[i], curve.losses[i] or 0.0) for i in known],
                [curve.spreads[i] for i in known] if curve.spreads else (),
                DASHES[curve.rule],
            )
        )
    stretches = zip(setting.lengths, setting.stretches, strict=True)
    return line_chart(
        lines,
        size=(860, 400),
        label="Loss by context length, a line per scheme; the table has the numbers.",
        x_ticks=[(length, f"{length}\n{stretch:g}×") for length, stretch in stretches],
        x_label="",
        y_label="loss (nats per byte)",
        log_x=True,
        mark_x=setting.length,
    )


def _profiles(study: Study) -> list[Trained]:
    """Return the schemes with different profiles: some differ only in their training."""
    by_profile = {trained.profile: trained for trained in reversed(study.trained)}
    return [by_profile[key] for key in reversed(by_profile) if key is not None]


def _profile(trained: Trained, length: int) -> str:
    profile = trained.profile
    if profile is None:
        return ""
    lines = [
        Series(
            trained.scheme,
            trained.scheme,
            list(zip(profile.distances, values, strict=True)),
            marked=False,
        )
        for values in profile.values
    ]
    furthest = max(profile.distances)
    chart = line_chart(
        lines,
        size=(300, 190),
        label=f"Effect of distance with {trained.scheme}",
        x_ticks=[(0, "0"), (length, str(length)), (furthest, str(furthest))],
        x_label="distance",
        y_label="cosine" if profile.what == "cosine" else "bias",
        mark_x=length,
    )
    return f"<div><h3>{escape(trained.scheme)}</h3>{chart}</div>"
