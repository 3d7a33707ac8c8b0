"""Forward of the complete layer in one pass over memory: look up, scale, add, normalize.

A row is assembled in a scratch row that stays in the L1 cache, in the compute dtype
(float64 for float64, else float32), and written once.
"""

from typing import Any, TypeAlias

import numpy as np

from ..runtime.compile import bits_of, inlined, is_row, kernel, prefetch_bytes
from ..runtime.lanes import (
    LANES_BYTES,
    is_streamed,
    load,
    prefetch_lanes,
    prefetch_target,
    store,
    store_or_stream,
    total,
    zeros,
)
from ..runtime.pool import grain_for, pieces, run
from ..runtime.scratch import free_row, is_allocated, scratch_row

# Number of ids between the row that is read and the one that is prefetched.
AHEAD = 4
# Minimum number of entries per thread.
GRAIN = 1 << 16

#: A table, ``(num_rows, embedding_dim)``, and the rows of it that are read, int64.
TableRows: TypeAlias = tuple[np.ndarray, np.ndarray]


def layer_forward(
    token: TableRows,
    *,
    position: TableRows | None = None,
    segment: TableRows | None = None,
    scale: float,
    norm: tuple[np.ndarray, np.ndarray, float] | None,
    out: np.ndarray,
    statistics: np.ndarray | None = None,
) -> bool:
    """Write the layer's output rows to ``out``, and return whether every row is in range.

    Args:
        token: Token table and the id of each output row. An output row of which a table's
            row is out of range is not written.
        position: Table and the row of it that is added to each output row, or None. An
            array of fewer rows than the output has is repeated.
        segment: The same as ``position``, for a third table.
        scale: Factor of token rows.
        norm: Weight, bias and epsilon of a LayerNorm, or None.
        out: Output, ``(rows, embedding_dim)``.
        statistics: Array ``(rows, 2)`` in the compute dtype that gets the mean of each row
            before the norm, and one over its standard deviation, for the backward.
    """
    norm_weight, norm_bias, eps = norm or (None, None, 0.0)
    compute_dtype = np.float64 if out.dtype == np.float64 else np.float32
    num_tokens, width = out.shape
    check_sizes(
        token,
        position,
        segment,
        num_tokens=num_tokens,
        width=width,
        statistics=statistics,
    )
    if statistics is None:
        statistics = np.empty((0, 2), compute_dtype)
    return write_rows(
        *flat_pair(token),
        *flat_pair(position),
        *flat_pair(segment),
        flat_norm(norm_weight, width),
        flat_norm(norm_bias, width),
        compute_dtype(scale),
        compute_dtype(eps),
        statistics,
        out=out,
    )


def write_rows(*args: Any, out: np.ndarray) -> bool:
    """Write the layer's output rows, from arguments as the kernel takes them, unchecked.

    Args:
        args: Arguments of the kernel, from the token table to the statistics.
        out: As in :func:`layer_forward`.
    """
    has_bad_id, (num_tokens, width) = np.zeros(1, np.int64), out.shape
    streams = is_streamed(out, has_rest=out.strides[0] % LANES_BYTES != 0)
    args = *args, streams, bits_of(out), has_bad_id
    run(_write_rows, num_tokens, *args, grain=grain_for(GRAIN, width))
    return not has_bad_id[0]


def check_sizes(
    token: TableRows,
    position: TableRows | None,
    segment: TableRows | None,
    *,
    num_tokens: int,
    width: int,
    statistics: np.ndarray | None = None,
) -> None:
    """Raise a ValueError unless the tables have this width, and each token has a row."""
    if statistics is not None and len(statistics) != num_tokens:
        raise ValueError(
            f"statistics must have a row for each of {num_tokens} tokens, "
            f"got {len(statistics)}"
        )
    for name, pair in (("token", token), ("position", position), ("segment", segment)):
        if pair is None:
            continue
        if pair[0].ndim != 2 or pair[0].shape[1] != width:
            raise ValueError(
                f"the {name} table must have embedding_dim {width} columns, "
                f"got shape {pair[0].shape}"
            )
        # Rows of tokens are not repeated.
        least = num_tokens if name == "token" else min(1, num_tokens)
        if pair[1].size < least:
            raise ValueError(f"{name} rows must be at least {least}, got {pair[1].size}")


def flat_norm(array: np.ndarray | None, width: int) -> np.ndarray | None:
    """Return the weight or bias of a norm as kernels take it."""
    if array is not None and array.shape != (width,):
        raise ValueError(f"the norm must have shape {(width,)}, got {array.shape}")
    return flat(array)


