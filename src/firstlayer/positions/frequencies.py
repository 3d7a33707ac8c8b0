"""Frequencies of rotary feature pairs.

The angle of a pair is the sum, over the coordinates of a position, of coordinate times
frequency. A rotary scheme is therefore a vector of frequencies, ``(pairs,)``, or a matrix
of them, ``(axes, pairs)``, in which a pair that belongs to one axis has frequency 0 on the
others. Text models have one coordinate, multimodal models (M-RoPE) have time, height and
width, and image towers have row and column (:mod:`firstlayer.positions.axial`).

Frequencies are computed once from hyper-parameters, in float64 on the host. The scaling
rules for long contexts are in :mod:`firstlayer.positions.scaling`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from .._check import not_masked, not_negative, number, positive


def inverse_frequencies(
    rotary_dim: int, *, base: float = 10_000.0
) -> Float64[np.ndarray, " pairs"]:
    """Return the angle per position of each feature pair, fastest first.

    Args:
        rotary_dim: Number of rotated features. Positive and even.
        base: Approximate ratio of the slowest wavelength to the fastest. Greater than 1.

    Example:
        >>> inverse_frequencies(4)
        array([1.  , 0.01])
    """
    _even("rotary_dim", rotary_dim)
    ratio = number("base", base)
    if not 1.0 < ratio < np.inf:
        raise ValueError(f"base must be greater than 1, got {base}")
    return ratio ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def section_frequencies(
    frequencies: Float64[np.ndarray, " pairs"],
    sections: Sequence[int],
    *,
    interleaved: bool = False,
) -> Float64[np.ndarray, "axes pairs"]:
    """Assign each pair to one axis of a position, as M-RoPE does.

    Args:
        frequencies: Frequency of each pair.
        sections: Number of pairs of each axis. Their sum is the number of pairs.
        interleaved: Assign pairs to the axes round-robin, and the remaining ones to the
            first axis (Qwen3-VL), instead of in contiguous runs (Qwen2-VL).

    Example:
        >>> w = np.array([1.0, 0.1, 0.01])
        >>> section_frequencies(w, [2, 1]).tolist()
        [[1.0, 0.1, 0.0], [0.0, 0.0, 0.01]]
        >>> section_frequencies(w, [2, 1], interleaved=True).tolist()
        [[1.0, 0.0, 0.01], [0.0, 0.1, 0.0]]
    """
    sections, pairs = [not_negative("sections", n) for n in sections], len(frequencies)
    if sum(sections) != pairs:
        raise ValueError(f"sections must add up to {pairs} pairs, got {sections}")
    axes = np.arange(len(sections))
    axis_of = _round_robin(sections, pairs) if interleaved else np.repeat(axes, sections)
    return np.where(axis_of == axes[:, None], frequencies, 0.0)


def _round_robin(sections: list[int], pairs: int) -> np.ndarray:
    axis_of = np.arange(pairs) % len(sections)
    limits = np.bincount(axis_of, minlength=len(sections))
    for axis, (size, limit) in enumerate(zip(sections, limits, strict=True)):
        if axis and size > limit:
            raise ValueError(
                f"sections[{axis}] must be at most {limit} of {pairs} interleaved pairs, "
                f"got {size}"
            )
    rounds = np.arange(pairs) // len(sections)
    return np.where(rounds < np.asarray(sections)[axis_of], axis_of, 0)


def layer_frequencies(
    head_dim: int,
    *,
    base: float = 10_000.0,
    scaling: Any = None,
    rotary_dim: int | None = None,
    sections: Sequence[int] | None = None,
    interleaved_sections: bool = False,
    frequencies: Any = None,
) -> tuple[Float64[np.ndarray, "*axes pairs"], float]:
    """Return the frequencies of a rotary layer and its attention factor.

    Args:
        head_dim: Number of features of a head. Positive, and even if all are rotated.
        base: As in :func:`inverse_frequencies`.
        scaling: Rule of :mod:`firstlayer.positions.scaling`, or None.
        rotary_dim: Number of rotated features, the first ones; None is all.
        sections: Number of pairs of each axis of a position; None is one axis.
        interleaved_sections: As ``interleaved`` in :func:`section_frequencies`.
        frequencies: Explicit frequencies, ``(pairs,)`` or ``(axes, pairs)``, used instead
            of the arguments above.

    Example:
        >>> layer_frequencies(8, rotary_dim=4)
        (array([1.  , 0.01]), 1.0)
    """
    if frequencies is not None:
        if scaling is not None or sections is not None or rotary_dim is not None:
            raise ValueError(
                "give frequencies or scaling, rotary_dim and sections, not both"
            )
        return _check_frequencies(frequencies, head_dim), 1.0
    rotary_dim = check_rotary_dim(rotary_dim, head_dim)
    if scaling is None:
        pairs, factor = inverse_frequencies(rotary_dim, base=base), 1.0
    else:
        pairs = scaling.inverse_frequencies(rotary_dim, base=base)
        factor = scaling.attention_factor
    if sections is None:
        return pairs, factor
    return section_frequencies(pairs, sections, interleaved=interleaved_sections), factor


def check_rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    """Return ``rotary_dim``, or ``head_dim`` if it is None, if it is valid."""
    if rotary_dim is None:
        return _even("head_dim", head_dim)
    if _even("rotary_dim", rotary_dim) > positive("head_dim", head_dim):
        raise ValueError(
            f"rotary_dim must be at most head_dim {head_dim}, got {rotary_dim}"
        )
    return int(rotary_dim)


def _even(name: str, value: int) -> int:
    if positive(name, value) % 2:
        raise ValueError(f"{name} must be positive and even, got {value}")
    return int(value)


def _check_frequencies(frequencies: Any, head_dim: int) -> np.ndarray:
    array = np.array(not_masked(frequencies, name="frequencies"), np.float64)
    if array.ndim not in (1, 2) or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(
            "frequencies must be finite, of shape (pairs,) or (axes, pairs), "
            f"got shape {array.shape}"
        )
    if 2 * array.shape[-1] > positive("head_dim", head_dim):
        raise ValueError(
            f"frequencies must have at most {head_dim // 2} pairs for head_dim {head_dim}, "
            f"got {array.shape[-1]}"
        )
    return array
