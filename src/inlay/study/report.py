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
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left }
.best { font-weight: bold }
figure { margin: 1.5rem 0; background: white; padding: .5rem; border-radius: .3rem }
svg { width: 100%; height: auto }
"""


def html(study: Study) -> str:
    """Return the page."""
    setting = study.setting
    head = "".join(
        f"<th>{length}<br>{stretch:g}×</th>"
        for length, stretch in zip(setting.lengths, setting.stretches, strict=True)
    )
    best = [study.best_at(length) for length in setting.lengths]
    rows = "\n".join(_row(curve, best) for curve in study.curves)
    made = (
        f"{setting.layers} layers of width {setting.width} with {setting.heads} heads, "
        f"{setting.steps} steps of {setting.batch} × {setting.length} bytes, seed "
        f"{setting.seed}; {study.bytes:,} bytes of text, the last tenth held out; "
        f"{setting.windows * setting.targets:,} bytes predicted, the same at every length."
    )
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Position schemes compared</title>
<style>{STYLE}</style>
<h1>Position schemes compared</h1>
<p>The loss, in nats a byte, of a small transformer for each scheme, trained on
{setting.length} bytes at a time and tested with more text in front of the same bytes. A
scheme that reads further than it was trained keeps its loss; bold is the best at a
length. Lines after a plus were changed after training, without training again.</p>
<table>
<tr><th>scheme</th>{head}<th>rise</th></tr>
{rows}
</table>
<figure>{_svg(study)}</figure>
<p>Below the losses: how alike positions are at a distance (cosine), or what is added to the
score of a key that far back (bias, a line for each head). The grey line is the length
trained at.</p>
<p>{escape(made)}</p>
</html>
"""


def _row(curve: Curve, best: list[Curve | None]) -> str:
    cells = "".join(
        f'<td class="{"best" if first is curve else ""}">{number(loss)}</td>'
        for loss, first in zip(curve.losses, best, strict=True)
    )
    rise = number(curve.rise, "+.3f")
    return f"<tr><td>{escape(curve.name)}</td>{cells}<td>{rise}</td></tr>"


def number(loss: float | None, form: str = ".3f") -> str:
    """Return a loss as it is printed; a dash where there is none.

    Example:
        >>> number(1.23456), number(None)
        ('1.235', '–')
    """
    return "–" if loss is None else format(loss, form)


def _svg(study: Study) -> str:
    drawn = plot.render(plot.positions(study), "svg").decode()
    return drawn[drawn.index("<svg") :]
