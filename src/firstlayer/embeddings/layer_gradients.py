"""Gradients of the complete layer's tables and norm, computed by the kernels.

Tables are large and a batch reads few of their rows, so the gradients of the token and the
position table are :class:`firstlayer.embeddings.row_gradient.RowGradient`.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64

from .. import kernels
from .._check import all_in_range, out_of_range
from .row_gradient import RowGradient

#: A table and the rows of it that are read.
TableRows = tuple[Float[np.ndarray, "_ embedding_dim"], Int64[np.ndarray, "_"]]
# Copy a gradient if the buffer it is a view of exceeds this many times its size.
MAX_BUFFER_RATIO = 4


class LayerGradients(NamedTuple):
    """Gradients of the layer's parameters; None for those the layer does not have.

    Args:
        token: Gradient of the token table, or of each token's row if not ``by_id``.
        position: Gradient of the position table.
        segment: Gradient of the segment table, all rows.
        norm_weight: Gradient of the norm's weight.
        norm_bias: Gradient of the norm's bias.
    """

    token: RowGradient | Float[np.ndarray, "tokens embedding_dim"]
    position: RowGradient | None
    segment: Float[np.ndarray, "rows embedding_dim"] | None
    norm_weight: Float[np.ndarray, " embedding_dim"] | None
    norm_bias: Float[np.ndarray, " embedding_dim"] | None


def layer_gradients(
    token: TableRows,
    *,
    position: TableRows | None = None,
    segment: TableRows | None = None,
    scale: float,
    norm: tuple[np.ndarray, np.ndarray] | None,
    dy: Float[np.ndarray, "tokens embedding_dim"],
    by_id: bool = True,
    token_padding: int | None = None,
    position_padding: int | None = None,
    mask: Bool[np.ndarray, " tokens"] | None = None,
) -> LayerGradients:
    """Return the gradients of the layer's parameters, given that of its output.

    Args:
        token: Token table and the id of each token.
        position: Position table and the row of each token, or None. An array of fewer rows
            than tokens is repeated.
        segment: Segment table and the row of each token, or None. Repeated too.
        scale: Factor of token rows.
        norm: Weight of the LayerNorm, and the statistics that the forward filled, or None.
        dy: Gradient of the output.
        by_id: Whether the gradient of token rows is summed by id.
        token_padding: Row of the token table that gets no gradient, or None.
        position_padding: Row of the position table that gets no gradient, or None.
        mask: False for tokens whose ``dy`` is ignored, NaN included.
    """
    num_tokens = len(dy)
    if token[1].size != num_tokens:
        raise ValueError(
            f"there must be an id for each of {num_tokens} rows, got {token[1].size}"
        )
    if mask is not None and mask.size != num_tokens:
        raise ValueError(
            f"there must be a mask for each of {num_tokens} rows, got {mask.size}"
        )
    # Copied and checked again: the caller may have changed the arrays since the forward,
    # and another thread may change them now.
    if by_id or norm is not None:
        token = _checked_rows("ids", *token)
    position = position and _checked_rows("positions", *position)
    segment = segment and _checked_rows("segments", *segment)
    mask = None if mask is None else mask.copy()
    plan = kernels.plan_backward(
        token[1] if by_id else None,
        None if position is None else position[1],
        tokens=np.arange(num_tokens) if mask is None else np.flatnonzero(mask),
        num_tokens=num_tokens,
        skip=token_padding,
        shared_rows=2 + (0 if segment is None else len(segment[0])),
    )
    buffer, dposition, dshared = kernels.layer_backward(
        token, position=position, segment=segment, scale=scale, norm=norm, dy=dy, plan=plan
    )
    if not by_id and mask is not None:
        buffer[~mask] = 0
    dweight, dbias = (None, None) if norm is None else dshared[:2]
    return LayerGradients(
        _token_gradient(buffer, plan) if by_id else buffer,
        None
        if position is None
        else _without_row(
            RowGradient(plan.unique_position_rows, dposition), position_padding
        ),
        None if segment is None else dshared[2:],
        dweight,
        dbias,
    )


def _checked_rows(name: str, table: np.ndarray, rows: np.ndarray) -> TableRows:
    rows = rows.copy()
    if not all_in_range(rows, len(table)):
        raise out_of_range(rows, len(table), name=name, bound="the number of rows")
    return table, rows


def _token_gradient(
    buffer: Float[np.ndarray, "buffer_rows embedding_dim"], plan: "kernels.BackwardPlan"
) -> RowGradient:
    """Return the gradient by id, after summing the partial rows in ``buffer``."""
    if plan.repeated.size:
        kernels.sum_runs(buffer, plan.partial_starts, into=plan.repeated)
    values = buffer[: plan.ids.size]
    # A view keeps the whole buffer alive, which is large if most ids are repeated.
    is_wasteful = len(buffer) > MAX_BUFFER_RATIO * len(values)
    return RowGradient(plan.ids, values.copy() if is_wasteful else values)


def _without_row(gradient: RowGradient, row: int | None) -> RowGradient:
    if row is None or row not in gradient.ids:
        return gradient
    kept = gradient.ids != row
    return RowGradient(gradient.ids[kept], gradient.values[kept])
