"""Cosines and sines at whole positions: ``firstlayer.positions.phases`` as a kernel.

It reads the same tables and multiplies in the same order, so results have the same bits.
Nothing may be reordered or fused here.
"""

import numpy as np

from .runtime.compile import inlined, kernel
from .runtime.pool import grain_for, pieces, run
from .runtime.scratch import free_row, is_allocated, scratch_row

# Three digits in base 256.
LIMIT = 256**3
# Minimum number of pairs per thread.
GRAIN = 1 << 16


def digit_phases(positions: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Return the cosines of all pairs, then the sines: ``(rows, 2 * pairs)``.

    Positions out of range give NaN.

    Args:
        positions: Contiguous int64, ``(rows,)``.
        tables: Result of ``firstlayer.positions.phases.digit_tables``,
            ``(2, 3, 256, pairs)``, in float32 or float64.

    Example:
        >>> tables = np.zeros((2, 3, 256, 1))
        >>> tables[0] = 1
        >>> digit_phases(np.array([7]), tables)
        array([[1., 0.]])
    """
    out = np.empty((len(positions), 2 * tables.shape[-1]), tables.dtype)
    grain = grain_for(GRAIN, tables.shape[-1])
    run(_digit_phases, len(positions), positions, tables, out, grain=grain)
    return out


def sinusoid_features(
    positions: np.ndarray,
    tables: np.ndarray,
    *,
    width: int,
    interleaved: bool,
    cos_first: bool,
) -> np.ndarray:
    """Return sinusoidal features, ``(rows, width)``, as ``positions.sinusoidal.encode``.

    Args:
        positions: As in :func:`digit_phases`.
        tables: As in :func:`digit_phases`.
        width: Number of features: twice the number of pairs, one more or one less.
        interleaved: Whether the two features of a pair are adjacent.
        cos_first: Whether cosines come before sines.

    Example:
        >>> tables = np.zeros((2, 3, 256, 1))
        >>> tables[0] = 1
        >>> options = {"width": 2, "interleaved": True, "cos_first": False}
        >>> sinusoid_features(np.array([7]), tables, **options)
        array([[0., 1.]])
    """
    out = np.empty((len(positions), width), tables.dtype)
    loop, grain = _FEATURE_LOOPS[interleaved], grain_for(GRAIN, tables.shape[-1])
    run(loop, len(positions), positions, tables, cos_first, out, grain=grain)
    return out


@inlined
def _write_phases(cos, sin, position, tables):
    """Write the cosines and sines at ``position``, NaN if it is out of range."""
    pairs, distance = tables.shape[3], abs(position)
    if not -LIMIT < position < LIMIT:
        for i in range(pairs):
            cos[i], sin[i] = np.nan, np.nan
        return
    digit = distance % 256
    for i in range(pairs):
        cos[i], sin[i] = tables[0, 0, digit, i], tables[1, 0, digit, i]
    # The digit 0 is skipped: multiplying by (1, 0) changes no bit.
    for place in range(1, 3):
        digit = distance >> 8 * place & 255
        if digit:
            for i in range(pairs):
                c, s = tables[0, place, digit, i], tables[1, place, digit, i]
                a, b = cos[i], sin[i]
                cos[i], sin[i] = a * c - b * s, b * c + a * s
    if position < 0:
        for i in range(pairs):
            sin[i] = -sin[i]


@kernel()
def _digit_phases(ticket, positions, tables, out):
    pairs = tables.shape[3]
    for lo, hi in pieces(ticket):
        for row in range(lo, hi):
            _write_phases(out[row, :pairs], out[row, pairs:], positions[row], tables)


def _feature_loop(interleaved: bool):
    # One loop for each layout: the compiler writes eight features at a time only if it
    # knows their distance.
    @kernel()
    def loop(ticket, positions, tables, cos_first, out):
        pairs, width = tables.shape[3], out.shape[1]
        memory, half = scratch_row(2 * pairs, tables[0, 0, 0, 0]), width // 2
        if not is_allocated(memory):
            raise MemoryError
        cos, sin = memory[:pairs], memory[pairs:]
        first, second = (cos, sin) if cos_first else (sin, cos)
        for lo, hi in pieces(ticket):
            for row in range(lo, hi):
                _write_phases(cos, sin, positions[row], tables)
                y = out[row]
                if interleaved:
                    for i in range(half):
                        y[2 * i], y[2 * i + 1] = first[i], second[i]
                    if width > 2 * half:
                        # An odd width ends in an unpaired sine, or in zero.
                        y[width - 1] = 0
                        if pairs > half:
                            y[width - 1] = sin[half]
                else:
                    end = half if cos_first else pairs
                    for i in range(end):
                        y[i] = first[i]
                    for i in range(end, half + pairs):
                        y[i] = second[i - end]
                    for i in range(half + pairs, width):
                        y[i] = 0
        free_row(memory)

    return loop


_FEATURE_LOOPS = {interleaved: _feature_loop(interleaved) for interleaved in (True, False)}
