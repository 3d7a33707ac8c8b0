"""The kernels of the layers as plain NumPy, for processes without Numba's compiler.

``NUMBA_DISABLE_JIT=1`` turns the compiler off. The functions here have the names, arguments
and results of the compiled ones, up to rounding, and run on one thread. Row optimizers and
the training of word vectors have no plain version: see ``require_compiler``.
"""

import ctypes

import numpy as np

from .layer.backward_plan import BackwardPlan
from .layer.forward import TableRows, check_sizes
from .phases import LIMIT
from .quantized_rows import QuantizedRows


def ascends(ids: np.ndarray) -> bool:
    """Return whether each id is larger than the one before it."""
    return bool((ids[1:] > ids[:-1]).all())


def gather_rows(
    weight: np.ndarray,
    ids: np.ndarray,
    *,
    out: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return ``weight[ids]`` for flat ids, or None if one of them is out of range."""
    ids = ids.copy()
    if not _all_in_range(ids, len(weight)):
        return None
    if out is None:
        return weight[ids]
    out[:] = weight[ids]
    return out


def locate_rows(
    ids: np.ndarray,
    starts: np.ndarray,
    bases: np.ndarray,
    row_bytes: int,
    offsets: np.ndarray,
) -> np.ndarray | None:
    """Return the address of each row, or None if an id or an offset is out of range."""
    ids = ids.copy()
    if not _all_in_range(ids, offsets.size or starts[-1]):
        return None
    if offsets.size:
        found = offsets[ids]
        inside = _all_in_range(found, bases[1] - row_bytes + 1)
        return bases[0] + found if inside else None
    segment = np.searchsorted(starts, ids, side="right") - 1
    return bases[segment] + (ids - starts[segment]) * row_bytes


def copy_rows_at(addresses: np.ndarray, out: np.ndarray) -> None:
    """Copy a row from each address to ``out``, an array of C-contiguous rows."""
    for row, address in enumerate(addresses.tolist()):
        ctypes.memmove(out.ctypes.data + row * out.strides[0], address, out.strides[0])


def rows_missing(addresses: np.ndarray, row_bytes: int) -> bool:
    """Return False: rows are read when they are copied, one page after the other."""
    return False


def request_rows(addresses: np.ndarray, row_bytes: int, *, wait: bool = False) -> None:
    """Do nothing: see :func:`rows_missing`."""


def group_by_id(
    ids: np.ndarray, labels: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an order that brings equal ids together, the groups' bounds, and their ids."""
    ids = ids.copy()
    if ids.size and ids.min() < 0:
        raise IndexError(f"ids must not be negative, got {ids.min()}")
    order = np.argsort(ids, kind="stable")
    unique, starts = np.unique(ids[order], return_index=True)
    order = order if labels is None else labels[order]
    return order, np.append(starts, ids.size), unique


def sum_groups(
    values: np.ndarray, order: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return the sum of ``values[order[starts[g]:ends[g]]]`` for each group ``g``."""
    sums = np.zeros((starts.size, values.shape[1]), _compute_dtype(values))
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        sums[group] = values[order[start:end]].astype(sums.dtype).sum(axis=0)
    return sums


def sum_runs(values: np.ndarray, starts: np.ndarray, *, into: np.ndarray) -> None:
    """Write the sum of ``values[starts[g]:starts[g + 1]]`` to ``values[into[g]]``."""
    for group, row in enumerate(into):
        values[row] = values[starts[group] : starts[group + 1]].sum(axis=0)


def sum_words(words: np.ndarray) -> np.ndarray:
    """Return the sum of each row of uint64 numbers, modulo 2 ** 64."""
    return np.add.reduce(words, axis=1)


def upcast_rows(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return rows of a half-precision table as float32."""
    return table[rows].astype(np.float32)


def store_rows(
    values: np.ndarray,
    table: np.ndarray,
    rows: np.ndarray,
    *,
    noise: None,
    noise_rows: None = None,
) -> None:
    """Write ``values`` to ``table[rows]`` in the dtype of the table."""
    table[rows] = values.astype(table.dtype)


def sum_bags(
    table: np.ndarray,
    ids: np.ndarray,
    bounds: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    divisors: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return the sum of each bag's rows, or None if an id is out of range."""
    dtype, ids = _compute_dtype(table), ids.copy()
    if not _all_in_range(ids, len(table)):
        return None
    sums = np.zeros((bounds.size - 1, table.shape[1]), dtype)
    for bag, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        rows = table[ids[start:end]].astype(dtype)
        if weights is not None:
            rows = rows * weights[start:end, None]
        sums[bag] = rows.sum(axis=0)
    if divisors is not None:
        sums /= divisors[:, None]
    if out is None:
        return sums.astype(table.dtype)
    out[:] = sums
    return out


def max_bags(
    table: np.ndarray,
    ids: np.ndarray,
    bounds: np.ndarray,
    *,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the maximum of each bag by column, and its index in ``ids``.

    None if an id is out of range.
    """
    ids = ids.copy()
    if not _all_in_range(ids, len(table)):
        return None
    out = np.zeros((bounds.size - 1, table.shape[1]), table.dtype)
    indices = np.full(out.shape, -1, np.int64)
    for bag, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if start < end:
            rows = table[ids[start:end]].astype(_compute_dtype(table))
            if weights is not None:
                rows = rows * weights[start:end, None]
            # argmax takes the first NaN if there is one, otherwise the first maximum.
            best = rows.argmax(axis=0)
            indices[bag] = start + best
            out[bag] = rows[best, np.arange(rows.shape[1])].astype(table.dtype)
    return out, indices


def dot_bags(
    table: np.ndarray, ids: np.ndarray, bounds: np.ndarray, *, others: np.ndarray
) -> np.ndarray | None:
    """Return the dot product of each id's row with its bag's row in ``others``.

    None if an id is out of range.
    """
    ids = ids.copy()
    if not _all_in_range(ids, len(table)):
        return None
    bags = np.repeat(np.arange(bounds.size - 1), np.diff(bounds))
    dots = np.empty(ids.size, others.dtype)
    used = slice(bounds[0], bounds[-1])
    dots[used] = (table[ids[used]].astype(others.dtype) * others[bags]).sum(axis=1)
    return dots


def gather_quantized(rows: QuantizedRows, ids: np.ndarray, out: np.ndarray) -> bool:
    """Write the rows of ``ids`` to ``out``, and return whether all are in range."""
    ids = ids.copy()
    if not _all_in_range(ids, len(rows.weight)):
        return False
    out[:] = rows.take(ids)
    return True


def sum_quantized_bags(
    rows: QuantizedRows,
    ids: np.ndarray,
    bounds: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    divisors: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return the sum of each bag's rows, or None if an id is out of range."""
    ids = ids.copy()
    if not _all_in_range(ids, len(rows.weight)):
        return None
    read, at = np.unique(ids, return_inverse=True)
    return sum_bags(rows.take(read), at, bounds, weights=weights, divisors=divisors)


def digit_phases(positions: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Return the cosines of all pairs, then the sines: ``(rows, 2 * pairs)``."""
    inside = (positions < LIMIT) & (positions > -LIMIT)
    size = np.abs(np.where(inside, positions, 0))
    cos, sin = tables[:, 0, size % 256]
    for place in (1, 2):
        c, s = tables[:, place, size >> 8 * place & 255]
        cos, sin = cos * c - sin * s, sin * c + cos * s
    sin = np.where((positions < 0)[:, None], -sin, sin)
    rows = np.concatenate([cos, sin], axis=1)
    rows[~inside] = np.nan
    return rows


def sinusoid_features(
    positions: np.ndarray,
    tables: np.ndarray,
    *,
    width: int,
    interleaved: bool,
    cos_first: bool,
) -> np.ndarray:
    """Return sinusoidal features, ``(rows, width)``."""
    cos, sin = np.split(digit_phases(positions, tables), 2, axis=1)
    out, half = np.zeros((len(positions), width), tables.dtype), width // 2
    pairs = sin.shape[1]
    if interleaved:
        out[:, int(cos_first) : 2 * half : 2] = sin[:, :half]
        out[:, int(not cos_first) : 2 * half : 2] = cos[:, :half]
        out[:, 2 * half :][:, : pairs - half] = sin[:, half:]
    else:
        parts = [cos[:, :half], sin] if cos_first else [sin, cos[:, :half]]
        out[:, : half + pairs] = np.concatenate(parts, axis=1)
    return out


def rotate_pairs(
    x: np.ndarray,
    phases: np.ndarray,
    *,
    which: np.ndarray,
    read_half: bool,
    write_half: bool,
) -> np.ndarray:
    """Rotate the first ``2 * pairs`` features of each row and copy the rest."""
    pairs, out = phases.shape[1] // 2, x.copy()
    cos, sin = np.split(phases[np.resize(which, len(x))], 2, axis=1)
    u, v = (part.astype(phases.dtype) for part in _halves(x, pairs, read_half))
    first, second = _halves(out, pairs, write_half)
    first[:], second[:] = u * cos - v * sin, v * cos + u * sin
    return out


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
    """Write the layer's output to ``out``, and return whether every row is in range."""
    check_sizes(token, position, segment, num_tokens=len(out), width=out.shape[1])
    token = token[0], token[1].copy()
    position = position and (position[0], position[1].copy())
    segment = segment and (segment[0], segment[1].copy())
    for pair in (token, position, segment):
        if pair is not None and not _all_in_range(pair[1], len(pair[0])):
            return False
    dtype = _compute_dtype(out)
    value = _sum_of_tables(token, position, segment, scale=scale, dtype=dtype)
    if norm is not None:
        weight, bias, eps = norm
        mean, rstd = _row_statistics(value, eps)
        if statistics is not None:
            statistics[:] = np.hstack([mean, rstd])
        value = _normalized(value, mean, rstd)
        value = value * weight.astype(dtype) + bias.astype(dtype)
    out[:] = value.astype(out.dtype)
    return True


def plan_backward(
    ids: np.ndarray | None,
    position_rows: np.ndarray | None,
    *,
    tokens: np.ndarray,
    num_tokens: int,
    skip: int | None,
    shared_rows: int,
) -> BackwardPlan:
    """Return the plan for a backward over ``tokens``: one block, and no partial rows."""
    buffer_rows = unique = np.arange(num_tokens)
    if ids is not None:
        if ids.size and ids.min() < 0:
            raise IndexError(f"ids must not be negative, got {ids.min()}")
        kept = tokens if skip is None else tokens[ids[tokens] != skip]
        unique, indices = np.unique(ids[kept], return_inverse=True)
        buffer_rows = np.full(num_tokens, -1)
        buffer_rows[kept] = indices
    read, position_indices = tokens[:0], None
    if position_rows is not None:
        repeated = np.resize(position_rows, num_tokens)
        read, indices = np.unique(repeated[tokens], return_inverse=True)
        position_indices = np.full(num_tokens, -1)
        position_indices[tokens] = indices
    return BackwardPlan(
        buffer_rows=buffer_rows,
        ids=unique,
        repeated=tokens[:0],
        partial_starts=np.array([unique.size]),
        token_order=tokens,
        block_starts=np.array([0, tokens.size]),
        unique_position_rows=read,
        position_indices=position_indices,
        splits_positions=False,
    )


def layer_backward(
    token: TableRows,
    *,
    position: TableRows | None = None,
    segment: TableRows | None = None,
    scale: float,
    norm: tuple[np.ndarray, np.ndarray] | None,
    dy: np.ndarray,
    plan: BackwardPlan,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of token rows, of position rows, and of shared rows."""
    dtype, tokens, width = _compute_dtype(dy), plan.token_order, dy.shape[1]
    num_segments = 0 if segment is None else len(segment[0])
    shared = np.zeros((2 + num_segments, width), dtype)
    dx = dy[tokens].astype(dtype)
    if norm is not None:
        value = _sum_of_tables(token, position, segment, scale=scale, dtype=dtype)[tokens]
        mean, rstd = np.split(norm[1][tokens], 2, axis=1)
        normalized = _normalized(value, mean, rstd)
        shared[0], shared[1] = (dx * normalized).sum(axis=0), dx.sum(axis=0)
        dx = dx * norm[0].astype(dtype)
        along = (dx * normalized).mean(axis=1, keepdims=True)
        dx = (dx - dx.mean(axis=1, keepdims=True) - normalized * along) * rstd
    if segment is not None:
        np.add.at(shared[2:], np.resize(segment[1], len(dy))[tokens], dx)
    dposition = np.zeros((plan.unique_position_rows.size, width), dtype)
    if plan.position_indices is not None:
        np.add.at(dposition, plan.position_indices[tokens], dx)
    buffer, rows = np.zeros((plan.ids.size, width), dtype), plan.buffer_rows[tokens]
    np.add.at(buffer, rows[rows >= 0], dtype(scale) * dx[rows >= 0])
    return buffer, dposition, shared


def _compute_dtype(x: np.ndarray) -> type[np.float64] | type[np.float32]:
    return np.float64 if x.dtype == np.float64 else np.float32


def _all_in_range(ids: np.ndarray, num_embeddings: int) -> bool:
    return not ids.size or bool(ids.min() >= 0 and ids.max() < num_embeddings)


def _halves(x: np.ndarray, pairs: int, half: bool) -> tuple[np.ndarray, np.ndarray]:
    if half:
        return x[:, :pairs], x[:, pairs : 2 * pairs]
    return x[:, 0 : 2 * pairs : 2], x[:, 1 : 2 * pairs : 2]


def _sum_of_tables(
    token: TableRows,
    *others: TableRows | None,
    scale: float,
    dtype: type[np.float64] | type[np.float32],
) -> np.ndarray:
    table, ids = token
    value = table[ids].astype(dtype) * dtype(scale)
    for pair in others:
        if pair is not None:
            value = value + pair[0][np.resize(pair[1], ids.size)].astype(dtype)
    return value


def _row_statistics(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each row, and one over its standard deviation."""
    mean = x.mean(axis=1, keepdims=True)
    variance = np.square(x - mean).mean(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return mean, 1 / np.sqrt(variance + x.dtype.type(eps))


def _normalized(x: np.ndarray, mean: np.ndarray, rstd: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (x - mean) * rstd


def parse_text_rows(
    text: np.ndarray, bounds: np.ndarray, out: np.ndarray, word_ends: np.ndarray
) -> None:
    """Leave every line to the caller, which parses it in Python."""
    word_ends[:] = -1


def mean_subword_rows(
    text: np.ndarray,
    bounds: np.ndarray,
    own_rows: np.ndarray,
    table: np.ndarray,
    *,
    buckets: int,
    lengths: tuple[int, int],
    out: np.ndarray,
    counts: np.ndarray,
    bucket_rows: np.ndarray | None = None,
) -> None:
    """Write the mean row of each word and its n-grams, and the number of rows in it."""
    if bucket_rows is None:
        all_rows = np.arange(len(table) - buckets, len(table))
        bucket_rows = np.array([np.arange(buckets), all_rows])
    row_of = dict(zip(*bucket_rows.tolist(), strict=True))
    for word, own in enumerate(own_rows):
        content = text[bounds[word] : bounds[word + 1]].tobytes()
        hashes = subword_hashes(content, lengths) if buckets > 0 else []
        rows = [int(own)] if 0 <= own < len(table) else []
        kept = (hashed % buckets for hashed in hashes)
        rows += [row_of[bucket] for bucket in kept if bucket in row_of]
        total = np.zeros(table.shape[1], np.float32)
        for row in rows:
            total += table[row]
        out[word], counts[word] = total / np.float32(max(len(rows), 1)), len(rows)


def subword_hashes(word: bytes, lengths: tuple[int, int]) -> list[int]:
    """Return the hash of each character n-gram of a word with its brackets."""
    # A character is a byte and those that continue it.
    starts = [i for i, byte in enumerate(word) if byte & 0xC0 != 0x80] + [len(word)]
    hashes = []
    for first in range(len(starts) - 1):
        for length in range(lengths[0], lengths[1] + 1):
            last = first + length
            if last >= len(starts):
                break
            if length == 1 and (first == 0 or last == len(starts) - 1):
                continue
            hashed = 2166136261
            for byte in word[starts[first] : starts[last]]:
                signed = byte | 0xFFFFFF00 if byte >= 128 else byte
                hashed = (hashed ^ signed) * 16777619 & 0xFFFFFFFF
            hashes.append(hashed)
    return hashes
