"""Cosines and sines of ``position * frequency``, accurate at positions up to 2^24.

Sinusoidal and rotary positions both need the *phase* of each feature pair: the cosine and
the sine of its angle, a complex number of modulus 1. Computing the angle in float32 is off
by 0.06 radians at position 1,000,000, because the product is rounded.

A position is written in base 256. The phase of a position is the product of its digits'
phases. Three digits reach 16,777,216 positions on either side of zero. The phases of the
256 values of each digit are computed in float64 and rounded once to float32 tables, which
bounds the error by 2.5e-7. Float64 has constants of its own, in
:mod:`firstlayer.positions.turns`.

A real position is a whole part plus a fraction, and its phase is the product of theirs. If
a frequency exceeds one radian per position, the fraction is looked up in tables too, as a
whole number of steps of 1/65536 position (:func:`phases`). The phase of a position with
several coordinates, such as an image's row and column, is the product of the coordinates'
phases; a pair that belongs to one axis has frequency 0 on the others.

Apart from the two that build tables, these functions create no arrays. They run unchanged
on NumPy, JAX and torch, eager or compiled, and return the same bits for integer positions.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Shaped

from .._array import (
    cast,
    cast_like,
    compute_dtype,
    is_real,
    namespace_of,
    take_rows,
    trunc,
)
from .._check import number

#: Positions must be smaller than this in size: three digits in base 256.
LIMIT = 256**3
#: Steps per position that fractions are counted in. A power of two, so scaling is exact.
FRACTION_STEPS = 65536


def digit_tables(
    frequencies: Float64[np.ndarray, "*axes pairs"], *, factor: float = 1.0
) -> Float32[np.ndarray, "*axes 2 3 256 pairs"]:
    """Return the cosine and the sine of each digit's angle, one table per digit.

    Args:
        frequencies: Angle per position of each pair, in radians.
        factor: Multiplier of every phase, such as YaRN's attention factor.

    Example:
        >>> digit_tables(np.array([1.0, 0.01])).shape
        (2, 3, 256, 2)
    """
    digits = np.arange(256.0) * 256.0 ** np.arange(3)[:, None]
    frequencies = np.asarray(frequencies, np.float64)
    *axes, pairs = frequencies.shape
    tables = np.empty((*axes, 2, 3, 256, pairs), np.float32)
    # One digit at a time, so that the float64 temporaries stay smaller than the tables.
    for digit in range(3):
        angles = digits[digit, :, None] * frequencies[..., None, :]
        for part, function in enumerate((np.cos, np.sin)):
            values = function(angles)
            if digit == 0:
                # On the first axis only: the phases of the axes are multiplied.
                values.reshape(-1, 256, pairs)[0] *= factor
            tables[..., part, digit, :, :] = values
    return tables


def digit_phases(
    positions: Shaped[Any, "*seq"],
    tables: Float[Any, "2 3 256 pairs"],
    rates: Float[Any, " pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return the cosine and the sine at each position, NaN where it is out of range.

    Args:
        positions: Integers or reals smaller than ``LIMIT`` in size; may be negative.
        tables: From :func:`digit_tables`, as an array of the same library.
        rates: The frequencies in the dtype of ``tables``. Used for real positions only.

    Example:
        >>> tables = digit_tables(np.array([1.0]))
        >>> cos, sin = digit_phases(np.array([0, -1]), tables, np.ones(1, np.float32))
        >>> bool(np.allclose(sin.ravel(), np.sin([0, -1])))
        True
    """
    if not is_real(positions):
        return _integer_phases(positions, tables)
    xp = namespace_of(tables)
    # float64 positions stay float64: rounding to float32 would move them.
    real = cast(positions, compute_dtype(positions.dtype))
    in_range = is_in_range(real)
    real = xp.where(in_range, real, 0.0)
    # Towards zero, so that the fraction is below 1 in size and has the sign of the whole.
    whole = trunc(real)
    fraction = cast_like(real - whole, tables)
    angle = fraction[..., None] * rates
    cos, sin = multiply(
        *_integer_phases(cast(whole, "int32"), tables), xp.cos(angle), xp.sin(angle)
    )
    return nan_outside(in_range, cos, sin)


