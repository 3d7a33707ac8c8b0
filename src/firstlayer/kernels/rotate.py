"""Rotation of feature pairs: ``firstlayer.positions.rotary.rotate`` as a kernel.

Each row of queries or keys has the index of its phases, so heads and sequences can share
them, and rows are processed in memory order. Products and sums are those of ``rotate``, in
the same order: float32 and float64 give the same bits, half precision is upcast and rounded
once.
"""

import numpy as np

from .runtime.compile import bits_of, kernel, prefetch_row
from .runtime.lanes import (
    SHORT_LANES_BYTES,
    evens,
    interleave_lower,
    interleave_upper,
    is_streamed,
    load,
    odds,
    short_zeros,
    store,
    stream,
)
from .runtime.pool import grain_for, pieces, run

# Number of bytes between the row that is rotated and the one that is prefetched: a page,
# at whose end the prefetches of the hardware stop.
AHEAD_BYTES = 1 << 12
# Minimum number of features per thread.
GRAIN = 1 << 17


def rotate_pairs(
    x: np.ndarray,
    phases: np.ndarray,
    *,
    which: np.ndarray,
    read_half: bool,
    write_half: bool,
) -> np.ndarray:
    """Rotate the first ``2 * pairs`` features of each row and copy the rest.

    Args:
        x: Contiguous, ``(rows, head_dim)``, in float64, float32, float16 or bfloat16.
        phases: Cosines of all pairs, then sines, ``(phases, 2 * pairs)``, in the compute
            dtype of ``x``.
        which: Row of ``phases`` for each row of ``x``, int64. A shorter array is repeated.
        read_half: Whether pair ``i`` of ``x`` is features ``i`` and ``i + pairs``;
            otherwise it is ``2 * i`` and ``2 * i + 1``.
        write_half: The same for the result.

    Example:
        >>> x, quarter = np.array([[1.0, 2.0]]), np.array([[0.0, 1.0]])
        >>> rotate_pairs(x, quarter, which=np.array([0]), read_half=True, write_half=True)
        array([[-2.,  1.]])
    """
    out = np.empty_like(x)
    loop = _LOOPS[read_half, write_half]
    # Streaming stores need each half of a row aligned too.
    has_rest = x.shape[1] > phases.shape[1]
    streams = is_streamed(out, has_rest=has_rest) and (
        phases.shape[1] * phases.itemsize % (2 * SHORT_LANES_BYTES) == 0
    )
    args = bits_of(x), phases, which, streams, bits_of(out)
    run(loop, len(x), *args, grain=grain_for(GRAIN, x.shape[1]))
    return out


def _loop(read_half: bool, write_half: bool):
    # One loop for each combination of layouts. Pairs that fill no lanes are done singly.
    @kernel()
    def loop(ticket, x, phases, which, streams, out):
        pairs, width, zero = phases.shape[1] // 2, x.shape[1], phases.dtype.type(0)
        lanes, block = short_zeros(zero), SHORT_LANES_BYTES // phases.itemsize
        whole = pairs - pairs % block
        ahead = 1 + AHEAD_BYTES // max(1, width * x.itemsize)
        for lo, hi in pieces(ticket):
            at = lo % max(1, which.size)
            for row in range(lo, hi):
                t, a = which[at] * phases.shape[1], row * width
                at = at + 1 if at + 1 < which.size else 0
                prefetch_row(x, row + ahead)
                for i in range(0, whole, block):
                    if read_half:
                        u, v = load(lanes, x, a + i), load(lanes, x, a + i + pairs)
                    else:
                        first = load(lanes, x, a + 2 * i)
                        second = load(lanes, x, a + 2 * i + block)
                        u, v = evens(first, second), odds(first, second)
                    c, s = load(lanes, phases, t + i), load(lanes, phases, t + i + pairs)
                    y, z = u * c - v * s, v * c + u * s
                    at_y, at_z = a + i, a + i + pairs
                    if not write_half:
                        y, z = interleave_lower(y, z), interleave_upper(y, z)
                        at_y, at_z = a + 2 * i, a + 2 * i + block
                    if streams:
                        stream(y, out, at_y)
                        stream(z, out, at_z)
                    else:
                        store(y, out, at_y)
                        store(z, out, at_z)
                for i in range(whole, pairs):
                    of = (i, i + pairs) if read_half else (2 * i, 2 * i + 1)
                    to = (i, i + pairs) if write_half else (2 * i, 2 * i + 1)
                    p, q = load(zero, x, a + of[0]), load(zero, x, a + of[1])
                    cos, sin = load(zero, phases, t + i), load(zero, phases, t + i + pairs)
                    store(p * cos - q * sin, out, a + to[0])
                    store(q * cos + p * sin, out, a + to[1])
                for i in range(2 * pairs, width):
                    out[row, i] = x[row, i]

    return loop


_LOOPS = {
    (read, write): _loop(read, write) for read in (True, False) for write in (True, False)
}
