"""Maps of tables and of positions as HTML pages: files that work without a network."""

import base64
import json
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from .position_rows import PositionRows
from .table_map import TableMap


def map_page(table: TableMap, *, title: str) -> str:
    """Return the page.

    It holds the vectors in 8 bits, from which it computes neighbors and sums of words.

    Args:
        table: The map.
        title: Title of the page.
    """
    largest = np.abs(table.unit).max(1, keepdims=True)
    rounded = np.round(table.unit / np.where(largest > 0, largest, 1) * 127)
    shown, width = f"{len(table.words):,}", table.unit.shape[1]
    note = f"{shown} of {table.rows:,} rows of {width:,} numbers."
    data = {
        "words": table.words,
        "places": table.places.tolist(),
        "rows": table.rows,
        "width": width,
        "vectors": _base64(rounded.astype(np.int8)),
        "norms": _base64(table.norms.astype("<f4")),
        "neighbors": _base64(_unit_square(table.neighbors)),
        "pca": _base64(_unit_square(table.pca)),
        "clusters": _base64(table.clusters),
        "labels": table.labels,
        "note": note,
    }
    return _filled("map", title=title, data=data)


def positions_page(table: PositionRows, *, title: str) -> str:
    """Return the page that shows the similarity of position rows.

    Args:
        table: The position rows, compared.
        title: Name of the checkpoint.
    """
    cosines = np.where(np.isnan(table.cosines), 0, table.cosines)
    data = {
        "name": table.name,
        "rows": table.rows,
        "positions": table.positions.tolist(),
        "cosines": _base64(np.round(cosines * 32767).astype("<i2")),
        "norms": [round(norm, 6) for norm in np.nan_to_num(table.norms).tolist()],
    }
    return _filled("positions", title=title, data=data)


def _filled(name: str, *, title: str, data: dict[str, Any]) -> str:
    """Return the page ``name`` with its parts in place of ``{{part}}``, in one pass."""
    folder = files("firstlayer.analysis") / "pages"
    text, style, script = (
        (folder / file).read_text(encoding="utf-8")
        for file in (f"{name}.html", "map.css", f"{name}.js")
    )
    parts = {"title": escape(title), "data": _json(data), "style": style, "script": script}
    pieces = text.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def _json(value: Any) -> str:
    r"""Return a value as JSON that is safe inside of a script element.

    Example:
        >>> _json({"word": "</script>"})
        '{"word":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _unit_square(points: np.ndarray) -> np.ndarray:
    """Return points in a square, centered, as 16-bit fractions of its side; y downwards."""
    low, high = points.min(0), points.max(0)
    side = (high - low).max() or 1.0
    shares = (points - (low + high) / 2) / side * [1, -1] + 0.5
    return np.round(np.clip(shares, 0, 1) * 65535).astype("<u2")
