"""The gradients of the complete layer's tables and norm, by the kernels.

A token table is large and its ids mostly differ, so its gradient is a sum by id
(:class:`firstlayer.embeddings.row_gradient.RowGradient`): a row whose id occurs once is written where it belongs at once,
and those of repeated ids are summed by blocks first, then over them.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64

from .. import kernels
from .._check import all_in_range, out_of_range
from .row_gradient import RowGradient

Part = tuple[Float[np.ndarray, "rows embedding_dim"], Int64[np.ndarray, " of_places"]]
# How many times as much memory as it needs a gradient may keep.
WASTE = 4


class LayerGradients(NamedTuple):
    """What each part of the layer gets.

    Args:
        token: Of the token table; or, if not asked by id, one row for each place.
        position: Of the position table, or None.
        segment: Of the segment table, every row of it, or None.
        norm_weight: Of the norm's weight, or None.
        norm_bias: Of its bias, or None.
    """

    token: RowGradient | Float[np.ndarray, "places embedding_dim"]
    position: RowGradient | None
    segment: Float[np.ndarray, "rows embedding_dim"] | None
    norm_weight: Float[np.ndarray, " embedding_dim"] | None
    norm_bias: Float[np.ndarray, " embedding_dim"] | None


def layer_gradients(
    token: Part,
    *,
    position: Part | None = None,
    segment: Part | None = None,
    scale: float,
    norm: tuple[np.ndarray, float] | None,
    dy: Float[np.ndarray, "places embedding_dim"],
    by_id: bool = True,
    token_padding: int | None = None,
    position_padding: int | None = None,
    mask: Bool[np.ndarray, " places"] | None = None,
) -> LayerGradients:
    """Return the gradients of all that an output row is made of.

    Args:
        token: A table and its row for each place.
        position: A table and its row for each place, or None. Fewer rows than there are
            places are repeated from the first.
        segment: Likewise.
        scale: What token rows were multiplied by.
        norm: Weight and epsilon of the LayerNorm, or None.
        dy: Gradient of the output.
        by_id: Whether the gradient of token rows is summed by id.
        token_padding: The row of the token table that gets no gradient, or None.
        position_padding: The row of the position table that gets none, or None.
        mask: False at places that give nobody a gradient, whatever is there.
    """
    places = np.arange(len(dy)) if mask is None else np.flatnonzero(mask)
    if token[1].size != len(dy):
        raise ValueError(
            f"there must be an id for each of {len(dy)} rows, got {token[1].size}"
        )
    # Again, for they may have been written to since they were looked up.
    for name, pair in (("positions", position), ("segments", segment)):
        if pair is not None:
            _check_rows(name, *pair)
    route = kernels.plan_backward(
        token[1] if by_id else None,
        None if position is None else position[1],
        places=places,
        size=len(dy),
        skip=token_padding,
        shared=2 + (0 if segment is None else len(segment[0])),
    )
    if by_id:
        _check_rows("ids", token[0], route.ids[-1:])
    values, dposition, dshared = kernels.layer_backward(
        token,
        position=position,
        segment=segment,
        scale=scale,
        norm=norm,
        dy=dy,
        route=route,
    )
    if not by_id and mask is not None:
        values[~mask] = 0
    weight, bias = (None, None) if norm is None else dshared[:2]
    return LayerGradients(
        _summed(values, route) if by_id else values,
        None
        if route.sums is None
        else _without(RowGradient(route.rows, dposition), position_padding),
        None if segment is None else dshared[2:],
        weight,
        bias,
    )


def _check_rows(name: str, table: np.ndarray, rows: np.ndarray) -> None:
    if not all_in_range(rows, len(table)):
        raise out_of_range(rows, len(table), name=name, bound="the number of rows")


def _summed(
    values: Float[np.ndarray, "slots embedding_dim"], route: "kernels.Route"
) -> RowGradient:
    """Return one row for each id."""
    size = route.ids.size
    if route.several.size:
        kernels.sum_runs(values, route.starts, into=route.several)
    # A view keeps all of the values alive, which are many where ids are few.
    few = len(values) > WASTE * size
    return RowGradient(route.ids, values[:size].copy() if few else values[:size])


def _without(rows: RowGradient, skip: int | None) -> RowGradient:
    if skip is None or skip not in rows.ids:
        return rows
    kept = rows.ids != skip
    return RowGradient(rows.ids[kept], rows.values[kept])
