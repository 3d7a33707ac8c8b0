"""Lucid's embedding layers, with every option its document has, and those work.

``layer(x)`` looks up; ``y, pull = layer.vjp(x)`` also returns the function from the
gradient of ``y`` to row gradients, as everywhere in :mod:`firstlayer.numpy`.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from ... import numpy as face
from ..._check import positive
from ...embeddings.init import Seed

__all__ = ["Embedding", "EmbeddingBag", "RotaryEmbedding", "SinusoidalEmbedding"]

Ids = Shaped[Any, "..."] | list[Any] | int


class Embedding(face.Embedding):
    """Looks up rows of a table by id.

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Width of a row.
        padding_idx: The id that is padding; negative counts from the end. Its row is zero,
            gets no gradient, and whatever else writes to it is undone.
        max_norm: Every row longer than this is shortened to it, in place, at each call.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        sparse: Accepted: gradients are by row either way.
        device: None or ``"cpu"``.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: A seed or a generator for the table, which is drawn from N(0, 1).

    Shape:
        - x: integers of any shape, or bools, which are 0 and 1
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
        _check_device(device)
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
        return super().__call__(_ids(x))

    def forward(self, x: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return the rows of ``x``."""
        return self(x)

    def vjp(self, x: Ids) -> Any:
        """Return the rows and the function from their gradient to the table's."""
        return super().vjp(_ids(x))

    def extra_repr(self) -> str:
        """Return the layer's options in a few words."""
        return _words(self)

    def __repr__(self) -> str:
        return f"Embedding({self.extra_repr()})"


class EmbeddingBag(face.EmbeddingBag):
    """Looks up rows and pools them, a row of output for each bag of ids.

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Width of a row.
        max_norm: Every row longer than this is shortened to it, in place, at each call.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        mode: ``"sum"``, ``"mean"`` or ``"max"``; a word that is none of them is refused.
        sparse: Accepted: gradients are by row either way.
        padding_idx: The id that is padding and does not count.
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
        _check_device(device)
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
        return super().__call__(_ids(x), offsets, per_sample_weights)

    def forward(
        self, x: Ids, offsets: Any = None, per_sample_weights: Any = None
    ) -> Float[np.ndarray, "bags embedding_dim"]:
        """Return a row for each bag."""
        return self(x, offsets, per_sample_weights)

    def vjp(self, x: Ids, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Return the output and the function from its gradient to all others."""
        self.project()
        return super().vjp(_ids(x), offsets, per_sample_weights)

    def extra_repr(self) -> str:
        """Return the layer's options in a few words."""
        return f"{_words(self)}, mode={self.mode!r}"

    def __repr__(self) -> str:
        return f"EmbeddingBag({self.extra_repr()})"


class SinusoidalEmbedding:
    """Holds the sines and cosines of the first positions, sines in the even columns.

    Args:
        num_positions: How many positions.
        embedding_dim: Width of a row. Positive and even.
        base: Ratio of the slowest wavelength to the fastest.

    Shape:
        - output: ``(num_positions, embedding_dim)``, to be sliced: ``pe()[:length]``

    Example:
        >>> SinusoidalEmbedding(128, 4)()[0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """

    def __init__(
        self, num_positions: int, embedding_dim: int, *, base: float = 10_000.0
    ) -> None:
        _check_even("embedding_dim", embedding_dim)
        self.num_positions = positive("num_positions", num_positions)
        self.embedding_dim, self.base = embedding_dim, base
        waves = face.SinusoidalPositions(embedding_dim, base=base)
        self.pe = waves.encode(np.arange(num_positions))

    def __call__(self) -> Float[np.ndarray, "num_positions embedding_dim"]:
        return self.pe

    def forward(self) -> Float[np.ndarray, "num_positions embedding_dim"]:
        """Return the table."""
        return self.pe


class RotaryEmbedding:
    """Holds the cosines and sines that rotate queries and keys, each pair's twice.

    Args:
        head_dim: Width of a head. Positive and even.
        max_position_embeddings: How many positions.
        base: Ratio of the slowest wavelength to the fastest.

    Shape:
        - output: cosines and sines, each ``(max_position_embeddings, head_dim)``, both
          halves alike

    Example:
        >>> cos, sin = RotaryEmbedding(4, 128)()
        >>> sin[1].round(4).tolist()[:2]
        [0.8414..., 0.0099...]
    """

    def __init__(
        self, head_dim: int, max_position_embeddings: int, base: float = 10_000.0
    ) -> None:
        _check_even("head_dim", head_dim)
        count = positive("max_position_embeddings", max_position_embeddings)
        self.head_dim, self.max_position_embeddings, self.base = head_dim, count, base
        phases = face.RotaryPositions(head_dim, base=base).phases(np.arange(count))
        self.cos_cached, self.sin_cached = (np.tile(turn, 2) for turn in phases)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        return self.cos_cached, self.sin_cached

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and the sines."""
        return self.cos_cached, self.sin_cached


def _ids(x: Ids) -> np.ndarray:
    ids = np.asarray(x)
    if ids.dtype == np.bool_ or (ids.size == 0 and not isinstance(x, np.ndarray)):
        return ids.astype(np.int64)
    return ids


def _words(layer: Embedding | EmbeddingBag) -> str:
    words = [str(layer.num_embeddings), str(layer.embedding_dim)]
    defaults = {"padding_idx": None, "max_norm": None, "norm_type": 2.0}
    for name, default in defaults.items():
        if (value := getattr(layer, name)) != default:
            words.append(f"{name}={value}")
    return ", ".join(words)


def _check_even(name: str, value: int) -> None:
    if positive(name, value) % 2:
        raise ValueError(f"{name} must be positive and even, got {value}")


def _check_device(device: Any) -> None:
    if device not in (None, "cpu"):
        raise ValueError(f"device must be None or 'cpu', got {device!r}")
