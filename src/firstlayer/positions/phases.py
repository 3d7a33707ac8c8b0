"""The cosine and the sine of every feature pair at any position, right far out.

Sinusoidal and rotary positions both need ``cos(position * frequency)``. In float32 that
angle is off by 0.06 at position 1,000,000, because the product rounds. Here a position is
written in base 256, and the turn to it is the product of the turns to its digits (complex
numbers of size one): three tables of 256 rows, built in float64 and rounded once, reach
16,777,216 positions either side of zero with an error of at most 2.5e-7.

A real-valued position is its whole part, from the tables, times the turn of its fraction,
which ``phases`` takes from tables too where a pair turns by more than one radian.
Several coordinates (an image's row and column) multiply their turns, so a pair that
belongs to one axis has frequency 0 on the others.

``digit_phases`` and ``phases`` create no arrays, so they run unchanged on NumPy, JAX and torch,
eager or compiled, and give the same bits in all three.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped

from .._array import cast, compute_dtype, is_real, namespace_of
from .._check import number

LIMIT = 256**3
# What a fraction of a position is counted in: the fraction times a power of two is exact.
FINE = 65536


def digit_tables(
    frequencies: Float64[np.ndarray, "*axes pairs"], *, factor: float = 1.0
) -> Float32[np.ndarray, "*axes 2 3 256 pairs"]:
    """Return the cosine and the sine of each digit's angle, one table a digit.

    Args:
        frequencies: Angle per position of each pair, in radians.
        factor: What every turn is multiplied by, as YaRN's attention factor.

    Example:
        >>> digit_tables(np.array([1.0, 0.01])).shape
        (2, 3, 256, 2)
    """
    digits = np.arange(256.0) * 256.0 ** np.arange(3)[:, None]
    frequencies = np.asarray(frequencies, np.float64)
    *axes, pairs = frequencies.shape
    tables = np.empty((*axes, 2, 3, 256, pairs), np.float32)
    # Level by level: what is float64 on the way is a fraction of the tables.
    for level in range(3):
        angles = digits[level, :, None] * frequencies[..., None, :]
        for place, wave in enumerate((np.cos, np.sin)):
            turned = wave(angles)
            if level == 0:
                # Once, however many axes there are: their turns are multiplied.
                turned.reshape(-1, 256, pairs)[0] *= factor
            tables[..., place, level, :, :] = turned
    return tables


def digit_phases(
    positions: Shaped[Any, "*seq"],
    tables: Float[Any, "2 3 256 pairs"],
    rates: Float[Any, " pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return the cosine and the sine at each position, NaN where it is out of reach.

    Args:
        positions: Integers or reals, negative ones included, smaller than ``LIMIT`` in
            size.
        tables: What :func:`digit_tables` made, as an array of the same library.
        rates: The frequencies in the dtype of ``tables``; only reals need them.

    Example:
        >>> tables = digit_tables(np.array([1.0]))
        >>> cos, sin = digit_phases(np.array([0, -1]), tables, np.ones(1, np.float32))
        >>> bool(np.allclose(sin.ravel(), np.sin([0, -1])))
        True
    """
    if not is_real(positions):
        return _integer_phases(positions, tables)
    xp = namespace_of(tables)
    # As exact as it came: a float64 position rounded to float32 is another position.
    real = cast(positions, compute_dtype(positions.dtype))
    inside = (real < LIMIT) & (real > -LIMIT)
    real = xp.where(inside, real, 0.0)
    # Towards zero, so that the fraction is smaller than one and has the sign of the whole.
    whole = xp.trunc(real)
    part = cast(real - whole, str(tables.dtype).removeprefix("torch."))
    angle = part[..., None] * rates
    cos, sin = _times(
        *_integer_phases(cast(whole, "int32"), tables), xp.cos(angle), xp.sin(angle)
    )
    return _where_inside(inside, cos, sin)


