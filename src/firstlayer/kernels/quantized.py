"""Rows of quantized tables by id, and their sums over bags, decoded on the way.

:mod:`.quantized_rows` defines the formats. A kernel decodes 32 values at a time, from the
address of a row's fields to its output; there is one compiled version for each format.

Another thread may change the ids during a call, so an id is read once, into a variable that
is checked and then used.
"""

from typing import Any

import numpy as np
from numba.extending import overload

from .bags import sum_bags
from .plain import gather_quantized as gather_by_numpy
from .quantized_rows import (
    GROUP,
    UE8M0,
    AffineFields,
    BlockFp8Fields,
    Fp8Fields,
    Int4Fields,
    Int8Fields,
    Q4Fields,
    Q4KFields,
    Q8Fields,
    QuantizedRows,
)
from .runtime.aligned import LINE
from .runtime.compile import inlined, internal, is_row, kernel
from .runtime.encoded import (
    bfloat16_at,
    byte_at,
    e4m3,
    float16_at,
    float32_at,
    multiply_add,
    nibbles,
    packed,
    prefetch_at,
    shifted_nibbles,
    signed_bytes,
    split_nibbles,
    unsigned_bytes,
    zeros,
)
from .runtime.lanes import is_streamed, store, store_or_stream
from .runtime.pool import grain_for, pieces, run
from .runtime.scratch import free_row, is_allocated, scratch_row

# Number of ids between the row that is decoded and the one that is prefetched.
AHEAD = 32
# Minimum number of bytes of output, and of values in bags, per thread.
GRAIN, BAG_GRAIN = 1 << 18, 1 << 16
# Stands for weights or divisors that are not given.
_ABSENT = np.empty(0, np.float32)


def gather_quantized(rows: QuantizedRows, ids: np.ndarray, out: np.ndarray) -> bool:
    """Write the rows of ``ids`` to ``out``, and return whether all are in range.

    If one is not, ``out`` is unspecified.

    Args:
        rows: The table. The last axis of its arrays is contiguous. Rows that are too short
            for the kernels are decoded by NumPy.
        ids: Rows of the table.
        out: Contiguous float32 array.
    """
    if rows.last_start < 0:
        return gather_by_numpy(rows, ids, out)
    has_bad_id = np.zeros(1, np.int64)
    row_bytes = max(1, out.strides[0])
    run(
        _gather,
        ids.size,
        rows.fields,
        len(rows.weight),
        ids,
        rows.last_start,
        out,
        is_streamed(out, has_rest=out.shape[1] % GROUP != 0),
        has_bad_id,
        grain=grain_for(GRAIN, row_bytes),
    )
    return not has_bad_id[0]


