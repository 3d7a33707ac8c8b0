"""Functions of Lucid's ``nn.functional`` about embeddings and positions.

``embedding`` and ``embedding_bag`` take the table as an argument. For gradients, use
``vjp`` of the layers.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from .... import numpy as layers
from ...._array import compute_dtype
from ...._check import check_real, ids_in_range, positive

__all__ = [
    "apply_rotary_emb",
    "embedding",
    "embedding_bag",
    "sinusoidal_embedding",
    "sinusoidal_embedding_2d",
]

Ids = Shaped[Any, "..."] | list[Any] | int


def embedding(
    x: Ids,
    weight: Float[np.ndarray, "num_embeddings embedding_dim"],
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Float[np.ndarray, "*batch embedding_dim"]:
    """Return the rows of a table by id.

    Args:
        x: Integers or bools (0 and 1) of any shape.
        weight: The table.
        padding_idx: Id of padding, for which the output is zero. Negative values count
            from the end.
        max_norm: Rows longer than this are rescaled to it, in place.
        norm_type: The p of the p-norm.
        scale_grad_by_freq: Accepted for compatibility; belongs to the gradient.
        sparse: Accepted for compatibility; belongs to the gradient.

    Example:
        >>> table = np.arange(8.0).reshape(4, 2)
        >>> embedding([[3, 0]], table, padding_idx=0).tolist()
        [[[6.0, 7.0], [0.0, 0.0]]]
    """
    layer = layers.Embedding(
        *_table_shape(weight),
        padding_idx=padding_idx,
        max_norm=max_norm,
        norm_type=norm_type,
        weight=weight,
    )
    _project(layer, weight)
    ids = as_ids(x)
    return zero_padding(layer(ids), ids, layer.padding_idx)


def embedding_bag(
    x: Ids,
    weight: Float[np.ndarray, "num_embeddings embedding_dim"],
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: Any = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Float[np.ndarray, "bags embedding_dim"]:
    """Return one pooled row per bag of ids.

    Args:
        x: ``(bags, length)`` ids, or ``(n,)`` with offsets.
        weight: The table.
        offsets: First id of each bag.
        max_norm: Rows longer than this are rescaled to it, in place.
        norm_type: The p of the p-norm.
        scale_grad_by_freq: Accepted for compatibility; belongs to the gradient.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Accepted for compatibility; belongs to the gradient.
        per_sample_weights: Weight of each id, in every mode.
        include_last_offset: Whether the last offset is the end of the last bag.
        padding_idx: Id of padding, which is not pooled.

    Example:
        >>> table = np.arange(8.0).reshape(4, 2)
        >>> embedding_bag([1, 2, 3], table, offsets=[0, 2], mode="sum").tolist()
        [[6.0, 8.0], [6.0, 7.0]]
    """
    layer = layers.EmbeddingBag(
        *_table_shape(weight),
        mode=mode,
        padding_idx=padding_idx,
        max_norm=max_norm,
        norm_type=norm_type,
        include_last_offset=include_last_offset,
        weight=weight,
    )
    _project(layer, weight)
    return layer(as_ids(x), offsets, per_sample_weights)


def sinusoidal_embedding(
    num_positions: int, embedding_dim: int, *, base: float = 10_000.0, device: Any = "cpu"
) -> Float[np.ndarray, "num_positions embedding_dim"]:
    """Return sines (even columns) and cosines (odd columns) of the first positions.

    Args:
        num_positions: Number of positions.
        embedding_dim: Width of each row. Positive and even.
        base: Base of the frequencies.
        device: None or ``"cpu"``.

    Example:
        >>> sinusoidal_embedding(num_positions=128, embedding_dim=64).shape
        (128, 64)
    """
    check_device(device)
    check_even("embedding_dim", embedding_dim)
    sinusoids = layers.SinusoidalPositions(embedding_dim, base=base)
    return sinusoids.encode(np.arange(positive("num_positions", num_positions)))


def sinusoidal_embedding_2d(
    height: int,
    width: int,
    embedding_dim: int,
    *,
    base: float = 10_000.0,
    device: Any = "cpu",
) -> Float[np.ndarray, "cells embedding_dim"]:
    """Return sinusoids of the cells of a grid, row after row.

    Args:
        height: Number of rows of the grid.
        width: Number of columns of the grid.
        embedding_dim: Width of each vector. Divisible by 4: the first half encodes the
            column, the second half the row.
        base: Base of the frequencies.
        device: None or ``"cpu"``.

    Example:
        >>> sinusoidal_embedding_2d(2, 3, 4)[-1].round(4).tolist()[:2]
        [0.9093..., -0.416...]
    """
    positive("height", height)
    positive("width", width)
    if positive("embedding_dim", embedding_dim) % 4:
        raise ValueError(f"embedding_dim must be divisible by 4, got {embedding_dim}")
    half = embedding_dim // 2
    columns = sinusoidal_embedding(width, half, base=base, device=device)
    rows = sinusoidal_embedding(height, half, base=base, device=device)
    return np.concatenate(
        [np.tile(columns, (height, 1)), np.repeat(rows, width, axis=0)], axis=-1
    )


def apply_rotary_emb(
    q: Float[np.ndarray, "*lead length head_dim"],
    k: Float[np.ndarray, "*lead length head_dim"],
    cos: Float[np.ndarray, "positions head_dim"],
    sin: Float[np.ndarray, "positions head_dim"],
    position_ids: Any = None,
    *,
    interleaved: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return queries and keys rotated by their positions.

    Args:
        q: Queries.
        k: Keys.
        cos: Cosines, as :class:`RotaryEmbedding` returns them.
        sin: Sines.
        position_ids: Position of each vector, ``(length,)`` or ``(batch, length)`` for
            inputs with a batch and a heads axis. None is ``0, 1, …``.
        interleaved: Pair feature ``2i`` with ``2i + 1`` instead of ``i + head_dim / 2``.
            Pair ``i`` uses column ``i`` of the tables.

    Example:
        >>> from firstlayer.compat.lucid.nn import RotaryEmbedding
        >>> cos, sin = RotaryEmbedding(2, 8)()
        >>> q = np.array([[1.0, 0.0]])
        >>> apply_rotary_emb(q, q, cos, sin, position_ids=[1])[0].round(4).tolist()
        [[0.5403, 0.8415]]
    """
    rotated = [
        _rotated(name, x, cos, sin, position_ids, interleaved=interleaved)
        for name, x in (("q", q), ("k", k))
    ]
    return rotated[0], rotated[1]


