"""Fourier features: cosines and sines of coordinates, such as places or times.

A network that is given raw coordinates learns only what varies slowly. Given ``[cos 2πBv,
sin 2πBv]`` for a fixed matrix ``B`` of frequencies, it also learns fine detail (Tancik et
al. 2020, https://arxiv.org/abs/2006.10739). ``B`` is drawn from a normal distribution, and
its standard deviation controls how fine the detail is. NeRF uses octaves on each axis
instead (Mildenhall et al. 2020, https://arxiv.org/abs/2003.08934).

``B`` is not trained. The phase of a pair is the product of its coordinates' phases from the
tables of :mod:`firstlayer.positions.phases`, so float32 coordinates give accurate features
at any frequency up to 65536 radians per unit. Float64 coordinates need no tables: ``B`` is
in turns already, see :mod:`firstlayer.positions.turns`.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64

from .._array import cast, compute_dtype, move_axis, namespace_of
from .._check import positive, positive_number
from .phases import FRACTION_STEPS, axial_digit_phases, phase_tables, split_fraction
from .turns import STEPS, cycle_words, turn_phases


def gaussian_matrix(
    pairs: int, *, axes: int, std: float, rng: np.random.Generator
) -> Float64[np.ndarray, "pairs axes"]:
    """Return frequencies drawn from a normal distribution, in cycles per unit.

    Args:
        pairs: Number of frequencies, each with a cosine and a sine.
        axes: Number of coordinates of a point.
        std: Standard deviation. Larger values resolve finer detail. Positive.
        rng: Random generator.

    Example:
        >>> gaussian_matrix(4, axes=2, std=10.0, rng=np.random.default_rng(0)).shape
        (4, 2)
    """
    std = positive_number("std", std)
    shape = positive("pairs", pairs), positive("axes", axes)
    return std * rng.standard_normal(shape)


def octave_matrix(octaves: int, *, axes: int) -> Float64[np.ndarray, "pairs axes"]:
    """Return NeRF's frequencies: ``2^k / 2`` cycles per unit, on one axis at a time.

    Args:
        octaves: Number of frequencies per axis: ``k`` is 0, 1, …, ``octaves - 1``.
        axes: Number of coordinates of a point.

    Example:
        >>> octave_matrix(2, axes=2).tolist()
        [[0.5, 0.0], [1.0, 0.0], [0.0, 0.5], [0.0, 1.0]]
    """
    column = 2.0 ** np.arange(positive("octaves", octaves))[:, None] / 2
    return np.kron(np.eye(positive("axes", axes)), column)


def fourier_tables(
    matrix: Float64[np.ndarray, "pairs axes"],
) -> tuple[Float32[np.ndarray, "parts 2 3 256 pairs"], Float32[np.ndarray, "parts pairs"]]:
    """Return the tables and the rates that :func:`fourier_phases` needs.

    Args:
        matrix: Cycles per unit of each pair along each coordinate.

    Example:
        >>> tables, rates = fourier_tables(np.array([[0.5, 10.0]]))
        >>> tables.shape, rates.shape
        ((4, 2, 3, 256, 1), (4, 1))
    """
    tables, rates = phase_tables(2 * np.pi * np.asarray(matrix, np.float64).T)
    return tables.reshape(-1, *tables.shape[2:]), rates.reshape(-1, rates.shape[-1])


def fourier_phases(
    coordinates: Float[Any, "*batch axes"],
    tables: Float[Any, "parts 2 3 256 pairs"],
    rates: Float[Any, "parts pairs"],
) -> tuple[Float[Any, "*batch pairs"], Float[Any, "*batch pairs"]]:
    """Return the cosine and the sine of each pair, NaN where a coordinate is out of range.

    Args:
        coordinates: Reals smaller than ``firstlayer.positions.phases.LIMIT`` in size.
        tables: From :func:`fourier_tables`, as an array of the same library.
        rates: From :func:`fourier_tables`, in the dtype of ``tables``.

    Example:
        >>> cos, sin = fourier_phases(np.array([0.25]), *fourier_tables(np.array([[1.0]])))
        >>> bool(np.allclose([cos, sin], [[0], [1]], atol=1e-6))
        True
    """
    parts = coordinate_parts(coordinates, tables.shape[0])
    return axial_digit_phases(parts, tables, rates)


def coordinate_parts(
    coordinates: Float[Any, "*batch axes"], count: int
) -> Float[Any, "parts *batch"]:
    """Return coordinates as the parts that have tables of their own.

    Args:
        coordinates: Reals.
        count: Number of tables: one for each axis, or for its whole part and its fraction.

    Example:
        >>> coordinate_parts(np.array([[0.5, 2.0]]), 4).tolist()
        [[0.0], [2.0], [32768.0], [0.0]]
    """
    xp = namespace_of(coordinates)
    real = cast(coordinates, compute_dtype(coordinates.dtype))
    parts = move_axis(real, -1, 0)
    return xp.concat(split_fraction(parts)) if count > parts.shape[0] else parts


def float64_fourier_phases(
    coordinates: Float64[Any, "*batch axes"], matrix: Float64[Any, "pairs axes"]
) -> tuple[Float64[Any, "*batch pairs"], Float64[Any, "*batch pairs"]]:
    """Return :func:`fourier_phases` in float64.

    Args:
        coordinates: Reals smaller than ``firstlayer.positions.phases.LIMIT`` in size.
        matrix: Cycles per unit of each pair along each coordinate, as an array of the same
            library.

    Example:
        >>> cos, sin = float64_fourier_phases(np.array([0.25]), np.array([[1.0]]))
        >>> bool(np.allclose([cos, sin], [[0], [1]], rtol=0, atol=1e-15))
        True
    """
    cycles = move_axis(matrix, -1, 0)
    return turn_phases(
        move_axis(coordinates, -1, 0),
        cycle_words(cycles),
        step_words=cycle_words(cycles / STEPS),
        rates=cycles * (2 * np.pi),
    )


def float64_fourier_tables(
    matrix: Float64[np.ndarray, "pairs axes"],
) -> tuple[Float64[np.ndarray, "parts 2 3 256 pairs"], Float64[np.ndarray, "parts pairs"]]:
    """Return :func:`fourier_tables` in float64; see
    :func:`firstlayer.positions.turns.float64_phase_tables`.

    Args:
        matrix: Cycles per unit of each pair along each coordinate.

    Example:
        >>> tables = float64_fourier_tables(np.array([[0.5, 10.0]]))
        >>> cos, sin = fourier_phases(np.array([0.5, 0.025]), *tables)
        >>> bool(np.allclose([cos, sin], [[-1], [0]], rtol=0, atol=1e-14))
        True
    """
    columns = np.asarray(matrix, np.float64).T
    parts = np.concatenate([columns, columns / FRACTION_STEPS])
    digits = np.arange(256.0) * 256.0 ** np.arange(3)[:, None]
    tables = [float64_fourier_phases(digits[..., None], part[:, None]) for part in parts]
    return np.array(tables), parts * (2 * np.pi)