def flat_pair(pair: TableRows | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return a table and its rows as kernels take them.

    Numba compiles a separate loop for each combination of absent tables.
    """
    return (None, None) if pair is None else (flat(pair[0]), flat(pair[1]))


def flat(array: np.ndarray | None) -> np.ndarray | None:
    """Return an array as lanes are loaded from it: contiguous, half precision as bits."""
    if array is None:
        return None
    return bits_of(array if array.flags.c_contiguous else np.ascontiguousarray(array))


# In the functions below ``token``, ``position`` and ``segment`` are tables, and names that
# end in ``_at`` are flat indices of a row's first entry.
@inlined
def prefetch_end(array, start, end):
    """Prefetch the lines of the entries before ``end`` that fill no lanes.

    If there are none, that of the last entry: a row that is not aligned to cache lines ends
    in a line in which no lanes begin.
    """
    size = array.itemsize
    prefetch_bytes(array.ctypes.data + start * size, (end - start) * size)


@inlined
def sum_at(like, d, token, token_at, position, position_at, segment, segment_at, scale):
    """Return the sum of the tables at ``d``, as lanes or one number like ``like``."""
    value = load(like, token, token_at + d) * scale
    if position is not None:
        value = value + load(like, position, position_at + d)
    if segment is not None:
        value = value + load(like, segment, segment_at + d)
    return value


@inlined
def _assemble_row(
    row,
    token,
    token_at,
    position,
    position_at,
    segment,
    segment_at,
    scale,
    out,
    next_at,
    streams,
):
    """Write the sum of the tables' rows to ``row``, and return its mean.

    The row of ``out`` at ``next_at``, which need not exist, is prefetched to be written,
    unless rows are streamed.
    """
    width, zero = row.size, type(scale)(0)
    block = LANES_BYTES // row.itemsize
    whole, sums, rest = width - width % block, zeros(zero), zero
    for d in range(0, whole, block):
        if not streams:
            prefetch_target(sums, out, next_at + d)
        part = sum_at(
            sums, d, token, token_at, position, position_at, segment, segment_at, scale
        )
        store(part, row, d)
        sums = sums + part
    for d in range(whole, width):
        row[d] = sum_at(
            rest, d, token, token_at, position, position_at, segment, segment_at, scale
        )
        rest = rest + row[d]
    return (total(sums) + rest) / type(scale)(width)


@inlined
def _inverse_std(row, mean, eps):
    """Return one over the standard deviation of ``row``, given its mean."""
    # Every number has the type of eps: an int would turn float32 into float64.
    block = LANES_BYTES // row.itemsize
    whole, sums = row.size - row.size % block, zeros(eps)
    for d in range(0, whole, block):
        centered = load(sums, row, d) - mean
        sums = sums + centered * centered
    squares = total(sums)
    for d in range(whole, row.size):
        squares += (row[d] - mean) * (row[d] - mean)
    return type(eps)(1) / np.sqrt(squares / type(eps)(row.size) + eps)


@inlined
def _output_at(like, row, d, mean, rstd, norm_weight, norm_bias):
    """Return the output at ``d``, as lanes or one number like ``like``."""
    value = load(like, row, d)
    if norm_weight is not None:
        value = (value - mean) * rstd * load(like, norm_weight, d)
        value = value + load(like, norm_bias, d)
    return value


@kernel(reorder=True)
def _write_rows(
    ticket,
    token_table,
    ids,
    position_table,
    position_rows,
    segment_table,
    segment_rows,
    norm_weight,
    norm_bias,
    scale,
    eps,
    statistics,
    streams,
    out,
    has_bad_id,
):
    width, zero = out.shape[1], type(scale)(0)
    row, lanes = scratch_row(width, zero), zeros(zero)
    if not is_allocated(row):
        raise MemoryError
    block = LANES_BYTES // row.itemsize
    whole = width - width % block
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            # Read once, checked and used: another thread may change the arrays of rows.
            token, position, segment = ids[i], 0, 0
            is_inside = is_row(token, token_table.shape[0])
            if position_table is not None:
                position = position_rows[i % position_rows.size]
                is_inside = is_inside and is_row(position, position_table.shape[0])
            if segment_table is not None:
                segment = segment_rows[i % segment_rows.size]
                is_inside = is_inside and is_row(segment, segment_table.shape[0])
            if not is_inside:
                # Every thread that writes here writes the same value.
                has_bad_id[0] = 1
                continue
            rstd, start = zero, i * width
            mean = _assemble_row(
                row,
                token_table,
                token * width,
                position_table,
                position * width,
                segment_table,
                segment * width,
                scale,
                out,
                start + width,
                streams,
            )
            if norm_weight is not None:
                rstd = _inverse_std(row, mean, eps)
                if statistics.size:
                    statistics[i, 0], statistics[i, 1] = mean, rstd
            later = ids[min(i + AHEAD, hi - 1)] * width
            for d in range(0, whole, block):
                prefetch_lanes(lanes, token_table, later + d)
                part = _output_at(lanes, row, d, mean, rstd, norm_weight, norm_bias)
                store_or_stream(part, out, start + d, streams)
            prefetch_end(token_table, later + whole, later + width)
            for d in range(whole, width):
                number = _output_at(zero, row, d, mean, rstd, norm_weight, norm_bias)
                store(number, out, start + d)
    free_row(row)
