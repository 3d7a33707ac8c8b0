"""Frequencies of image towers, whose positions are the row and column of a patch.

Each pair of features rotates by the row or by the column. Towers differ in the frequencies
of the two axes and in the unit of a coordinate:

- Qwen-VL: the same frequencies for rows and columns, which are counted in patches.
- Pixtral: one list of frequencies, of which rows have the even and columns the odd ones.
- DINOv3: the same frequencies for both. Coordinates are the centers of the patches, from -1
  to 1 over the whole image, so an image of another size has the same range.

The matrices are the ``frequencies`` of a rotary layer with positions of two coordinates,
from :func:`firstlayer.positions.from_grid` or, for DINOv3,
:func:`firstlayer.positions.from_patches`. All towers here have the layout ``"half"``.
"""

import numpy as np
from jaxtyping import Float64

from .._check import positive
from .frequencies import inverse_frequencies


def axial_frequencies(
    head_dim: int, *, axes: int = 2, base: float = 10_000.0
) -> Float64[np.ndarray, "axes pairs"]:
    """Return the same frequencies for every axis, in contiguous runs of pairs.

    Args:
        head_dim: Number of features of a head. If ``2 * axes`` does not divide it, the last
            features are not rotated.
        axes: Number of coordinates of a position.
        base: As in :func:`firstlayer.positions.frequencies.inverse_frequencies`.

    Example:
        >>> axial_frequencies(8, axes=3).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    pairs = positive("head_dim", head_dim) // (2 * positive("axes", axes))
    if pairs == 0:
        raise ValueError(f"head_dim must be at least {2 * axes}, got {head_dim}")
    return np.kron(np.eye(axes), inverse_frequencies(2 * pairs, base=base))


def qwen_axial_frequencies(
    head_dim: int, *, base: float = 10_000.0
) -> Float64[np.ndarray, "2 pairs"]:
    """Return the frequencies of Qwen-VL's image towers: the same for rows and columns.

    Args:
        head_dim: Number of features of a head, a multiple of 4.
        base: As in :func:`firstlayer.positions.frequencies.inverse_frequencies`.

    Example:
        >>> qwen_axial_frequencies(8).tolist()
        [[1.0, 0.01, 0.0, 0.0], [0.0, 0.0, 1.0, 0.01]]
    """
    _check_multiple_of_4(head_dim)
    return axial_frequencies(head_dim, base=base)


def pixtral_axial_frequencies(
    head_dim: int, *, base: float = 10_000.0
) -> Float64[np.ndarray, "2 pairs"]:
    """Return the frequencies of Pixtral's image tower: even for rows, odd for columns.

    Args:
        head_dim: Number of features of a head, a multiple of 4.
        base: As in :func:`firstlayer.positions.frequencies.inverse_frequencies`.

    Example:
        >>> pixtral_axial_frequencies(8).round(3).tolist()
        [[1.0, 0.01, 0.0, 0.0], [0.0, 0.0, 0.1, 0.001]]
    """
    _check_multiple_of_4(head_dim)
    pairs = inverse_frequencies(head_dim, base=base)
    zeros = np.zeros(head_dim // 4)
    return np.stack([np.r_[pairs[0::2], zeros], np.r_[zeros, pairs[1::2]]])


def dinov3_axial_frequencies(
    head_dim: int, *, base: float = 100.0
) -> Float64[np.ndarray, "2 pairs"]:
    """Return the frequencies of DINOv3, for coordinates from -1 to 1.

    The fastest pair of each axis turns once per unit, twice over the whole image.

    Args:
        head_dim: Number of features of a head, a multiple of 4.
        base: As in :func:`firstlayer.positions.frequencies.inverse_frequencies`.

    Example:
        >>> (dinov3_axial_frequencies(8) / (2 * np.pi)).tolist()
        [[1.0, 0.1, 0.0, 0.0], [0.0, 0.0, 1.0, 0.1]]
    """
    return 2 * np.pi * qwen_axial_frequencies(head_dim, base=base)


def _check_multiple_of_4(head_dim: int) -> None:
    if positive("head_dim", head_dim) % 4:
        raise ValueError(f"head_dim must be a multiple of 4, got {head_dim}")
