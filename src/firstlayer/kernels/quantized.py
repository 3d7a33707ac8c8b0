"""Rows of quantized tables by id, and their sums over bags, decoded on the way.

:mod:`.quantized_rows` defines the formats. A kernel decodes 32 values at a time, from the
address of a row's fields to its output; there is one compiled version for each format.

Another thread may change the ids during a call, so an id is read once, into a variable that
is checked and then used.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from .bags import sum_bags
from .quantized_rows import (
    GROUP,
    UE8M0,
    AffineRows,
    BlockFp8Rows,
    Fp8Rows,
    Int8Rows,
    Q4KRows,
    Q4Rows,
    Q8Rows,
    QuantizedRows,
)
from .runtime.compile import LINE, inlined, is_row, kernel
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
)
from .runtime.lanes import is_streamed, load, store, store_or_stream
from .runtime.pool import grain_for, pieces, run

# Number of bytes of output between the row that is decoded and the one that is prefetched.
AHEAD_BYTES = 1 << 13
# Number of ids between the row that is added and the one that is prefetched.
AHEAD = 16
# Minimum number of bytes of output, and of values in bags, per thread.
GRAIN, BAG_GRAIN = 1 << 18, 1 << 16


def gather_quantized(rows: QuantizedRows, ids: np.ndarray, out: np.ndarray) -> bool:
    """Write the rows of ``ids`` to ``out``, and return whether all are in range.

    If one is not, ``out`` is unspecified.

    Args:
        rows: The table. The last axis of its arrays is contiguous.
        ids: Rows of the table.
        out: Contiguous float32 array.
    """
    fields = _fields_of(rows)
    if fields is None:
        ids = ids.copy()
        if ids.size and not (ids.min() >= 0 and ids.max() < len(rows.weight)):
            return False
        out[:] = rows.take(ids)
        return True
    has_bad_id = np.zeros(1, np.int64)
    row_bytes = max(1, out.strides[0])
    run(
        _gather,
        ids.size,
        fields,
        len(rows.weight),
        ids,
        1 + AHEAD_BYTES // row_bytes,
        _last_start(rows),
        out,
        is_streamed(out),
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
    fields = _fields_of(rows)
    if fields is None:
        looked_up = np.empty((ids.size, rows.width), np.float32)
        if not gather_quantized(rows, ids, looked_up):
            return None
        every = np.arange(ids.size)
        return sum_bags(looked_up, every, bounds, weights=weights, divisors=divisors)
    out, absent = (
        np.empty((bounds.size - 1, rows.width), np.float32),
        np.empty(0, np.float32),
    )
    has_bad_id = np.zeros(1, np.int64)
    run(
        _sum,
        bounds.size - 1,
        fields,
        len(rows.weight),
        ids,
        bounds,
        absent if weights is None else weights,
        absent if divisors is None else divisors,
        _last_start(rows),
        out,
        has_bad_id,
        grain=grain_for(BAG_GRAIN, max(ids.size * rows.width, out.size), len(out)),
    )
    return None if has_bad_id[0] else out


class _Fields(NamedTuple):
    """Addresses of a table's fields, and the distances in bytes between rows.

    A subclass marks the format, so that kernels are compiled for it.
    """

    weight: int
    weight_stride: int
    weight_bytes: int
    scale: int
    scale_stride: int
    bias: int
    bias_stride: int
    scale_kind: int
    bits: int
    group_size: int
    table_scale: Any


class _Int8(_Fields):
    pass


class _Affine(_Fields):
    pass


class _Int4(_Fields):
    pass


class _Fp8(_Fields):
    pass


class _BlockFp8(_Fields):
    pass


class _Q8(_Fields):
    pass


class _Q4(_Fields):
    pass


class _Q4K(_Fields):
    pass


_KINDS = {
    Int8Rows: _Int8,
    AffineRows: _Affine,
    Fp8Rows: _Fp8,
    BlockFp8Rows: _BlockFp8,
    Q8Rows: _Q8,
    Q4Rows: _Q4,
    Q4KRows: _Q4K,
}
# Formats with an address for every value, whose last 32 values can be read at any start.
_BY_VALUE = Int8Rows, Fp8Rows
_SCALE_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


def _last_start(rows: QuantizedRows) -> int:
    """Return the largest column at which 32 values can be decoded."""
    return rows.width - GROUP if isinstance(rows, _BY_VALUE) else rows.width


def _fields_of(rows: QuantizedRows) -> _Fields | None:
    """Return the addresses of a table; None if its rows are too short for the kernels."""
    if isinstance(rows, _BY_VALUE) and rows.width < GROUP:
        return None
    weight, weight_stride = _address(rows.weight)
    # Formats without a scale or bias of their own get another valid address to prefetch.
    scale = bias = weight, weight_stride
    kind, scale_kind, bits, group_size, table_scale = _KINDS[type(rows)], 0, 8, GROUP, 1.0
    if isinstance(rows, Fp8Rows):
        table_scale = rows.scale
    elif isinstance(rows, Int8Rows | AffineRows):
        scale, bias = _address(rows.scale), _address(rows.bias)
    elif isinstance(rows, BlockFp8Rows):
        scale = _address(rows.scale)
    if isinstance(rows, AffineRows):
        kind = _Int4 if rows.bits == 4 else _Affine
        scale_kind = _SCALE_KINDS[rows.scale.dtype.name]
        bits, group_size = rows.bits, rows.group_size
    return kind(
        weight,
        weight_stride,
        rows.weight.shape[1],
        *scale,
        *bias,
        scale_kind,
        bits,
        group_size,
        np.float32(table_scale),
    )


def _address(array: np.ndarray) -> tuple[int, int]:
    return array.__array_interface__["data"][0], array.strides[0]


@inlined
def _decode_int8(rows, row, column):
    scale = float32_at(rows.scale + row * rows.scale_stride)
    bias = float32_at(rows.bias + row * rows.bias_stride)
    values = unsigned_bytes(rows.weight + row * rows.weight_stride + column)
    return multiply_add(values, scale, bias)


@inlined
def _group_number(address, index, kind):
    """Return the number at ``index`` of an array of ``_SCALE_KINDS[kind]``."""
    if kind == 2:
        return bfloat16_at(address + 2 * index)
    if kind == 1:
        return float16_at(address + 2 * index)
    return float32_at(address + 4 * index)


@inlined
def _decode_int4(rows, row, column):
    group, kind = column // rows.group_size, rows.scale_kind
    scale = _group_number(rows.scale + row * rows.scale_stride, group, kind)
    bias = _group_number(rows.bias + row * rows.bias_stride, group, kind)
    values = nibbles(rows.weight + row * rows.weight_stride + column // 2)
    return multiply_add(values, scale, bias)


@inlined
def _decode_affine(rows, row, column):
    group, kind = column // rows.group_size, rows.scale_kind
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


@inlined
def _decode_q4_k(rows, row, column):
    block = rows.weight + row * rows.weight_stride + column // 256 * 144
    group = column % 256 // 32
    numbers = block + 4
    if group < 4:
        scale, least = byte_at(numbers + group) & 63, byte_at(numbers + group + 4) & 63
    else:
        pair = byte_at(numbers + group + 4)
        scale = (pair & 15) | (byte_at(numbers + group - 4) >> 6 << 4)
        least = (pair >> 4) | (byte_at(numbers + group) >> 6 << 4)
    values = shifted_nibbles(block + 16 + group // 2 * 32, group % 2 * 4)
    d, dmin = float16_at(block), float16_at(block + 2)
    return values * (d * np.float32(scale)) - dmin * np.float32(least)


_DECODERS: dict[type, Any] = {
    _Int8: _decode_int8,
    _Affine: _decode_affine,
    _Int4: _decode_int4,
    _Fp8: _decode_fp8,
    _BlockFp8: _decode_block_fp8,
    _Q8: _decode_q8,
    _Q4: _decode_q4,
    _Q4K: _decode_q4_k,
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
    for byte in range(0, rows.weight_bytes, LINE):
        prefetch_at(start + byte)
    prefetch_at(rows.scale + row * rows.scale_stride)
    prefetch_at(rows.bias + row * rows.bias_stride)


@kernel()
def _gather(ticket, rows, num_rows, ids, ahead, last, out, streams, has_bad_id):
    width = out.shape[1]
    part = np.empty(GROUP, np.float32)
    for lo, hi in pieces(ticket):
        for i in range(lo, hi):
            _prefetch(rows, ids[min(i + ahead, hi - 1)])
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


@kernel()
def _sum(ticket, rows, num_rows, ids, bounds, weights, divisors, last, out, has_bad_id):
    width, end = out.shape[1], ids.size
    total = np.empty(-(-width // GROUP) * GROUP, np.float32)
    for lo, hi in pieces(ticket):
        for bag in range(lo, hi):
            total[:] = 0
            for i in range(bounds[bag], bounds[bag + 1]):
                if i + AHEAD < end:
                    _prefetch(rows, ids[i + AHEAD])
                row = ids[i]
                if not is_row(row, num_rows):
                    has_bad_id[0] = 1
                    continue
                for column in range(0, width, GROUP):
                    lanes = _decode(rows, row, min(column, last))
                    if weights.size:
                        lanes = lanes * weights[i]
                    store(load(lanes, total, column) + lanes, total, column)
            if divisors.size:
                divisor = divisors[bag]
                for d in range(total.size):
                    total[d] /= divisor
            for column in range(0, width, GROUP):
                start = min(column, last)
                for d in range(min(GROUP, width - start)):
                    out[bag, start + d] = total[column + d]
