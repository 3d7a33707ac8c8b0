"""The turns of many whole positions at once: ``inlay.turns`` as one compiled loop.

Same tables, same products in the same order, so the same bits. Nothing may be reordered or
fused here.
"""

import numpy as np

from ._numba import kernel
from ._pool import run
from ._share import pieces

# Three digits in base 256.
LIMIT = 256**3


def turns(positions: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Return the cosines of all pairs, then the sines: ``(rows, 2 * pairs)``.

    NaN where a position is out of reach.

    Args:
        positions: Contiguous int64, ``(rows,)``.
        tables: What ``inlay.turns.digit_tables`` made, ``(2, 3, 256, pairs)``, in float32
            or float64.

    Example:
        >>> tables = np.zeros((2, 3, 256, 1))
        >>> tables[0] = 1
        >>> turns(np.array([7]), tables)
        array([[1., 0.]])
    """
    out = np.empty((len(positions), 2 * tables.shape[-1]), tables.dtype)
    grain = 1 + 2**16 // tables.shape[-1]
    run(_turns, len(positions), positions, tables, out, grain=grain)
    return out


@kernel()
def _turns(ticket, positions, tables, out):
    pairs = tables.shape[3]
    for lo, hi in pieces(ticket):
        for row in range(lo, hi):
            if not -LIMIT < positions[row] < LIMIT:
                out[row] = np.nan
                continue
            cos, sin, far = out[row, :pairs], out[row, pairs:], abs(positions[row])
            cos[:] = tables[0, 0, far % 256]
            sin[:] = tables[1, 0, far % 256]
            # A digit of 0 turns by nothing, and multiplying by (1, 0) changes no bit.
            if far >= 256:
                digit = far // 256 % 256
                _turn_on(cos, sin, tables[0, 1, digit], tables[1, 1, digit])
            if far >= 65536:
                digit = far // 65536
                _turn_on(cos, sin, tables[0, 2, digit], tables[1, 2, digit])
            if positions[row] < 0:
                for i in range(pairs):
                    sin[i] = -sin[i]


@kernel()
def _turn_on(cos, sin, c, s):
    for i in range(cos.size):
        a, b = cos[i], sin[i]
        cos[i] = a * c[i] - b * s[i]
        sin[i] = b * c[i] + a * s[i]
