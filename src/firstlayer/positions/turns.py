"""Float64 cosines and sines of ``position * frequency``, accurate to float64.

The tables of :mod:`firstlayer.positions.phases` are float32. In float64 the product of a
position and a frequency is off by 1e-9 radians at position 2^24, so the angle is computed
with integers instead. The unit is a turn, 2π radians: whole turns do not change the phase
and are dropped.

A frequency in turns per position is a fixed-point number of 96 bits, three *words* of 32
bits. A whole position has less than 25 bits, so its product with a word fits into an int64,
and the sum of the three products is exact to 2^-60 turns. A fraction of a position is
counted in steps of 2^-24 positions, which have words of their own. What remains is less
than one step and is multiplied in float64; gradients flow through this remainder.

Integers are used because compilers may reorder or fuse the floating-point operations that
double-double arithmetic needs. Functions that apply constants run unchanged on NumPy, JAX
and torch, eager or compiled. The error of a phase is at most 4e-16.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int64, Shaped

from .._array import cast, float64_from_bits, is_real, namespace_of
from .phases import FRACTION_STEPS, is_in_range, nan_outside

# Steps per position that fractions are counted in. A power of two, so scaling is exact.
STEPS = 2**24
# 2^320 / 2π, rounded down: exact words for frequencies up to 2^200 radians per position.
INVERSE_TWO_PI = int(
    "28be60db9391054a7f09d5f47d4d377036d8a5664f10e4107f9458eaf7aef1586dc91b8e909374b8", 16
)
# Turns are counted in units of 2^-60: sums of two fit into an int64.
UNIT = 2**60


def turn_constants(
    frequencies: Float64[np.ndarray, "*axes pairs"],
) -> Int64[np.ndarray, "7 *axes pairs"]:
    """Return the constants that :func:`float64_phases` needs.

    They are the words of each frequency in turns per position, the words in turns per step,
    and the bits of the frequency.

    Args:
        frequencies: Angle per position of each pair, in radians.

    Example:
        >>> words = turn_constants(np.array([np.pi / 2]))[:3]
        >>> (words[0] / 2**32).round(6)
        array([0.25])
    """
    frequencies = np.ascontiguousarray(frequencies, np.float64)
    mask, numbers = 2**96 - 1, []
    for frequency in frequencies.ravel().tolist():
        top, bottom = frequency.as_integer_ratio()
        # In turns per position, units of 2^-120.
        turns = (top * INVERSE_TWO_PI >> 200) // bottom
        numbers.append((turns >> 24 & mask).to_bytes(12, "big"))
        numbers.append((turns >> 48 & mask).to_bytes(12, "big"))
    words = np.frombuffer(b"".join(numbers), ">u4").astype(np.int64)
    words = words.reshape(*frequencies.shape, 6)
    return np.stack([*np.moveaxis(words, -1, 0), frequencies.view(np.int64)])


def cycle_words(cycles: Float[Any, "*shape"]) -> Shaped[Any, "3 *shape"]:
    """Return the words of float64 frequencies that are given in turns, exactly.

    Example:
        >>> cycle_words(np.array([0.25, -3.5])).tolist()
        [[1073741824, -2147483648], [0, 0], [0, 0]]
    """
    xp, words = namespace_of(cycles), []
    # Towards zero: the rest has no more bits than the number, so it is exact.
    rest = cycles - xp.trunc(cycles)
    for _ in range(3):
        shifted = rest * 2.0**32
        whole = xp.trunc(shifted)
        words.append(cast(whole, "int64"))
        rest = shifted - whole
    return xp.stack(words)


def float64_phases(
    positions: Shaped[Any, "*seq"],
    constants: Int64[Any, "7 *axes pairs"],
    *,
    scale: float = 1.0,
) -> tuple[Float64[Any, "*out pairs"], Float64[Any, "*out pairs"]]:
    """Return the cosine and the sine of each pair, NaN where a position is out of range.

    Args:
        positions: Integers or reals smaller than ``LIMIT`` in size. Several coordinates are
            on the first axis.
        constants: From :func:`turn_constants`, as an array of the same library.
        scale: Multiplier of every phase.

    Example:
        >>> cos, sin = float64_phases(np.array([2.5]), turn_constants(np.array([3.0])))
        >>> bool(np.allclose(sin, np.sin(7.5), rtol=0, atol=1e-15))
        True
    """
    if len(constants.shape) == 2:
        positions, constants = positions[None], constants[:, None]
    return turn_phases(
        positions,
        constants[:3],
        step_words=constants[3:6],
        rates=float64_from_bits(constants[6]),
        scale=scale,
    )


def turn_phases(
    positions: Shaped[Any, "axes *seq"],
    words: Int64[Any, "3 axes pairs"],
    *,
    step_words: Int64[Any, "3 axes pairs"],
    rates: Float64[Any, "axes pairs"],
    scale: float = 1.0,
) -> tuple[Float64[Any, "*seq pairs"], Float64[Any, "*seq pairs"]]:
    """Return :func:`float64_phases` for given words.

    Args:
        positions: Coordinates, one per entry of the first axis.
        words: Words of each frequency in turns per position.
        step_words: Words of each frequency in turns per step.
        rates: Frequencies in radians per position.
        scale: Multiplier of every phase.
    """
    xp = namespace_of(rates)
    turns: Any = 0
    direct: Any = 0.0
    bound: Any = 0.0
    remainder: Any = 0.0
    inside: Any = True
    for axis in range(rates.shape[0]):
        at, rate = positions[axis], rates[axis]
        in_range = is_in_range(at)
        at = cast(xp.where(in_range, at, xp.zeros_like(at)), "float64")
        whole = at
        if is_real(positions):
            whole = xp.trunc(at)
            fraction = (at - whole) * STEPS
            steps = xp.round(fraction)
            turns = _add(turns, cast(steps, "int64"), step_words[:, axis])
            remainder = remainder + (fraction - steps)[..., None] * (rate / STEPS)
        turns = _add(turns, cast(whole, "int64"), words[:, axis])
        angle = at[..., None] * rate
        direct, bound = direct + angle, bound + xp.abs(angle)
        inside = in_range & inside
    # To the nearest quarter turn, so that the remaining angle is at most π/4 in size.
    quarter = (turns + UNIT // 8) >> 58
    rest = cast(turns - (quarter << 58), "float64")
    reduced = rest * (2 * np.pi / UNIT) + remainder
    # Small angles directly: integers would lose the relative accuracy of their sine.
    angle = xp.where(bound < 0.75, direct, reduced)
    cos, sin = _rotate_by_quarters(xp.cos(angle), xp.sin(angle), quarter)
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return nan_outside(inside, cos, sin)


def float64_digit_tables(
    constants: Int64[np.ndarray, "7 pairs"], *, scale: float = 1.0
) -> Float64[np.ndarray, "1 2 3 256 pairs"]:
    """Return :func:`firstlayer.positions.phases.phase_tables` in float64.

    There is one level, for whole positions. Kernels multiply the phases of a position's
    digits, which is faster than a cosine and a sine. Their error is at most 2e-15.

    Args:
        constants: From :func:`turn_constants`.
        scale: Multiplier of every phase.

    Example:
        >>> float64_digit_tables(turn_constants(np.array([1.0, 0.01]))).shape
        (1, 2, 3, 256, 2)
    """
    digits = np.arange(256) * 256 ** np.arange(3)[:, None]
    tables = np.stack(float64_phases(digits, constants))
    tables[:, 0] *= scale
    return tables[None]


def float64_phase_tables(
    frequencies: Float64[np.ndarray, "*axes pairs"], *, scale: float = 1.0
) -> tuple[
    Float64[np.ndarray, "levels *axes 2 3 256 pairs"],
    Float64[np.ndarray, "levels *axes pairs"],
]:
    """Return :func:`firstlayer.positions.phases.phase_tables` in float64.

    For graphs that cannot compute with the bits of integers, such as those of ONNX. The
    error of a phase is at most 2e-15 for each axis and level.

    Args:
        frequencies: Angle per position of each pair, in radians.
        scale: Multiplier of every phase.

    Example:
        >>> tables, rates = float64_phase_tables(np.array([1000.0, 1.0]))
        >>> tables.shape, rates.dtype
        ((2, 2, 3, 256, 2), dtype('float64'))
    """
    levels = [np.asarray(frequencies, np.float64)]
    if np.abs(levels[0]).max(initial=0.0) > 1.0:
        levels.append(levels[0] / FRACTION_STEPS)
    rates = np.stack(levels)
    rows = rates.reshape(-1, rates.shape[-1])
    tables = np.concatenate([float64_digit_tables(turn_constants(row)) for row in rows])
    # On the first axis only: the phases of the axes are multiplied.
    tables[0, :, 0] *= scale
    return tables.reshape(*rates.shape[:-1], *tables.shape[1:]), rates


def _add(turns: Any, count: Any, words: Any) -> Any:
    """Return ``turns`` plus ``count`` times the frequency, without whole turns."""
    count = count[..., None]
    high = (count * words[0]) & 0xFFFFFFFF
    low = count * words[1] + ((count * words[2]) >> 32)
    return (turns + (high << 28) + (low >> 4)) & (UNIT - 1)


def _rotate_by_quarters(cos: Any, sin: Any, quarter: Any) -> tuple[Any, Any]:
    xp, is_odd = namespace_of(cos), (quarter & 1) == 1
    cos, sin = xp.where(is_odd, sin, cos), xp.where(is_odd, cos, sin)
    # Subtracted from 0 instead of negated: the cosine of a quarter turn is 0.0, not -0.0.
    cos = xp.where(((quarter + 1) & 2) == 2, 0.0 - cos, cos)
    return cos, xp.where((quarter & 2) == 2, 0.0 - sin, sin)