def axial_digit_phases(
    positions: Shaped[Any, "axes *seq"],
    tables: Float[Any, "axes 2 3 256 pairs"],
    rates: Float[Any, "axes pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return the cosine and the sine at positions of several coordinates.

    Args:
        positions: One coordinate along each entry of the first axis.
        tables: One set of tables for each coordinate.
        rates: One set of frequencies for each coordinate.

    Example:
        >>> w = np.array([[1.0, 0.0], [0.0, 1.0]])
        >>> cos, sin = axial_digit_phases(np.array([[2], [3]]), digit_tables(w), w.astype("f4"))
        >>> bool(np.allclose(sin, np.sin([2.0, 3.0])))
        True
    """
    cos, sin = digit_phases(positions[0], tables[0], rates[0])
    for axis in range(1, tables.shape[0]):
        cos, sin = _times(
            cos, sin, *digit_phases(positions[axis], tables[axis], rates[axis])
        )
    return cos, sin


def phase_tables(
    frequencies: Float64[np.ndarray, "*axes pairs"], *, scale: float = 1.0
) -> tuple[
    Float32[np.ndarray, "levels *axes 2 3 256 pairs"],
    Float32[np.ndarray, "levels *axes pairs"],
]:
    """Return the tables and the rates that :func:`phases` needs.

    There is one level if no frequency is greater than one radian per position. Otherwise
    a fraction of a position would turn so far that float32 could not say how far, and a
    second level counts it in steps of 1/65536.

    Args:
        frequencies: Angle per position of each pair, in radians.
        scale: What every turn is multiplied by.

    Example:
        >>> tables, rates = wave_tables(np.array([1000.0, 1.0]))
        >>> tables.shape, rates.shape
        ((2, 2, 3, 256, 2), (2, 2))
    """
    levels = [np.asarray(frequencies, np.float64)]
    tables = [digit_tables(levels[0], factor=number("scale", scale))]
    if np.abs(levels[0]).max(initial=0.0) > 1.0:
        levels.append(levels[0] / FINE)
        tables.append(digit_tables(levels[1]))
    return np.stack(tables), np.stack(levels).astype(np.float32)


def phases(
    positions: Shaped[Any, "*seq"],
    tables: Float[Any, "levels 2 3 256 pairs"],
    rates: Float[Any, "levels pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return the cosine and the sine of each pair, NaN where a position is out of reach.

    Args:
        positions: Integers or reals smaller than ``LIMIT`` in size.
        tables: From :func:`phase_tables`, as an array of the same library.
        rates: Likewise, in the dtype of ``tables``.

    Example:
        >>> cos, sin = waves(np.array([0.5]), *wave_tables(np.array([3.0])))
        >>> bool(np.allclose(sin, np.sin(1.5)))
        True
    """
    if tables.shape[0] == 1 or not is_real(positions):
        return digit_phases(positions, tables[0], rates[0])
    real = cast(positions, compute_dtype(positions.dtype))
    return axial_digit_phases(namespace_of(real).stack(split(real)), tables, rates)


def axial_phases(
    positions: Shaped[Any, "axes *seq"],
    tables: Float[Any, "levels axes 2 3 256 pairs"],
    rates: Float[Any, "levels axes pairs"],
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return what :func:`phases` does, at positions of several coordinates.

    Args:
        positions: One coordinate along each entry of the first axis.
        tables: From :func:`phase_tables`, of one row of frequencies for each coordinate.
        rates: Likewise.

    Example:
        >>> w = np.array([[9.0, 0.0], [0.0, 9.0]])
        >>> cos, sin = axial_waves(np.array([[0.5], [2.0]]), *wave_tables(w))
        >>> bool(np.allclose(sin, np.sin([4.5, 18.0])))
        True
    """
    cos, sin = phases(positions[0], tables[:, 0], rates[:, 0])
    for axis in range(1, tables.shape[1]):
        other = phases(positions[axis], tables[:, axis], rates[:, axis])
        cos, sin = _times(cos, sin, *other)
    return cos, sin


def split(real: Float[Any, "*seq"]) -> tuple[Float[Any, "*seq"], Float[Any, "*seq"]]:
    """Return the whole part of each number and its fraction in steps of 1/65536.

    Both are exact. The fraction carries the gradient.

    Example:
        >>> [part.tolist() for part in split(np.array([3.5, -0.25]))]
        [[3.0, -0.0], [32768.0, -16384.0]]
    """
    whole = namespace_of(real).trunc(real)
    return whole, (real - whole) * FINE


def _integer_phases(positions: Any, tables: Any) -> tuple[Any, Any]:
    xp = namespace_of(tables)
    if positions.dtype.itemsize < 4:
        positions = cast(positions, "int32")  # int8 cannot be compared with LIMIT
    # Compared before it is narrowed, and never by its size: -(-2**31) is -2**31 in int32.
    inside = positions < LIMIT
    if "uint" not in str(positions.dtype):  # -LIMIT is a huge number in JAX's uint32
        inside = inside & (positions > -LIMIT)
    near = cast(xp.where(inside, positions, xp.zeros_like(positions)), "int32")
    far = xp.abs(near)
    cos, sin = tables[0, 0][far % 256], tables[1, 0][far % 256]
    for level, digit in ((1, far // 256 % 256), (2, far // 65536)):
        cos, sin = _times(cos, sin, tables[0, level][digit], tables[1, level][digit])
    return _where_inside(inside, cos, xp.where((near < 0)[..., None], -sin, sin))


def _times(cos: Any, sin: Any, c: Any, s: Any) -> tuple[Any, Any]:
    return cos * c - sin * s, sin * c + cos * s


def _where_inside(inside: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    xp = namespace_of(cos)
    inside = inside[..., None]
    return xp.where(inside, cos, float("nan")), xp.where(inside, sin, float("nan"))
