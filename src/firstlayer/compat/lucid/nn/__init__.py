"""Embedding layers of Lucid, with every documented option.

``layer(x)`` is the forward; ``y, pull = layer.vjp(x)`` also returns the pullback from the
gradient of ``y`` to row gradients, as in :mod:`firstlayer.numpy`.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from .... import numpy as layers
from ...._check import positive
from ....embeddings.init import Seed
from . import functional
from .functional import Ids, as_ids, check_device, check_even, zero_padding

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "RotaryEmbedding",
    "SinusoidalEmbedding",
    "SinusoidalEmbedding2D",
    "functional",
]


class Embedding(layers.Embedding):
    """Look up rows of a table by id.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Width of each row.
        padding_idx: Id of padding. Negative values count from the end. The output is zero
            at padding, and padding gets no gradient.
        max_norm: Rows longer than this are rescaled to it, in place, at each call.
        norm_type: The p of the p-norm.
        scale_grad_by_freq: Divide the gradient of a row by the frequency of its id.
        sparse: Accepted for compatibility; gradients are always row gradients.
        device: None or ``"cpu"``.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for drawing the table from N(0, 1).

    Shape:
        - x: integers or bools (0 and 1) of any shape
        - output: ``(*x.shape, embedding_dim)``

    Example:
        >>> Embedding(num_embeddings=100, embedding_dim=16)([[1, 5, 3], [0, 2, 7]]).shape
        (2, 3, 16)
        >>> Embedding(50, 8, padding_idx=-1)
        Embedding(50, 8, padding_idx=49)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        rng: Seed = None,
    ) -> None:
        check_device(device)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            dtype=dtype,
            rng=rng,
        )
        self.sparse = sparse

    def __call__(self, x: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        self.project()
        ids = as_ids(x)
        return zero_padding(super().__call__(ids), ids, self.padding_idx)

    def forward(self, x: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return the rows of ``x``."""
        return self(x)

    def vjp(self, x: Ids) -> Any:
        """Return the rows and the pullback from their gradient to the table's."""
        ids = as_ids(x)
        rows, pull = super().vjp(ids)
        return zero_padding(rows, ids, self.padding_idx), pull

    def extra_repr(self) -> str:
        """Return the arguments as shown by ``repr``."""
        return _shown_arguments(self)

    def __repr__(self) -> str:
        return f"Embedding({self.extra_repr()})"


class EmbeddingBag(layers.EmbeddingBag):
    """Look up rows and pool them, one output row per bag of ids.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Width of each row.
        max_norm: Rows longer than this are rescaled to it, in place, at each call.
        norm_type: The p of the p-norm.
        scale_grad_by_freq: Divide the gradient of a row by the frequency of its id.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Accepted for compatibility; gradients are always row gradients.
        padding_idx: Id of padding, which is not pooled.
        device: None or ``"cpu"``.
        dtype: As for :class:`Embedding`.
        include_last_offset: Whether the last offset is the end of the last bag.
        rng: As for :class:`Embedding`.

    Shape:
        - x: ``(bags, length)``, or ``(n,)`` with offsets
        - offsets: ``(bags,)``, or ``(bags + 1,)`` with ``include_last_offset``
        - per_sample_weights: as ``x``, in every mode
        - output: ``(bags, embedding_dim)``

    Example:
        >>> EmbeddingBag(10, 4, mode="max")([1, 2, 4, 5], offsets=[0, 3]).shape
        (2, 4)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Any = "mean",
        sparse: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        include_last_offset: bool = False,
        rng: Seed = None,
    ) -> None:
        check_device(device)
        super().__init__(
            num_embeddings,
            embedding_dim,
            mode=mode,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            include_last_offset=include_last_offset,
            dtype=dtype,
            rng=rng,
        )
        self.sparse = sparse

    def __call__(
        self, x: Ids, offsets: Any = None, per_sample_weights: Any = None
    ) -> Float[np.ndarray, "bags embedding_dim"]:
        self.project()
        return super().__call__(as_ids(x), offsets, per_sample_weights)

    def forward(
        self, x: Ids, offsets: Any = None, per_sample_weights: Any = None
    ) -> Float[np.ndarray, "bags embedding_dim"]:
        """Return one row per bag."""
        return self(x, offsets, per_sample_weights)

    def vjp(self, x: Ids, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Return the output and the pullback from its gradient to all others."""
        self.project()
        return super().vjp(as_ids(x), offsets, per_sample_weights)

    def extra_repr(self) -> str:
        """Return the arguments as shown by ``repr``."""
        return f"{_shown_arguments(self)}, mode={self.mode!r}"

    def __repr__(self) -> str:
        return f"EmbeddingBag({self.extra_repr()})"


class SinusoidalEmbedding:
    """Table of sines (even columns) and cosines (odd columns) of the first positions.

    Args:
        num_positions: Number of positions.
        embedding_dim: Width of each row. Positive and even.
        base: Base of the frequencies.

    Shape:
        - output: ``(num_positions, embedding_dim)``, to be sliced: ``pe()[:length]``

    Example:
        >>> SinusoidalEmbedding(128, 4)()[0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    def __init__(
        self, num_positions: int, embedding_dim: int, *, base: float = 10_000.0
    ) -> None:
        self.pe = functional.sinusoidal_embedding(num_positions, embedding_dim, base=base)
        self.num_positions = num_positions
        self.embedding_dim, self.base = embedding_dim, base

    def __call__(self) -> Float[np.ndarray, "num_positions embedding_dim"]:
        return self.pe

    def forward(self) -> Float[np.ndarray, "num_positions embedding_dim"]:
        """Return the table."""
        return self.pe


class SinusoidalEmbedding2D:
    """Table of sinusoids of the cells of a grid, row after row.

    Args:
        height: Number of rows of the grid.
        width: Number of columns of the grid.
        embedding_dim: Width of each vector. Divisible by 4: the first half encodes the
            column, the second half the row.
        base: Base of the frequencies.

    Shape:
        - output: ``(height * width, embedding_dim)``

    Example:
        >>> SinusoidalEmbedding2D(height=16, width=24, embedding_dim=128)().shape
        (384, 128)
    """

    def __init__(
        self, height: int, width: int, embedding_dim: int, *, base: float = 10_000.0
    ) -> None:
        self.pe = functional.sinusoidal_embedding_2d(
            height, width, embedding_dim, base=base
        )
        self.height, self.width = height, width
        self.embedding_dim, self.base = embedding_dim, base

    def __call__(self) -> Float[np.ndarray, "cells embedding_dim"]:
        return self.pe

    def forward(self) -> Float[np.ndarray, "cells embedding_dim"]:
        """Return the table."""
        return self.pe


class RotaryEmbedding:
    """Tables of cosines and sines that rotate queries and keys.

    Args:
        head_dim: Width of each head. Positive and even.
        max_position_embeddings: Number of positions.
        base: Base of the frequencies.

    Shape:
        - output: cosines and sines, each ``(max_position_embeddings, head_dim)``; the two
          halves of each row are equal

    Example:
        >>> cos, sin = RotaryEmbedding(4, 128)()
        >>> sin[1].round(4).tolist()[:2]
        [0.8414..., 0.0099...]
    """

    def __init__(
        self, head_dim: int, max_position_embeddings: int, base: float = 10_000.0
    ) -> None:
        check_even("head_dim", head_dim)
        count = positive("max_position_embeddings", max_position_embeddings)
        self.head_dim, self.max_position_embeddings, self.base = head_dim, count, base
        phases = layers.RotaryPositions(head_dim, base=base).phases(np.arange(count))
        self.cos_cached, self.sin_cached = (np.tile(part, 2) for part in phases)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        return self.cos_cached, self.sin_cached

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and the sines."""
        return self.cos_cached, self.sin_cached


def _shown_arguments(layer: Embedding | EmbeddingBag) -> str:
    words = [str(layer.num_embeddings), str(layer.embedding_dim)]
    defaults = {"padding_idx": None, "max_norm": None, "norm_type": 2.0}
    for name, default in defaults.items():
        if (value := getattr(layer, name)) != default:
            words.append(f"{name}={value}")
    return ", ".join(words)
