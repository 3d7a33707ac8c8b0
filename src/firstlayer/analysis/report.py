"""A comparison of position schemes as an HTML page with a table and a figure.

The page is one file without scripts or links to other files, and supports dark mode.
"""

from html import escape

from . import plot
from .position_study import Curve, Study

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { line-height: 1.2 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #8884 }
th:first-child { text-align: left; position: sticky; left: 0; background: Canvas }
tbody th { font-weight: normal }
.best { font-weight: bold }
figure { margin: 1.5rem 0 }
figure .wide { background: white; padding: .5rem; border-radius: .3rem }
figcaption { margin-top: .5rem }
svg { display: block; width: 100%; min-width: 40rem; height: auto }
@media (max-width: 40rem) { th, td { padding: .2rem .5rem } }
"""


def html(study: Study) -> str:
    """Return the page."""
    setting = study.setting
    head = "".join(
        f'<th scope="col">{length}<br>{stretch:g}×</th>'
        for length, stretch in zip(setting.lengths, setting.stretches, strict=True)
    )
    best = [study.best_at(length) for length in setting.lengths]
    rows = "\n".join(_row(curve, best) for curve in study.curves)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Position schemes compared</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Position schemes compared</h1>
<p>One small transformer per scheme was trained on sequences of {setting.length} bytes. The
table shows its loss in nats per byte when it predicts the same held-out bytes with a longer
and longer context. A scheme that works beyond its training length keeps its loss. The last
column is the rise from the first length to the last. The best loss at each length is bold.
A name with a plus is the model above it, extended to each length without further
training.</p>
<div class="wide" tabindex="0">
<table>
<thead><tr><th scope="col">scheme</th>{head}<th scope="col">rise</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<figure>
<div class="wide" tabindex="0">
{_svg(study)}</div>
<figcaption>Top: the losses of the table. Bottom: the effect of distance in each scheme,
as the similarity of two positions (cosine) or the bias on the attention score (a line per
head). The grey bar marks the training length.</figcaption>
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
        f"{setting.batch} × {setting.length} bytes, seed {setting.seed}; {study.bytes:,} "
        f"bytes of text, the last tenth held out; {setting.windows * setting.targets:,} "
        "bytes predicted, the same at every length."
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _row(curve: Curve, best: list[Curve | None]) -> str:
    cells = "".join(
        f'<td class="best">{number(loss)}</td>'
        if best_curve is curve
        else f"<td>{number(loss)}</td>"
        for loss, best_curve in zip(curve.losses, best, strict=True)
    )
    rise = number(curve.rise, "+.3f")
    name = escape(curve.name)
    return f'<tr><th scope="row">{name}</th>{cells}<td>{rise}</td></tr>'


def number(loss: float | None, form: str = ".3f") -> str:
    """Return a loss as text; a dash for None.

    Example:
        >>> number(1.23456), number(None)
        ('1.235', '–')
    """
    return "–" if loss is None else format(loss, form)


def _svg(study: Study) -> str:
    svg = plot.render(plot.positions(study), "svg").decode()
    svg = svg[svg.index("<svg") :]
    label = "Loss by context length, a line per scheme; the table has the numbers."
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
