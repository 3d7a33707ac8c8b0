"""The forward of the complete layer for calls too short for Numba's dispatcher."""

from collections.abc import Callable

import numpy as np

from ..runtime.compile import bits_of
from ..runtime.direct import FLAG, bind
from ..runtime.numba_abi import Ticket
from ..runtime.pool import grain_for, ticket_for
from .forward import GRAIN, _write_rows


def bind_forward(
    token_table: np.ndarray,
    *,
    position_table: np.ndarray | None,
    norm: tuple[np.ndarray, np.ndarray, float] | None,
    scale: float,
) -> Callable[..., int]:
    """Return a function that writes the layer's output rows, without streaming stores.

    It takes a ticket, and the addresses and lengths of the ids, of the output and, if there
    are positions, of the rows of positions. It returns 1 if a row was out of range, and
    otherwise what :func:`firstlayer.kernels.runtime.direct.bind` says.

    Args:
        token_table: Contiguous table, whose dtype is that of the output.
        position_table: Table of the same dtype and width, or None.
        norm: Weight, bias and epsilon of a LayerNorm, or None.
        scale: Factor of token rows.
    """
    number = np.float64 if token_table.dtype == np.float64 else np.float32
    norm_weight, norm_bias, eps = norm or (None, None, 0.0)
    rows = np.empty(1, np.int64)
    has_positions = position_table is not None
    return bind(
        _write_rows,
        varying=["ids", "out", "position_rows"] if has_positions else ["ids", "out"],
        token_table=bits_of(token_table),
        ids=rows,
        position_table=None if position_table is None else bits_of(position_table),
        position_rows=rows if has_positions else None,
        segment_table=None,
        segment_rows=None,
        norm_weight=None if norm_weight is None else bits_of(norm_weight),
        norm_bias=None if norm_bias is None else bits_of(norm_bias),
        scale=number(scale),
        eps=number(eps),
        streams=False,
        out=bits_of(np.empty((1, token_table.shape[1]), token_table.dtype)),
        has_bad_id=FLAG,
    )


def forward_ticket(num_tokens: int, width: int) -> Ticket:
    """Return the ticket of a call, for as many threads as its size allows.

    Args:
        num_tokens: Number of output rows.
        width: Their width.
    """
    return ticket_for(num_tokens, grain_for(GRAIN, width))