def axial_digit_phases(
    positions: Shaped[Any, "axes *seq"],
    tables: Float[Any, "axes 2 3 256 pairs"],
    rates: Float[Any, "axes pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return :func:`digit_phases` at positions of several coordinates.

    Args:
        positions: Coordinates, one per entry of the first axis.
        tables: One set of tables per coordinate.
        rates: One set of frequencies per coordinate.

    Example:
        >>> w = np.array([[1.0, 0.0], [0.0, 1.0]])
        >>> tables, rates = digit_tables(w), w.astype("float32")
        >>> cos, sin = axial_digit_phases(np.array([[2], [3]]), tables, rates)
        >>> bool(np.allclose(sin, np.sin([2.0, 3.0])))
        True
    """
    cos, sin = digit_phases(positions[0], tables[0], rates[0])
    for axis in range(1, tables.shape[0]):
        other = digit_phases(positions[axis], tables[axis], rates[axis])
        cos, sin = multiply(cos, sin, *other)
    return cos, sin


def phase_tables(
    frequencies: Float64[np.ndarray, "*axes pairs"], *, scale: float = 1.0
) -> tuple[
    Float32[np.ndarray, "levels *axes 2 3 256 pairs"],
    Float32[np.ndarray, "levels *axes pairs"],
]:
    """Return the tables and the rates that :func:`phases` needs.

    There is one level if no frequency exceeds one radian per position. Otherwise the angle
    of a fraction would be inaccurate in float32, and a second level holds the tables of
    fractions, counted in steps of 1/65536.

    Args:
        frequencies: Angle per position of each pair, in radians.
        scale: Multiplier of every phase.

    Example:
        >>> tables, rates = phase_tables(np.array([1000.0, 1.0]))
        >>> tables.shape, rates.shape
        ((2, 2, 3, 256, 2), (2, 2))
    """
    levels = [np.asarray(frequencies, np.float64)]
    tables = [digit_tables(levels[0], factor=number("scale", scale))]
    if np.abs(levels[0]).max(initial=0.0) > 1.0:
        levels.append(levels[0] / FRACTION_STEPS)
        tables.append(digit_tables(levels[1]))
    return np.stack(tables), np.stack(levels).astype(np.float32)


def phases(
    positions: Shaped[Any, "*seq"],
    tables: Float[Any, "levels 2 3 256 pairs"],
    rates: Float[Any, "levels pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return the cosine and the sine of each pair, NaN where a position is out of range.

    Args:
        positions: Integers or reals smaller than ``LIMIT`` in size.
        tables: From :func:`phase_tables`, as an array of the same library.
        rates: From :func:`phase_tables`, in the dtype of ``tables``.

    Example:
        >>> cos, sin = phases(np.array([0.5]), *phase_tables(np.array([3.0])))
        >>> bool(np.allclose(sin, np.sin(1.5)))
        True
    """
    if tables.shape[0] == 1 or not is_real(positions):
        return digit_phases(positions, tables[0], rates[0])
    real = cast(positions, compute_dtype(positions.dtype))
    parts = namespace_of(real).stack(split_fraction(real))
    return axial_digit_phases(parts, tables, rates)


def axial_phases(
    positions: Shaped[Any, "axes *seq"],
    tables: Float[Any, "levels axes 2 3 256 pairs"],
    rates: Float[Any, "levels axes pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return :func:`phases` at positions of several coordinates.

    Args:
        positions: Coordinates, one per entry of the first axis.
        tables: From :func:`phase_tables`, given one row of frequencies per coordinate.
        rates: From :func:`phase_tables`.

    Example:
        >>> w = np.array([[9.0, 0.0], [0.0, 9.0]])
        >>> cos, sin = axial_phases(np.array([[0.5], [2.0]]), *phase_tables(w))
        >>> bool(np.allclose(sin, np.sin([4.5, 18.0])))
        True
    """
    cos, sin = phases(positions[0], tables[:, 0], rates[:, 0])
    for axis in range(1, tables.shape[1]):
        other = phases(positions[axis], tables[:, axis], rates[:, axis])
        cos, sin = multiply(cos, sin, *other)
    return cos, sin


def split_fraction(
    real: Float[Any, "*seq"],
) -> tuple[Float[Any, "*seq"], Float[Any, "*seq"]]:
    """Return the whole part of each number and its fraction in steps of 1/65536.

    Both are exact. The gradient flows through the fraction.

    Example:
        >>> [part.tolist() for part in split_fraction(np.array([3.5, -0.25]))]
        [[3.0, -0.0], [32768.0, -16384.0]]
    """
    whole = trunc(real)
    return whole, (real - whole) * FRACTION_STEPS


def is_in_range(positions: Shaped[Any, "*seq"]) -> Bool[Any, "*seq"]:
    """Return whether each position is smaller than ``LIMIT`` in size.

    Example:
        >>> is_in_range(np.array([3.5, LIMIT, np.nan])).tolist()
        [True, False, False]
    """
    if not is_real(positions) and positions.dtype.itemsize < 4:
        positions = cast(positions, "int32")  # int8 cannot be compared with LIMIT
    # Without abs(): -(-2**31) overflows int32.
    in_range = positions < LIMIT
    if "uint" not in str(positions.dtype):  # -LIMIT wraps around in JAX's uint32
        in_range = in_range & (positions > -LIMIT)
    return in_range


def nan_outside(
    in_range: Bool[Any, "*seq"],
    cos: Float[Any, "*seq pairs"],
    sin: Float[Any, "*seq pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return the cosine and the sine, NaN where a position is not in range.

    Example:
        >>> nan_outside(np.array([False]), np.ones((1, 1)), np.zeros((1, 1)))
        (array([[nan]]), array([[nan]]))
    """
    xp = namespace_of(cos)
    in_range = in_range[..., None]
    return xp.where(in_range, cos, float("nan")), xp.where(in_range, sin, float("nan"))


def within_limit(
    positions: Shaped[Any, "*seq"],
) -> tuple[Shaped[Any, "*seq"], Bool[Any, "*seq"]]:
    """Return integer positions as int32, 0 if out of range, and whether each is in range.

    Example:
        >>> [part.tolist() for part in within_limit(np.array([-3, 2**24]))]
        [[-3, 0], [True, False]]
    """
    xp = namespace_of(positions)
    # Compared before the cast to int32, which could wrap around.
    in_range = is_in_range(positions)
    return cast(xp.where(in_range, positions, xp.zeros_like(positions)), "int32"), in_range


def _integer_phases(positions: Any, tables: Any) -> tuple[Any, Any]:
    xp = namespace_of(tables)
    safe, in_range = within_limit(positions)
    size = xp.abs(safe)
    cos, sin = (take_rows(tables[part, 0], size % 256) for part in (0, 1))
    for place, digit in ((1, size // 256 % 256), (2, size // 65536)):
        phase = (take_rows(tables[part, place], digit) for part in (0, 1))
        cos, sin = multiply(cos, sin, *phase)
    return nan_outside(in_range, cos, xp.where((safe < 0)[..., None], -sin, sin))


def multiply(
    cos: Float[Any, "*seq pairs"],
    sin: Float[Any, "*seq pairs"],
    c: Float[Any, "*seq pairs"],
    s: Float[Any, "*seq pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return the cosine and the sine of the sum of two angles.

    Example:
        >>> multiply(0.0, 1.0, 0.0, 1.0)
        (-1.0, 0.0)
    """
    return cos * c - sin * s, sin * c + cos * s
