"""xPos: rotary positions whose scores also decay with distance.

Queries and keys are rotated as in :mod:`firstlayer.positions.rotary`. In addition pair
``i`` of a query at ``m`` is multiplied by ``zeta_i ** (m / scale_base)`` and of a key at
``n`` by ``zeta_i ** (-n / scale_base)``, with ``zeta_i = (2i + 0.4 d) / 1.4 d`` for ``d``
rotated features. The product of the two is ``zeta_i ** ((m - n) / scale_base)``: it depends
on the distance only and falls as the distance grows, fastest for the pairs that rotate
fastest (Sun et al. 2022, https://arxiv.org/abs/2212.10554). Keys after the query grow
instead, so attention must be causal.

Only the difference of two exponents matters, so any position may be the origin. torchscale,
x-transformers and rotary-embedding-torch use the middle of the current sequence, which
changes as a sequence grows and does not fit keys that were cached before. Here it is fixed:
``center``.

A scale is ``2 ** exponent``. Exponents are limited to 60 in size, so that no product of a
query and a key overflows float32 or bfloat16, not even one that a mask removes; in float16,
to 6. This limits the distance of a position from ``center``: 16997 positions on either side
for a ``scale_base`` of 512. Larger distances raise an error, or give NaN under tracing.

As in :mod:`firstlayer.positions.phases`, the scale of a position is the product of the
scales of its digits from tables, computed in float64 and rounded once. In float64, phases
come from :mod:`firstlayer.positions.turns`, and exponents are split into a part whose
products with positions are exact and the rest; the relative error is at most 2e-15 for a
``scale_base`` of at least 1. ``xpos_phases`` and ``float64_xpos_phases`` create no arrays
and run unchanged on NumPy, torch and JAX.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64, Shaped

from .._array import (
    cast,
    cast_like,
    compute_dtype,
    is_real,
    namespace_of,
    take_rows,
    trunc,
)
from .._check import integer, positive_number
from .frequencies import check_rotary_dim, inverse_frequencies
from .phases import LIMIT, digit_phases, digit_tables, within_limit
from .turns import float64_phases, turn_constants

#: Largest size of a scale's binary exponent, and the same for float16.
MAX_EXPONENT, MAX_EXPONENT_FLOAT16 = 60, 6
# exp(x log 2) instead of exp2(x), which traces have no operator of ONNX for.
LOG_2 = math.log(2.0)


def xpos_exponents(
    rotary_dim: int, *, scale_base: float = 512.0
) -> Float64[np.ndarray, " pairs"]:
    """Return the binary exponent per position of each pair's scale, all negative.

    Args:
        rotary_dim: Number of rotated features. Positive and even.
        scale_base: Number of positions over which pair ``i`` decays by ``zeta_i``.

    Example:
        >>> (512 * xpos_exponents(4)).round(3).tolist()
        [-1.807, -0.637]
    """
    zeta = (np.arange(0, rotary_dim, 2) / rotary_dim + 0.4) / 1.4
    return np.log2(zeta) / positive_number("scale_base", scale_base)


def xpos_tables(
    head_dim: int,
    *,
    base: float = 10_000.0,
    scale_base: float = 512.0,
    rotary_dim: int | None = None,
) -> tuple[Float32[np.ndarray, "3 3 256 pairs"], Float32[np.ndarray, "2 pairs"]]:
    """Return the tables and the rates that :func:`xpos_phases` needs.

    The tables have the cosine, the sine and the scale of each digit of a position; the
    rates are the angle and the binary exponent per position.

    Args:
        head_dim: Number of features of a head. Positive, and even if all are rotated.
        base: As in :func:`firstlayer.positions.frequencies.inverse_frequencies`.
        scale_base: As in :func:`xpos_exponents`.
        rotary_dim: Number of rotated features, the first ones; None is all.

    Example:
        >>> tables, rates = xpos_tables(8)
        >>> tables.shape, rates.shape
        ((3, 3, 256, 4), (2, 4))
    """
    rotary_dim = check_rotary_dim(rotary_dim, head_dim)
    frequencies = inverse_frequencies(rotary_dim, base=base)
    exponents = xpos_exponents(rotary_dim, scale_base=scale_base)
    digits = np.arange(256.0) * 256.0 ** np.arange(3)[:, None]
    # Digits that no position within reach has underflow to 0.
    scales = np.exp2(digits[..., None] * exponents).astype(np.float32)
    tables = np.concatenate([digit_tables(frequencies), scales[None]])
    return tables, np.stack([frequencies, exponents]).astype(np.float32)


def float64_xpos_constants(
    head_dim: int,
    *,
    base: float = 10_000.0,
    scale_base: float = 512.0,
    rotary_dim: int | None = None,
) -> tuple[Int64[np.ndarray, "7 pairs"], Float64[np.ndarray, "2 pairs"]]:
    """Return the constants of frequencies and exponents for :func:`float64_xpos_phases`.

    The first are those of :func:`firstlayer.positions.turns.turn_constants`; the second
    are the binary exponent per position, rounded to 24 bits, and the rest of it.

    Args:
        head_dim: As in :func:`xpos_tables`.
        base: As in :func:`xpos_tables`.
        scale_base: As in :func:`xpos_exponents`.
        rotary_dim: As in :func:`xpos_tables`.

    Example:
        >>> turns, exponents = float64_xpos_constants(8)
        >>> bool((exponents.sum(0) == xpos_exponents(8)).all())
        True
    """
    rotary_dim = check_rotary_dim(rotary_dim, head_dim)
    exponents = xpos_exponents(rotary_dim, scale_base=scale_base)
    high = exponents.astype(np.float32).astype(np.float64)
    turns = turn_constants(inverse_frequencies(rotary_dim, base=base))
    return turns, np.stack([high, exponents - high])


def xpos_reach(scale_base: float, *, float16: bool = False) -> int:
    """Return the largest distance from the center that a position may have.

    Args:
        scale_base: As in :func:`xpos_exponents`.
        float16: Whether queries and keys are float16, which has fewer exponents.

    Example:
        >>> xpos_reach(512.0), xpos_reach(512.0, float16=True)
        (16997, 1699)
    """
    limit = MAX_EXPONENT_FLOAT16 if float16 else MAX_EXPONENT
    per_position = math.log2(1.4 / 0.4) / scale_base
    return min(int(limit / per_position), LIMIT - 1)


def check_center(center: int) -> int:
    """Return ``center`` as an int if positions may have that value."""
    if abs(integer("center", center)) >= LIMIT:
        raise ValueError(f"center must be smaller than {LIMIT} in size, got {center}")
    return int(center)


def check_xpos_reach(
    positions: Shaped[np.ndarray, "*seq"], *, center: int, reach: int, scale_base: float
) -> None:
    """Raise if a position is farther from the center than :func:`xpos_reach`.

    Args:
        positions: Positions on the host, smaller than ``LIMIT`` in size.
        center: Origin of the scales.
        reach: From :func:`xpos_reach`.
        scale_base: Named in the error message.

    Example:
        >>> check_xpos_reach(np.array([9]), center=2, reach=5, scale_base=0.25)
        Traceback (most recent call last):
        ...
        ValueError: positions must be at most 5 from center 2 for scale_base 0.25, got 9
    """
    from_center = np.abs(positions.astype(np.float64) - center)
    if not (from_center <= reach).all():
        first = positions.flat[int(np.argmin(from_center <= reach))]
        raise ValueError(
            f"positions must be at most {reach} from center {center} for scale_base "
            f"{scale_base:g}, got {first}"
        )


def xpos_phases(
    positions: Shaped[Any, "*seq"],
    tables: Float[Any, "3 3 256 pairs"],
    rates: Float[Any, "2 pairs"],
    *,
    center: int,
    reach: int,
    keys: bool,
) -> tuple[Float[Any, "*seq pairs"], Float[Any, "*seq pairs"]]:
    """Return the scaled cosine and sine of each pair, NaN where a position is out of reach.

    Args:
        positions: Integers or reals.
        tables: From :func:`xpos_tables`, as an array of the same library.
        rates: From :func:`xpos_tables`, in the dtype of ``tables``.
        center: Origin of the scales.
        reach: From :func:`xpos_reach`.
        keys: Whether the scales are those of keys, the inverse of those of queries.

    Example:
        >>> options = {"center": 0, "reach": 100, "keys": False}
        >>> cos, _ = xpos_phases(np.array([10]), *xpos_tables(2, scale_base=10), **options)
        >>> bool(np.allclose(cos, np.cos(10) * 0.4 / 1.4))
        True
    """
    cos, sin = digit_phases(positions, tables[:2], rates[0])
    scale = _scales(positions, tables[2], rates[1], center, reach, keys)
    return cos * scale, sin * scale


def float64_xpos_phases(
    positions: Shaped[Any, "*seq"],
    turns: Int64[Any, "7 pairs"],
    exponents: Float64[Any, "2 pairs"],
    *,
    center: int,
    reach: int,
    keys: bool,
) -> tuple[Float64[Any, "*seq pairs"], Float64[Any, "*seq pairs"]]:
    """Return :func:`xpos_phases` in float64.

    Args:
        positions: Integers or reals.
        turns: From :func:`float64_xpos_constants`, as an array of the same library.
        exponents: From :func:`float64_xpos_constants`.
        center: Origin of the scales.
        reach: From :func:`xpos_reach`.
        keys: Whether the scales are those of keys.

    Example:
        >>> constants = float64_xpos_constants(2, scale_base=10)
        >>> options = {"center": 0, "reach": 100, "keys": True}
        >>> cos, _ = float64_xpos_phases(np.array([2.5]), *constants, **options)
        >>> bool(np.allclose(cos, np.cos(2.5) * 3.5**0.25, rtol=1e-15))
        True
    """
    xp = namespace_of(exponents)
    cos, sin = float64_phases(positions, turns)
    whole, fraction, in_reach = _from_center(positions, center, reach)
    sign = -1.0 if keys else 1.0
    whole = (cast(whole, "float64") * sign)[..., None]
    # Exact: 24 bits of a position times 24 bits of an exponent.
    exact, rest = whole * exponents[0], whole * exponents[1]
    if fraction is not None:
        fraction = (cast(fraction, "float64") * sign)[..., None]
        rest = rest + fraction * (exponents[0] + exponents[1])
    power = xp.round(exact)
    # The power of two is exact, as an integer.
    size = cast(xp.abs(power), "int64")
    size = cast(xp.ones_like(size) << size, "float64")
    scale = xp.exp(((exact - power) + rest) * LOG_2) * xp.where(power < 0, 1.0 / size, size)
    scale = xp.where(in_reach[..., None], scale, float("nan"))
    return cos * scale, sin * scale


def _from_center(positions: Any, center: int, reach: int) -> tuple[Any, Any, Any]:
    """Return the whole distance from the center, the fraction, and whether it is in reach.

    The fraction is None for integers. Distances out of reach are replaced by 0.
    """
    xp, fraction, in_reach = namespace_of(positions), None, True
    if is_real(positions):
        real = cast(positions, compute_dtype(positions.dtype))
        shifted = real - center
        in_reach = (shifted <= reach) & (shifted >= -reach)
        real = xp.where(in_reach, real, 0.0)
        # The fraction first, which is exact. Its sign may differ from the distance's.
        positions = trunc(real)
        fraction = real - positions
        positions = cast(positions, "int32")
    safe, in_range = within_limit(positions)
    whole = safe - center
    if fraction is None:
        in_reach = in_range & (xp.abs(whole) <= reach)
    return xp.where(in_reach, whole, xp.zeros_like(whole)), fraction, in_reach


def _scales(
    positions: Any, tables: Any, exponents: Any, center: int, reach: int, keys: bool
) -> Any:
    xp = namespace_of(tables)
    whole, fraction, in_reach = _from_center(positions, center, reach)
    size = xp.abs(whole)
    scale = take_rows(tables[0], size % 256)
    for place, digit in ((1, size // 256 % 256), (2, size // 65536)):
        scale = scale * take_rows(tables[place], digit)
    grows = (whole > 0) if keys else (whole < 0)
    scale = xp.where(grows[..., None], 1.0 / scale, scale)
    if fraction is not None:
        fraction = cast_like(fraction, tables)
        fraction = (-fraction if keys else fraction)[..., None]
        scale = scale * xp.exp(fraction * exponents * LOG_2)
    return xp.where(in_reach[..., None], scale, float("nan"))
