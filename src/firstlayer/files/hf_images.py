"""Frequencies of image towers and of other models with several coordinates.

A transformers config of an image tower has the base alone. Which coordinate rotates which
pair is defined in the code of each model, here as of transformers 5.22.2.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from ..positions.axial import axial_frequencies, pixtral_axial_frequencies
from ..positions.frequencies import inverse_frequencies

#: Image towers whose configs have the default rope type, or none.
_WITHOUT_TYPE = frozenset({
    "dinov3_vit",
    "eomt_dinov3",
    "llama4_vision_model",
    "sapiens2",
})


def is_image_tower(config: dict[str, Any], rope_type: str) -> bool:
    """Return whether a config is of an image tower.

    Example:
        >>> is_image_tower({"model_type": "sapiens2"}, "default")
        True
    """
    return rope_type == "axial" or config.get("model_type") in _WITHOUT_TYPE


def image_frequencies(
    model_type: str | None, head_dim: int, *, base: float
) -> Float64[np.ndarray, "axes pairs"]:
    """Return the frequencies of an image tower: row and column, or time, row and column.

    Args:
        model_type: Model type of the config. One that is not listed here has the
            frequencies of Qwen2-VL, as most have.
        head_dim: Number of features of a head.
        base: Base of the frequencies.

    Example:
        >>> image_frequencies("kimi_k25_vision", 8, base=10_000.0).tolist()
        [[0.0, 1.0, 0.0, 0.01], [1.0, 0.0, 0.01, 0.0]]
    """
    match model_type:
        case "pixtral":
            return pixtral_axial_frequencies(head_dim, base=base)
        case "minimax_m3_vl_vision":
            return axial_frequencies(head_dim, axes=3, base=base)
        case "dinov3_vit" | "eomt_dinov3" | "sapiens2":
            return 2.0 * math.pi * axial_frequencies(head_dim, base=base)
        case "llama4_vision_model":
            # The column has the first pairs.
            return axial_frequencies(head_dim, base=base)[::-1].copy()
        case "kimi_k25_vision":
            # Pairs alternate between column and row.
            rows, columns = axial_frequencies(head_dim, base=base)
            pairs = len(rows) // 2
            order = np.arange(2 * pairs).reshape(2, pairs)[::-1].T.ravel()
            return np.stack([rows[order], columns[order]])
    return axial_frequencies(head_dim, base=base)


def ernie_frequencies(
    head_dim: int, *, base: float, sections: Sequence[int]
) -> Float64[np.ndarray, "3 pairs"]:
    """Return the frequencies of Ernie 4.5 VL: pairs alternate between row and column.

    Args:
        head_dim: Number of features of a head.
        base: Base of the frequencies.
        sections: Number of pairs of row, column and time; time has the last ones. Row and
            column have the same number.

    Example:
        >>> w = ernie_frequencies(8, base=10_000.0, sections=[1, 1, 2])
        >>> w.round(3).tolist()
        [[0.0, 0.0, 0.01, 0.001], [1.0, 0.0, 0.0, 0.0], [0.0, 0.1, 0.0, 0.0]]
    """
    w = inverse_frequencies(head_dim, base=base)
    if len(sections) != 3 or sum(sections) != len(w) or sections[0] != sections[1]:
        raise ValueError(
            f"mrope_section must be row, column and time, with as many pairs for row as "
            f"for column and {len(w)} in all, got {list(sections)}"
        )
    axis_of = np.where(np.arange(len(w)) % 2, 2, 1)
    axis_of[2 * sections[0] :] = 0
    return w * (axis_of == np.arange(3)[:, None])
