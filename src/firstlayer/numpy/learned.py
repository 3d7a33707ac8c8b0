"""Learned positions for NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from .._array import is_real
from .._check import float_dtype, not_negative, number, positions_array, positive
from ..embeddings.init import Init, Seed
from ..embeddings.row_gradient import RowGradient
from ..files.layer_configs import config_of
from ..positions.learned import (
    Align,
    check_padding_idx,
    check_positions,
    neighbours,
    resize_grid,
    resize_linear,
    rows_at,
    small_normal,
)
from ._module import Module, upcast
from ._positions import gradient_of, positions_of, vectors
from .token import Embedding


class LearnedPositions(Module):
    """Adds the table row of its position to each vector.

    Args:
        max_positions: Number of positions. A position that is not smaller is a ValueError.
        embedding_dim: Width of each vector.
        row_offset: Number of rows before that of position 0; 2 in OPT and RoBERTa.
        padding_idx: One of those rows, for padding. It is zero in a new table and gets no
            gradient from a lookup. In RoBERTa it is 1, the row of position -1.
        scale: Factor of the added rows; x-transformers has ``embedding_dim ** -0.5``.
        weight: Table to use, of ``max_positions + row_offset`` rows, without a copy if its
            dtype and layout fit.
        init: Initializer of a new table, normal with standard deviation 0.02 by default;
            see :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - x: ``(..., length, embedding_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers, or reals, which are
          interpolated between two rows; None is ``0, 1, …`` shifted by ``offset``
        - output: as ``x``, in the dtype of ``x``

    Example:
        >>> layer = LearnedPositions(512, 4, rng=0)
        >>> layer(np.zeros((2, 3, 4)), offset=[0, 100]).shape
        (2, 3, 4)
        >>> layer(np.zeros((1, 600, 4)))
        Traceback (most recent call last):
        ...
        ValueError: positions must be smaller than max_positions 512, got 599
    """

    def __init__(
        self,
        max_positions: int,
        embedding_dim: int,
        *,
        row_offset: int = 0,
        padding_idx: int | None = None,
        scale: float = 1.0,
        weight: np.ndarray | None = None,
        init: Init = small_normal,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        positive("max_positions", max_positions)
        positive("embedding_dim", embedding_dim)
        self.row_offset = not_negative("row_offset", row_offset)
        padding_idx = check_padding_idx(padding_idx, row_offset)
        self.scale = number("scale", scale)
        self.table = Embedding(
            max_positions + row_offset,
            embedding_dim,
            padding_idx=padding_idx,
            weight=weight,
            init=init,
            dtype=dtype,
            rng=rng,
        )

    @property
    def max_positions(self) -> int:
        """Number of positions: all rows of ``weight`` but the first ``row_offset``."""
        return self.table.num_embeddings - self.row_offset

    @property
    def embedding_dim(self) -> int:
        """Width of each vector."""
        return self.table.embedding_dim

    @property
    def weight(self) -> Float[np.ndarray, "rows embedding_dim"]:
        """The table, ``max_positions + row_offset`` rows."""
        return self.table.weight

    def __call__(
        self,
        x: Float[Any, "*batch length embedding_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
    ) -> Float[np.ndarray, "*batch length embedding_dim"]:
        """Return ``x`` plus the rows of its positions.

        Args:
            x: Token vectors.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
        """
        x = vectors(x, self.embedding_dim)
        rows = self._rows(positions_of(x.shape, positions=positions, offset=offset))
        return (upcast(x) + rows).astype(x.dtype, copy=False)

    def encode(
        self, positions: Shaped[Any, "*seq"] | list[Any] | int | float, *, dtype: Any = None
    ) -> Float[np.ndarray, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or reals of any shape.
            dtype: Dtype of the result, the table's by default.

        Example:
            >>> layer = LearnedPositions(3, 1, rng=0)
            >>> layer.weight[:] = [[0.0], [1.0], [2.0]]
            >>> layer.encode([2, 0]).tolist()
            [[2.0], [0.0]]
        """
        rows = self._rows(positions_array(positions))
        dtype = self.table.stored_weight.dtype if dtype is None else float_dtype(dtype)
        return rows.astype(dtype, copy=False)

    def vjp(
        self,
        x: Float[Any, "*batch length embedding_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, Any]]]:
        """Return the output and the pullback to the gradients of ``x`` and ``weight``.

        Example:
            >>> y, pullback = LearnedPositions(9, 2).vjp(np.zeros((3, 2, 2)), offset=4)
            >>> grad = pullback(np.ones((3, 2, 2)))["weight"]
            >>> grad.ids.tolist(), grad.values.tolist()
            ([4, 5], [[3.0, 3.0], [3.0, 3.0]])
        """
        x = vectors(x, self.embedding_dim)
        at = positions_of(x.shape, positions=positions, offset=offset).copy()
        y = self(x, at)

        def pullback(dy: Any) -> dict[str, Any]:
            dy = gradient_of(y, dy)
            return {"x": dy.astype(y.dtype), "weight": self.row_gradient(at, dy)}

        return y, pullback

    def row_gradient(
        self, positions: np.ndarray, dy: Float[np.ndarray, "*batch length embedding_dim"]
    ) -> RowGradient:
        """Return the gradient of the table, given that of the vectors at ``positions``.

        Args:
            positions: One per vector, or ``(length,)`` for every sequence.
            dy: Gradient of the vectors.
        """
        dy = upcast(dy) * self.scale
        if positions.ndim == 1:
            dy = dy.sum(axis=tuple(range(dy.ndim - 2)))
        positions = np.broadcast_to(positions, dy.shape[:-1])
        if not is_real(positions):
            rows = positions.astype(np.int64) + self.row_offset
            return self.table.row_gradient(rows, dy)
        _, low, high, fraction = neighbours(
            positions, first=-self.row_offset, last=self.max_positions - 1
        )
        fraction = fraction.astype(dy.dtype)[..., None]
        rows = np.stack([low, high]).astype(np.int64) + self.row_offset
        parts = np.stack([dy * (1 - fraction), dy * fraction])
        return self.table.row_gradient(rows, parts)

    def resize(self, max_positions: int, *, align: Align = "ends") -> None:
        """Change the number of positions in place, by linear interpolation.

        Rows before position 0 are kept. ``align`` is that of
        :func:`firstlayer.positions.learned.resize_linear`.

        Example:
            >>> layer = LearnedPositions(2, 1, rng=0)
            >>> layer.weight[:] = [[0.0], [4.0]]
            >>> layer.resize(3, align="ends")
            >>> layer.weight.tolist()
            [[0.0], [2.0], [4.0]]
        """
        self._replace(resize_linear(self._positions, max_positions, align=align))

    def resize_grid(
        self,
        new_grid: tuple[int, int],
        *,
        grid: tuple[int, int],
        class_tokens: int = 1,
        antialias: bool = False,
        nudge: float = 0.0,
    ) -> None:
        """Resize the table of image patches to another grid in place.

        See :func:`firstlayer.positions.learned.resize_grid` for the arguments.

        Example:
            >>> layer = LearnedPositions(5, 8, rng=0)  # a class token and a grid of 2 × 2
            >>> layer.resize_grid((3, 3), grid=(2, 2))
            >>> layer.weight.shape
            (10, 8)
        """
        self._replace(
            resize_grid(
                self._positions,
                new_grid,
                grid=grid,
                class_tokens=class_tokens,
                antialias=antialias,
                nudge=nudge,
            )
        )

    def set_padding(self, value: Float[Any, " embedding_dim"] | float) -> None:
        """Write a vector or a number to the padding row.

        Example:
            >>> layer = LearnedPositions(4, 2, row_offset=1, padding_idx=0, rng=0)
            >>> layer.set_padding(0.5)
            >>> layer.weight[0].tolist()
            [0.5, 0.5]
        """
        self.table.set_padding(value)

    def parameters(self) -> dict[str, np.ndarray]:
        return self.table.parameters()

    def embeddings(self) -> dict[str, Any]:
        """Return the embedding of the table under the name ``weight``."""
        return self.table.embeddings()

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Copy ``state`` into the table."""
        self.table.load_state_dict(state)

    def config(self) -> dict[str, Any]:
        padding_idx, dtype = self.table.padding_idx, self.table.stored_weight.dtype.name
        return config_of(self, padding_idx=padding_idx, dtype=dtype)

    @property
    def _positions(self) -> np.ndarray:
        return self.weight[self.row_offset :]

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the scaled rows of the positions, in the compute dtype."""
        check_positions(
            positions, max_positions=self.max_positions, row_offset=self.row_offset
        )
        if is_real(positions):
            rows = rows_at(self.weight, positions, row_offset=self.row_offset)
        else:
            rows = upcast(self.table(positions.astype(np.int64) + self.row_offset))
        return rows if self.scale == 1.0 else rows * self.scale

    def _replace(self, rows: np.ndarray) -> None:
        reserved = self.weight[: self.row_offset]
        # The Embedding object stays the same: an optimizer may refer to it.
        self.table.weight = np.concatenate([reserved, rows])
