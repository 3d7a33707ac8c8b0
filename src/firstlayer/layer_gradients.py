"""The gradients of the complete layer's tables and norm, by the kernels.

A token table is large and its ids mostly differ, so its gradient is a sum by id
(:class:`firstlayer.rows.Rows`): a row whose id occurs once is written where it belongs at once,
and those of repeated ids are summed by blocks first, then over them.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64

from . import kernels
from ._check import all_in_range, out_of_range
from .rows import Rows

Part = tuple[Float[np.ndarray, "rows embedding_dim"], Int64[np.ndarray, " of_places"]]
Missing = tuple[None, None]
# How many times as much memory as it needs a gradient may keep.
WASTE = 4


class LayerGradients(NamedTuple):
    """What each part of the layer gets.

    Args:
        token: Of the token table; or, if not asked by id, one row for each place.
        second: Of the first table that is added, or None.
        third: Of the second table that is added, all rows of it, or None.
        weight: Of the norm's weight, or None.
        bias: Of its bias, or None.
    """

    token: Rows | Float[np.ndarray, "places embedding_dim"]
    second: Rows | None
    third: Float[np.ndarray, "rows embedding_dim"] | None
    weight: Float[np.ndarray, " embedding_dim"] | None
    bias: Float[np.ndarray, " embedding_dim"] | None


def layer_gradients(
    token: Part,
    added: tuple[Part | Missing, ...],
    *,
    scale: float,
    norm: tuple[np.ndarray, float] | None,
    dy: Float[np.ndarray, "places embedding_dim"],
    by_id: bool = True,
    skips: tuple[int | None, int | None] = (None, None),
    mask: Bool[np.ndarray, " places"] | None = None,
) -> LayerGradients:
    """Return the gradients of all that an output row is made of.

    Args:
        token: A table and its row for each place.
        added: Up to two more; ``(None, None)`` for a first that is not there. Fewer rows
            than there are places begin again at their end.
        scale: What token rows were multiplied by.
        norm: Weight and epsilon of the LayerNorm, or None.
        dy: Gradient of the output.
        by_id: Whether the gradient of token rows is summed by id.
        skips: The row of the token table and of the second one that gets no gradient.
        mask: False at places that give nobody a gradient, whatever is there.
    """
    places = np.arange(len(dy)) if mask is None else np.flatnonzero(mask)
    third = added[1][0] if len(added) > 1 else None
    if token[1].size != len(dy):
        raise ValueError(
            f"there must be an id for each of {len(dy)} rows, got {token[1].size}"
        )
    # Again, for they may have been written to since they were looked up.
    for name, (table, rows) in zip(("positions", "segments"), added, strict=False):
        _check_rows(name, table, rows)
    route = kernels.route_of(
        token[1] if by_id else None,
        added[0][1] if added else None,
        places=places,
        size=len(dy),
        skip=skips[0],
        shared=2 + (0 if third is None else len(third)),
    )
    _check_rows("ids", token[0], route.ids[-1:] if by_id else None)
    values, dsecond, dshared = kernels.layer_pull(
        token, added, scale=scale, norm=norm, dy=dy, route=route
    )
    if not by_id and mask is not None:
        values[~mask] = 0
    weight, bias = (None, None) if norm is None else dshared[:2]
    return LayerGradients(
        _summed(values, route) if by_id else values,
        None if route.sums is None else _without(Rows(route.rows, dsecond), skips[1]),
        None if third is None else dshared[2:],
        weight,
        bias,
    )


def _check_rows(name: str, table: np.ndarray | None, rows: np.ndarray | None) -> None:
    if table is not None and rows is not None and not all_in_range(rows, len(table)):
        raise out_of_range(rows, len(table), name=name, bound="the number of rows")


def _summed(
    values: Float[np.ndarray, "slots embedding_dim"], route: "kernels.Route"
) -> Rows:
    """Return one row for each id."""
    size = route.ids.size
    if route.several.size:
        kernels.sum_runs(values, route.starts, into=route.several)
    # A view keeps all of the values alive, which are many where ids are few.
    few = len(values) > WASTE * size
    return Rows(route.ids, values[:size].copy() if few else values[:size])


def _without(rows: Rows, skip: int | None) -> Rows:
    if skip is None or skip not in rows.ids:
        return rows
    kept = rows.ids != skip
    return Rows(rows.ids[kept], rows.values[kept])
