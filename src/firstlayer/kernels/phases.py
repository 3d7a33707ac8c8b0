"""The turns of many whole positions at once: ``firstlayer.positions.phases`` as one compiled loop.

Same tables, same products in the same order, so the same bits. Nothing may be reordered or
fused here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .runtime.compile import inlined, kernel
from .runtime.pool import run
from .runtime.share import pieces

# Three digits in base 256.
LIMIT = 256**3
# About how many pairs are worth waking a second core for.
GRAIN = 1 << 16


def digit_phases(positions: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Return the cosines of all pairs, then the sines: ``(rows, 2 * pairs)``.

    NaN where a position is out of reach.

    Args:
        positions: Contiguous int64, ``(rows,)``.
        tables: What ``firstlayer.positions.phases.digit_tables`` made, ``(2, 3, 256, pairs)``, in float32
            or float64.

    Example:
        >>> tables = np.zeros((2, 3, 256, 1))
        >>> tables[0] = 1
        >>> digit_phases(np.array([7]), tables)
        array([[1., 0.]])
    """
    out = np.empty((len(positions), 2 * tables.shape[-1]), tables.dtype)
    grain = 1 + GRAIN // tables.shape[-1]
    run(_phases, len(positions), positions, tables, out, grain=grain)
    return out


def sinusoid_features(
    positions: np.ndarray,
    tables: np.ndarray,
    *,
    width: int,
    interleaved: bool,
    cos_first: bool,
) -> np.ndarray:
    """Return what ``firstlayer.positions.sinusoidal.encode`` makes of the turns: ``(rows, width)``.

    Args:
        positions: As in :func:`digit_phases`.
        tables: Likewise.
        width: Number of features, twice that of the pairs or one more or less.
        interleaved: Whether a pair's features lie side by side.
        cos_first: Whether the cosine comes before the sine.

    Example:
        >>> tables = np.zeros((2, 3, 256, 1))
        >>> tables[0] = 1
        >>> features(np.array([7]), tables, width=2, interleaved=True, cos_first=False)
        array([[0., 1.]])
    """
    out = np.empty((len(positions), width), tables.dtype)
    loop, grain = _FEATURES[interleaved], 1 + GRAIN // tables.shape[-1]
    run(loop, len(positions), positions, tables, cos_first, out, grain=grain)
    return out


@inlined
def _set(cos, sin, position, tables):
    """Write the turn that leads to ``position``, NaN if it is out of reach."""
    pairs, far = tables.shape[3], abs(position)
    if not -LIMIT < position < LIMIT:
        cos[:] = np.nan
        sin[:] = np.nan
        return
    digit = far % 256
    for i in range(pairs):
        cos[i], sin[i] = tables[0, 0, digit, i], tables[1, 0, digit, i]
    # A digit of 0 turns by nothing, and multiplying by (1, 0) changes no bit.
    for place in range(1, 3):
        digit = far >> 8 * place & 255
        if digit:
            for i in range(pairs):
                c, s = tables[0, place, digit, i], tables[1, place, digit, i]
                a, b = cos[i], sin[i]
                cos[i], sin[i] = a * c - b * s, b * c + a * s
    if position < 0:
        for i in range(pairs):
            sin[i] = -sin[i]


@kernel()
def _phases(ticket, positions, tables, out):
    pairs = tables.shape[3]
    for lo, hi in pieces(ticket):
        for row in range(lo, hi):
            _set(out[row, :pairs], out[row, pairs:], positions[row], tables)


def _features(interleaved: bool) -> Callable[..., Any]:
    # One loop for each layout: the compiler writes eight features at a time only where it
    # knows how far apart they are.
    @kernel()
    def loop(ticket, positions, tables, cos_first, out):
        pairs, width = tables.shape[3], out.shape[1]
        cos, sin = np.empty(pairs, tables.dtype), np.empty(pairs, tables.dtype)
        half = width // 2
        first, second = (cos, sin) if cos_first else (sin, cos)
        for lo, hi in pieces(ticket):
            for row in range(lo, hi):
                _set(cos, sin, positions[row], tables)
                y = out[row]
                if interleaved:
                    for i in range(half):
                        y[2 * i], y[2 * i + 1] = first[i], second[i]
                    if width > 2 * half:
                        # An odd width ends in a sine of its own, or in nothing.
                        y[width - 1] = sin[half] if pairs > half else 0
                else:
                    end = half if cos_first else pairs
                    y[:end] = first[:end]
                    y[end : half + pairs] = second[: half + pairs - end]
                    y[half + pairs :] = 0

    return loop


_FEATURES = {interleaved: _features(interleaved) for interleaved in (True, False)}