def sum_quantized_bags(
    rows: QuantizedRows,
    ids: np.ndarray,
    bounds: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    divisors: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return the sum of each bag's rows, or None if an id is out of range.

    Args:
        rows: The table. The last axis of its arrays is contiguous.
        ids: Rows of the table, bag after bag.
        bounds: Start of each bag in ``ids``, and the end of the last. They are not checked.
        weights: Factor of each id, in float32.
        divisors: Divisor of each bag's sum, in float32.
    """
    if rows.last_start < 0:
        looked_up = np.empty((ids.size, rows.width), np.float32)
        if not gather_quantized(rows, ids, looked_up):
            return None
        every = np.arange(ids.size)
        return sum_bags(looked_up, every, bounds, weights=weights, divisors=divisors)
    out = np.empty((bounds.size - 1, rows.width), np.float32)
    has_bad_id = np.zeros(1, np.int64)
    run(
        _sum,
        bounds.size - 1,
        rows.fields,
        len(rows.weight),
        ids,
        bounds,
        _ABSENT if weights is None else weights,
        _ABSENT if divisors is None else divisors,
        rows.last_start,
        out,
        has_bad_id,
        grain=grain_for(BAG_GRAIN, max(ids.size * rows.width, out.size), len(out)),
    )
    return None if has_bad_id[0] else out


@inlined
def _decode_int8(rows, row, column):
    scale = float32_at(rows.scale + row * rows.scale_stride)
    bias = float32_at(rows.bias + row * rows.bias_stride)
    values = unsigned_bytes(rows.weight + row * rows.weight_stride + column)
    return multiply_add(values, scale, bias)


@internal
def _group_of(column, group_size):
    """Return the group of a column."""
    # A division by a number that is not a constant takes as long as decoding a group.
    if group_size == GROUP:
        return column // GROUP
    return column // group_size


@internal
def _group_number(address, index, kind):
    """Return the number at ``index`` of an array of dtype ``SCALE_KINDS[kind]``."""
    if kind == 2:
        return bfloat16_at(address + 2 * index)
    if kind == 1:
        return float16_at(address + 2 * index)
    return float32_at(address + 4 * index)


@inlined
def _decode_int4(rows, row, column):
    group, kind = _group_of(column, rows.group_size), rows.scale_kind
    scale = _group_number(rows.scale + row * rows.scale_stride, group, kind)
    bias = _group_number(rows.bias + row * rows.bias_stride, group, kind)
    values = nibbles(rows.weight + row * rows.weight_stride + column // 2)
    return multiply_add(values, scale, bias)


@inlined
def _decode_affine(rows, row, column):
    group, kind = _group_of(column, rows.group_size), rows.scale_kind
    scale = _group_number(rows.scale + row * rows.scale_stride, group, kind)
    bias = _group_number(rows.bias + row * rows.bias_stride, group, kind)
    start = rows.weight + row * rows.weight_stride + column * rows.bits // 8
    return multiply_add(packed(start, rows.bits), scale, bias)


@inlined
def _decode_fp8(rows, row, column):
    return e4m3(rows.weight + row * rows.weight_stride + column) * rows.table_scale


@inlined
def _decode_block_fp8(rows, row, column):
    scale = UE8M0[byte_at(rows.scale + row * rows.scale_stride + column // GROUP)]
    return e4m3(rows.weight + row * rows.weight_stride + column) * scale


@inlined
def _decode_q8(rows, row, column):
    block = rows.weight + row * rows.weight_stride + column // 32 * 34
    return signed_bytes(block + 2) * float16_at(block)


@inlined
def _decode_q4(rows, row, column):
    block = rows.weight + row * rows.weight_stride + column // 32 * 18
    return (split_nibbles(block + 2) - np.float32(8)) * float16_at(block)


@internal
def _q4_k_numbers(address, group):
    """Return the 6-bit scale and minimum of a group."""
    if group < 4:
        return byte_at(address + group) & 63, byte_at(address + group + 4) & 63
    pair = byte_at(address + group + 4)
    scale = (pair & 15) | (byte_at(address + group - 4) >> 6 << 4)
    return scale, (pair >> 4) | (byte_at(address + group) >> 6 << 4)


@inlined
def _decode_q4_k(rows, row, column):
    block = rows.weight + row * rows.weight_stride + column // 256 * 144
    group = column % 256 // 32
    scale, least = _q4_k_numbers(block + 4, group)
    values = shifted_nibbles(block + 16 + group // 2 * 32, group % 2 * 4)
    d, dmin = float16_at(block), float16_at(block + 2)
    return values * (d * np.float32(scale)) - dmin * np.float32(least)


_DECODERS: dict[type, Any] = {
    Int8Fields: _decode_int8,
    AffineFields: _decode_affine,
    Int4Fields: _decode_int4,
    Fp8Fields: _decode_fp8,
    BlockFp8Fields: _decode_block_fp8,
    Q8Fields: _decode_q8,
    Q4Fields: _decode_q4,
    Q4KFields: _decode_q4_k,
}


def _decode(rows: Any, row: Any, column: Any) -> Any:
    """Return 32 values of a row from ``column`` on; ``overload`` below compiles it."""


@overload(_decode, inline="always")
def _(rows, row, column):
    decode = _DECODERS[rows.instance_class]
    return lambda rows, row, column: decode(rows, row, column)


@inlined
def _prefetch(rows, row):
    start = rows.weight + row * rows.weight_stride
    # The same number of steps for every row, wherever it starts in a line: a loop whose
    # length varies is mispredicted for most rows.
    for byte in range(0, rows.weight_bytes, LINE):
        prefetch_at(start + byte)
    prefetch_at(start + rows.weight_bytes - 1)
    prefetch_at(rows.scale + row * rows.scale_stride)
    prefetch_at(rows.bias + row * rows.bias_stride)


@inlined
def _prefetch_ahead(rows, ids, i, end):
    if i + AHEAD < end:
        _prefetch(rows, ids[i + AHEAD])


@kernel()
def _gather(ticket, rows, num_rows, ids, last, out, streams, has_bad_id):
    width = out.shape[1]
    part = scratch_row(GROUP, np.float32(0))
    if not is_allocated(part):
        raise MemoryError
    for lo, hi in pieces(ticket):
        for i in range(lo, min(lo + AHEAD, hi)):
            _prefetch(rows, ids[i])
        for i in range(lo, hi):
            _prefetch_ahead(rows, ids, i, hi)
            row = ids[i]
            if not is_row(row, num_rows):
                # Every thread that writes here writes the same value.
                has_bad_id[0] = 1
                continue
            for column in range(0, width, GROUP):
                # The last 32 values of a width that is no multiple overlap those before.
                start = min(column, last)
                lanes = _decode(rows, row, start)
                if start + GROUP <= width:
                    store_or_stream(lanes, out, i * width + start, streams)
                else:
                    store(lanes, part, 0)
                    for d in range(width - start):
                        out[i, start + d] = part[d]
    free_row(part)


@kernel()
def _sum(ticket, rows, num_rows, ids, bounds, weights, divisors, last, out, has_bad_id):
    width = out.shape[1]
    one = np.float32(1)
    part = scratch_row(GROUP, one)
    if not is_allocated(part):
        raise MemoryError
    for lo, hi in pieces(ticket):
        final = bounds[hi]
        for i in range(bounds[lo], min(bounds[lo] + AHEAD, final)):
            _prefetch(rows, ids[i])
        for bag in range(lo, hi):
            divisor = divisors[bag] if divisors.size else one
            first, end = bounds[bag], bounds[bag + 1]
            # Four sums at a time stay in registers; each pass reads all ids of the bag.
            wide = width // (4 * GROUP) * (4 * GROUP)
            for column in range(0, wide, 4 * GROUP):
                a = b = c = d = zeros()
                for i in range(first, end):
                    if column == 0:
                        _prefetch_ahead(rows, ids, i, final)
                    row = ids[i]
                    if not is_row(row, num_rows):
                        # Every thread that writes here writes the same value.
                        has_bad_id[0] = 1
                        continue
                    if weights.size:
                        factor = weights[i]
                        a = a + _decode(rows, row, column) * factor
                        b = b + _decode(rows, row, column + GROUP) * factor
                        c = c + _decode(rows, row, column + 2 * GROUP) * factor
                        d = d + _decode(rows, row, column + 3 * GROUP) * factor
                    else:
                        a = a + _decode(rows, row, column)
                        b = b + _decode(rows, row, column + GROUP)
                        c = c + _decode(rows, row, column + 2 * GROUP)
                        d = d + _decode(rows, row, column + 3 * GROUP)
                start = bag * width + column
                store(a / divisor, out, start)
                store(b / divisor, out, start + GROUP)
                store(c / divisor, out, start + 2 * GROUP)
                store(d / divisor, out, start + 3 * GROUP)
            for column in range(wide, width, GROUP):
                start = min(column, last)
                total = zeros()
                for i in range(first, end):
                    if column == 0:
                        _prefetch_ahead(rows, ids, i, final)
                    row = ids[i]
                    if not is_row(row, num_rows):
                        has_bad_id[0] = 1
                        continue
                    factor = weights[i] if weights.size else one
                    total = total + _decode(rows, row, start) * factor
                total = total / divisor
                if start + GROUP <= width:
                    store(total, out, bag * width + start)
                else:
                    store(total, part, 0)
                    for k in range(width - start):
                        out[bag, start + k] = part[k]
    free_row(part)
