"""How fast each rotary feature pair turns: the frequencies that make a rotary scheme.

A pair's angle is the sum, over the coordinates of a position, of coordinate times
frequency. So a scheme is a row of frequencies, ``(pairs,)``, or a matrix of them, ``(axes,
pairs)``, in which a pair that belongs to one axis has frequency 0 on the others. Text
models turn by one coordinate. Multimodal models (M-RoPE) turn by time, height and width;
image towers by row and column.

Everything here is float64 on the host, made once from hyper-parameters; the scaling rules
for long contexts are in :mod:`firstlayer.positions.scaling`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from .._check import not_negative, number, positive


def inverse_frequencies(
    rotary_dim: int, *, base: float = 10_000.0
) -> Float64[np.ndarray, " pairs"]:
    """Return the angle per position of each feature pair, fastest first.

    Args:
        rotary_dim: How many features are rotated. Positive and even.
        base: Ratio of the slowest wavelength to the fastest, nearly. Greater than 1.

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
    """Share the pairs out between the axes of a position, as M-RoPE does.

    Args:
        frequencies: The frequency of each pair.
        sections: How many pairs each axis gets, in the order of the axes; they add up to
            the number of pairs.
        interleaved: Deal the pairs out in turn, what is left to the first axis (Qwen3-VL),
            instead of giving each axis a run of them (Qwen2-VL).

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
    owner = _dealt(sections, pairs) if interleaved else np.repeat(axes, sections)
    return np.where(owner == axes[:, None], frequencies, 0.0)


def _dealt(sections: list[int], pairs: int) -> np.ndarray:
    turn = np.arange(pairs) % len(sections)
    most = np.bincount(turn, minlength=len(sections))
    for axis, (size, limit) in enumerate(zip(sections, most, strict=True)):
        if axis and size > limit:
            raise ValueError(
                f"sections[{axis}] must be at most {limit} of {pairs} interleaved pairs, "
                f"got {size}"
            )
    rounds = np.arange(pairs) // len(sections)
    return np.where(rounds < np.asarray(sections)[turn], turn, 0)


def qwen_axial_frequencies(
    head_dim: int, *, base: float = 10_000.0
) -> Float64[np.ndarray, "2 pairs"]:
    """Return the frequencies of Qwen-VL's image towers: rows, then columns, as fast.

    Args:
        head_dim: Size of the axis to rotate, a multiple of 4.
        base: As in :func:`inverse_frequencies`.

    Example:
        >>> qwen_axial_frequencies(8).tolist()
        [[1.0, 0.01, 0.0, 0.0], [0.0, 0.0, 1.0, 0.01]]
    """
    _quarters(head_dim)
    return np.kron(np.eye(2), inverse_frequencies(head_dim // 2, base=base))


def pixtral_axial_frequencies(
    head_dim: int, *, base: float = 10_000.0
) -> Float64[np.ndarray, "2 pairs"]:
    """Return the frequencies of Pixtral's image tower: rows the even, columns the odd.

    Args:
        head_dim: Size of the axis to rotate, a multiple of 4.
        base: As in :func:`inverse_frequencies`.

    Example:
        >>> pixtral_axial_frequencies(8).round(3).tolist()
        [[1.0, 0.01, 0.0, 0.0], [0.0, 0.0, 0.1, 0.001]]
    """
    _quarters(head_dim)
    pairs = inverse_frequencies(head_dim, base=base)
    none = np.zeros(head_dim // 4)
    return np.stack([np.r_[pairs[0::2], none], np.r_[none, pairs[1::2]]])


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
    """Return the frequencies of a rotary layer, and what its turns are multiplied by.

    Args:
        head_dim: Size of the axis to rotate. Positive, and even if all of it is rotated.
        base: As in :func:`inverse_frequencies`.
        scaling: A rule of :mod:`firstlayer.positions.scaling`, or None.
        rotary_dim: How many features are rotated, the first ones; None is all.
        sections: How many pairs each axis of a position gets; None is one axis.
        interleaved_sections: As ``interleaved`` in :func:`section_frequencies`.
        frequencies: Ready ones, ``(pairs,)`` or ``(axes, pairs)``, in place of all others.

    Example:
        >>> layer_frequencies(8, rotary_dim=4)
        (array([1.  , 0.01]), 1.0)
    """
    if frequencies is not None:
        if scaling is not None or sections is not None or rotary_dim is not None:
            raise ValueError(
                "give frequencies or scaling, rotary_dim and sections, not both"
            )
        return _ready(frequencies, head_dim), 1.0
    rotary_dim = rotated_features(rotary_dim, head_dim)
    if scaling is None:
        pairs, factor = inverse_frequencies(rotary_dim, base=base), 1.0
    else:
        pairs = scaling.inverse_frequencies(rotary_dim, base=base)
        factor = scaling.attention_factor
    if sections is None:
        return pairs, factor
    return section_frequencies(pairs, sections, interleaved=interleaved_sections), factor


def rotated_features(rotary_dim: int | None, head_dim: int) -> int:
    """Return ``rotary_dim``, or ``head_dim`` if that is None, if it can be rotated."""
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


def _ready(frequencies: Any, head_dim: int) -> np.ndarray:
    ready = np.array(frequencies, np.float64)
    if ready.ndim not in (1, 2) or ready.size == 0 or not np.isfinite(ready).all():
        raise ValueError(
            "frequencies must be finite, of shape (pairs,) or (axes, pairs), "
            f"got shape {ready.shape}"
        )
    if 2 * ready.shape[-1] > positive("head_dim", head_dim):
        raise ValueError(
            f"frequencies must have at most {head_dim // 2} pairs for head_dim {head_dim}, "
            f"got {ready.shape[-1]}"
        )
    return ready


def _quarters(head_dim: int) -> None:
    if positive("head_dim", head_dim) % 4:
        raise ValueError(f"head_dim must be a multiple of 4, got {head_dim}")
