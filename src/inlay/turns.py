"""The cosine and the sine of every feature pair at any position, right far out.

Sinusoidal and rotary positions both need ``cos(position * frequency)``. In float32 that
angle is off by 0.06 at position 1,000,000, because the product rounds. Here a position is
written in base 256, and the turn to it is the product of the turns to its digits (complex
numbers of size one): three tables of 256 rows, built in float64 and rounded once, reach
16,777,216 positions either side of zero with an error of at most 2.5e-7.

A real-valued position is its whole part, from the tables, times the turn of its fraction.
Several coordinates (an image's row and column) multiply their turns, so a pair that
belongs to one axis has frequency 0 on the others.

``turns`` creates no arrays, so it runs unchanged on NumPy, JAX and torch, eager or
compiled, and gives the same bits in all three.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped

from ._array import cast, is_real, namespace_of, work_dtype

LIMIT = 256**3


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
    angles = digits[..., None] * np.asarray(frequencies, np.float64)[..., None, None, :]
    tables = np.stack([np.cos(angles), np.sin(angles)], axis=-4)
    # Once, however many axes there are: their turns are multiplied.
    tables.reshape(-1, *tables.shape[-4:])[0, :, 0] *= factor
    return tables.astype(np.float32)


def turns(
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
        >>> cos, sin = turns(np.array([0, -1]), tables, np.ones(1, np.float32))
        >>> bool(np.allclose(sin.ravel(), np.sin([0, -1])))
        True
    """
    if not is_real(positions):
        return _whole_turns(positions, tables)
    xp = namespace_of(tables)
    # As exact as it came: a float64 position rounded to float32 is another position.
    real = cast(positions, work_dtype(positions.dtype))
    inside = (real < LIMIT) & (real > -LIMIT)
    real = xp.where(inside, real, 0.0)
    # Towards zero, so that the fraction is smaller than one and has the sign of the whole.
    whole = xp.trunc(real)
    part = cast(real - whole, str(tables.dtype).removeprefix("torch."))
    angle = part[..., None] * rates
    cos, sin = _times(
        *_whole_turns(cast(whole, "int32"), tables), xp.cos(angle), xp.sin(angle)
    )
    return _where_inside(inside, cos, sin)


def axial_turns(
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
        >>> cos, sin = axial_turns(np.array([[2], [3]]), digit_tables(w), w.astype("f4"))
        >>> bool(np.allclose(sin, np.sin([2.0, 3.0])))
        True
    """
    cos, sin = turns(positions[0], tables[0], rates[0])
    for axis in range(1, tables.shape[0]):
        cos, sin = _times(cos, sin, *turns(positions[axis], tables[axis], rates[axis]))
    return cos, sin


def _whole_turns(positions: Any, tables: Any) -> tuple[Any, Any]:
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