def as_ids(x: Ids) -> np.ndarray:
    """Return ids as an array; bools become 0 and 1."""
    ids = np.asarray(x)
    if ids.dtype == np.bool_ or (ids.size == 0 and not isinstance(x, np.ndarray)):
        return ids.astype(np.int64)
    return ids


def zero_padding(
    rows: np.ndarray, ids: np.ndarray, padding_idx: int | None
) -> Float[np.ndarray, "*batch embedding_dim"]:
    """Set rows of padding to zero in place, and return the rows."""
    if padding_idx is not None:
        rows[ids == padding_idx] = 0
    return rows


def check_even(name: str, value: int) -> None:
    """Raise unless a width is positive and even."""
    if positive(name, value) % 2:
        raise ValueError(f"{name} must be positive and even, got {value}")


def check_device(device: Any) -> None:
    """Raise unless arrays are to be in host memory."""
    if device not in (None, "cpu"):
        raise ValueError(f"device must be None or 'cpu', got {device!r}")


def _table_shape(weight: Any) -> tuple[int, int]:
    shape = np.shape(weight)
    if len(shape) != 2:
        raise ValueError(
            f"weight must have shape (num_embeddings, embedding_dim), got {shape}"
        )
    return shape


def _project(layer: layers.Embedding | layers.EmbeddingBag, weight: Any) -> None:
    """Rescale rows of ``weight`` beyond ``max_norm``, in place."""
    if layer.max_norm is None:
        return
    layer.project()
    if isinstance(weight, np.ndarray) and not np.shares_memory(layer.weight, weight):
        weight[...] = layer.weight  # the layer had to copy the table


def _rotated(
    name: str, x: Any, cos: Any, sin: Any, position_ids: Any, *, interleaved: bool
) -> np.ndarray:
    check_real(x, name=name, whole=False)
    x, cos, sin = np.asarray(x), np.asarray(cos), np.asarray(sin)
    if x.ndim < 2 or cos.ndim != 2 or cos.shape != sin.shape or x.shape[-1] % 2:
        raise ValueError(
            f"{name} must be (..., length, head_dim) with an even head_dim, and cos and "
            f"sin (positions, head_dim), got {x.shape}, {cos.shape} and {sin.shape}"
        )
    if cos.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"{name} must end in {cos.shape[-1]} features like cos, got shape {x.shape}"
        )
    if position_ids is None:
        position_ids = np.arange(x.shape[-2])
    at = ids_in_range(
        position_ids, len(cos), name="position_ids", bound="the number of positions"
    )
    if at.ndim == 2 and x.ndim == 4:
        at = at[:, None]
    dtype = compute_dtype(x.dtype)
    c, s, wide = cos[at].astype(dtype), sin[at].astype(dtype), x.astype(dtype)
    half, out = x.shape[-1] // 2, np.empty_like(wide)
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        out[..., 0::2] = a * c[..., :half] - b * s[..., :half]
        out[..., 1::2] = b * c[..., :half] + a * s[..., :half]
    else:
        a, b = wide[..., :half], wide[..., half:]
        out[..., :half] = a * c[..., :half] - b * s[..., :half]
        out[..., half:] = b * c[..., half:] + a * s[..., half:]
    return out.astype(x.dtype)
