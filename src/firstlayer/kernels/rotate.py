"""Turning the feature pairs of many rows: ``firstlayer.positions.rotary.rotate`` as one compiled loop.

Each row of queries or keys names the turn it gets, so turns can be shared by heads, by
sequences or by nobody, and rows are taken in the order they lie in memory. Products and
sums are those of ``rotate``, in the same order: float32 and float64 give the same bits,
half precision is widened and rounded once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .runtime.compile import bits_of, kernel
from .runtime.lanes import (
    SHORT,
    evens,
    is_streamed,
    load,
    lower_zipped,
    odds,
    short_zeros,
    store,
    upper_zipped,
    write,
)
from .runtime.pool import run
from .runtime.share import pieces


def rotate_pairs(
    x: np.ndarray, turn: np.ndarray, *, which: np.ndarray, read_half: bool, write_half: bool
) -> np.ndarray:
    """Turn the first ``2 * pairs`` features of each row and copy the rest.

    Args:
        x: Contiguous, ``(rows, head_dim)``, in float64, float32, float16 or bfloat16.
        turn: The cosines of all pairs, then the sines, ``(phases, 2 * pairs)``, in the dtype
            that ``x`` is worked on in.
        which: The row of ``turn`` for each row of ``x``, int64; if it is shorter than
            ``x``, it begins again at its end.
        read_half: Whether pair ``i`` of ``x`` is features ``i`` and ``i + pairs``;
            otherwise it is ``2 * i`` and ``2 * i + 1``.
        write_half: The same for the result.

    Example:
        >>> x, quarter = np.array([[1.0, 2.0]]), np.array([[0.0, 1.0]])
        >>> rotate(x, quarter, which=np.array([0]), read_half=True, write_half=True)
        array([[-2.,  1.]])
    """
    out = np.empty_like(x)
    loop = _LOOPS[read_half, write_half]
    # Handing half of 2**18 features to another thread gains about what it costs.
    grain = 1 + 2**17 // x.shape[1]
    # Then every half of a row begins where one can write past the caches, too.
    streams = is_streamed(out) and turn.shape[1] * turn.itemsize % (2 * SHORT) == 0
    run(loop, len(x), bits_of(x), turn, which, streams, bits_of(out), grain=grain)
    return out


def _loop(read_half: bool, write_half: bool) -> Callable[..., Any]:
    # One loop for each way in and out. What is left of the lanes is done pair by pair.
    @kernel()
    def loop(ticket, x, turn, which, streams, out):
        pairs, width, zero = turn.shape[1] // 2, x.shape[1], turn.dtype.type(0)
        lanes, block = short_zeros(zero), SHORT // turn.itemsize
        whole = pairs - pairs % block
        for lo, hi in pieces(ticket):
            for row in range(lo, hi):
                t, a = which[row % which.size] * turn.shape[1], row * width
                for i in range(0, whole, block):
                    if read_half:
                        u, v = load(lanes, x, a + i), load(lanes, x, a + i + pairs)
                    else:
                        first = load(lanes, x, a + 2 * i)
                        second = load(lanes, x, a + 2 * i + block)
                        u, v = evens(first, second), odds(first, second)
                    c, s = load(lanes, turn, t + i), load(lanes, turn, t + i + pairs)
                    y, z = u * c - v * s, v * c + u * s
                    if write_half:
                        write(y, out, a + i, streams)
                        write(z, out, a + i + pairs, streams)
                    else:
                        write(lower_zipped(y, z), out, a + 2 * i, streams)
                        write(upper_zipped(y, z), out, a + 2 * i + block, streams)
                for i in range(whole, pairs):
                    at = (i, i + pairs) if read_half else (2 * i, 2 * i + 1)
                    to = (i, i + pairs) if write_half else (2 * i, 2 * i + 1)
                    p, q = load(zero, x, a + at[0]), load(zero, x, a + at[1])
                    cos, sin = load(zero, turn, t + i), load(zero, turn, t + i + pairs)
                    store(p * cos - q * sin, out, a + to[0])
                    store(q * cos + p * sin, out, a + to[1])
                for i in range(2 * pairs, width):
                    out[row, i] = x[row, i]

    return loop


_LOOPS = {
    (read, write): _loop(read, write) for read in (True, False) for write in (True, False)
}
