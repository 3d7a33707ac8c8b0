"""Turning the feature pairs of many rows: ``inlay.rotary.rotate`` as one compiled loop.

Each row of queries or keys names the turn it gets, so turns can be shared by heads, by
sequences or by nobody, and rows are taken in the order they lie in memory. Products and
sums are those of ``rotate``, in the same order: float32 and float64 give the same bits,
half precision is widened and rounded once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ._numba import bits_of, kernel, narrow, widen
from ._pool import run
from ._share import pieces


def rotate(
    x: np.ndarray, turn: np.ndarray, *, which: np.ndarray, read_half: bool, write_half: bool
) -> np.ndarray:
    """Turn the first ``2 * pairs`` features of each row and copy the rest.

    Args:
        x: Contiguous, ``(rows, head_dim)``, in float64, float32, float16 or bfloat16.
        turn: The cosines of all pairs, then the sines, ``(turns, 2 * pairs)``, in the dtype
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
    run(loop, len(x), bits_of(x), turn, which, bits_of(out), grain=grain)
    return out


def _loop(read_half: bool, write_half: bool) -> Callable[..., Any]:
    # One loop for each way in and out: the compiler turns eight pairs at a time only where
    # it knows how far apart a pair's members are.
    @kernel()
    def loop(ticket, x, turn, which, out):
        pairs = turn.shape[1] // 2
        for lo, hi in pieces(ticket):
            for row in range(lo, hi):
                t, a, y = turn[which[row % which.size]], x[row], out[row]
                for i in range(pairs):
                    if read_half:
                        u, v = widen(a[i]), widen(a[i + pairs])
                    else:
                        u, v = widen(a[2 * i]), widen(a[2 * i + 1])
                    if write_half:
                        y[i] = narrow(u * t[i] - v * t[i + pairs], y[i])
                        y[i + pairs] = narrow(v * t[i] + u * t[i + pairs], y[i])
                    else:
                        y[2 * i] = narrow(u * t[i] - v * t[i + pairs], y[i])
                        y[2 * i + 1] = narrow(v * t[i] + u * t[i + pairs], y[i])
                for i in range(2 * pairs, x.shape[1]):
                    y[i] = a[i]

    return loop


_LOOPS = {
    (read, write): _loop(read, write) for read in (True, False) for write in (True, False)
}
