"""Cosines and sines in 60-digit arithmetic, as the reference of float64 phases."""

import mpmath
import numpy as np


def exact_phases(
    positions: np.ndarray, frequencies: np.ndarray, *, turns: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the float64 numbers nearest to cos and sin of ``Σ position * frequency``.

    Args:
        positions: ``(*seq, axes)``.
        frequencies: ``(pairs, axes)``, in radians per position.
        turns: Frequencies are in turns per position.
    """
    cos = np.empty((*positions.shape[:-1], len(frequencies)))
    sin = np.empty_like(cos)
    with mpmath.workdps(60):
        unit = 2 * mpmath.pi if turns else mpmath.mpf(1)
        rates = [[unit * float(f) for f in row] for row in frequencies]
        for index in np.ndindex(*positions.shape[:-1]):
            point = [mpmath.mpf(float(p)) for p in positions[index]]
            for pair, row in enumerate(rates):
                angle = mpmath.fdot(point, row)
                cos[(*index, pair)] = mpmath.cos(angle)
                sin[(*index, pair)] = mpmath.sin(angle)
    return cos, sin


def exact_powers(counts: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return the float64 numbers nearest to ``2 ** (count * exponent)``.

    Args:
        counts: ``(seq,)``.
        exponents: ``(pairs,)``.
    """
    with mpmath.workdps(60):
        powers = [
            [float(mpmath.power(2, mpmath.mpf(float(c)) * float(e))) for e in exponents]
            for c in counts
        ]
    return np.array(powers)
