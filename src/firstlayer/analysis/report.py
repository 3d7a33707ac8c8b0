"""A study of positions as one HTML page: its table, its picture, how it was made.

The page needs nothing else: no server, no script, no network. It opens from the disk, in
light and dark.
"""

from html import escape

from . import plot
from .positions import Curve, Study

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
    """Return the page.

    Args:
        study: What :func:`firstlayer.analysis.positions.compare` found.
    """
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
<p>A small transformer for each scheme was trained on {setting.length} bytes at a time. The
table has its loss, in nats a byte, with more and more text in front of the same bytes. A
scheme that can read further than it was trained to keeps its loss; the rise is that from
the first length to the last. Bold is the best at a length. A name with a plus is the model
above it, its positions changed for each length without training again.</p>
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
<figcaption>Above, the losses of the table. Below, how each scheme sees distance: how alike
two positions are that far apart (cosine), or what is added to the score of a key that far
back (bias, a line for each head). The grey bar is the length trained at.</figcaption>
</figure>
<p>{escape(_made(study))}</p>
</body>
</html>
"""


def _made(study: Study) -> str:
    setting = study.setting
    return (
        f"{_counted(setting.layers, 'layer')} of width {setting.width} with "
        f"{_counted(setting.heads, 'head')}, {_counted(setting.steps, 'step')} of "
        f"{setting.batch} × {setting.length} bytes, seed {setting.seed}; {study.bytes:,} "
        f"bytes of text, the last tenth held out; {setting.windows * setting.targets:,} "
        "bytes predicted, the same at every length."
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _row(curve: Curve, best: list[Curve | None]) -> str:
    marks = [' class="best"' if first is curve else "" for first in best]
    cells = "".join(
        f"<td{mark}>{number(loss)}</td>"
        for loss, mark in zip(curve.losses, marks, strict=True)
    )
    rise = number(curve.rise, "+.3f")
    name = escape(curve.name)
    return f'<tr><th scope="row">{name}</th>{cells}<td>{rise}</td></tr>'


def number(loss: float | None, form: str = ".3f") -> str:
    """Return a loss as it is printed; a dash where there is none.

    Args:
        loss: In nats a byte, or None.
        form: As :func:`format` takes it.

    Example:
        >>> number(1.23456), number(None)
        ('1.235', '–')
    """
    return "–" if loss is None else format(loss, form)


def _svg(study: Study) -> str:
    drawn = plot.render(plot.positions(study), "svg").decode()
    drawn = drawn[drawn.index("<svg") :]
    what = "Lines of loss against length, one for each scheme; the table has their numbers."
    return drawn.replace("<svg", f'<svg role="img" aria-label="{what}"', 1)
