"""Learned positions on NumPy."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Shaped

from .._array import is_real
from .._check import float_dtype, not_negative, number, positions_array, positive
from ..embeddings.init import Init, Seed
from ..embeddings.row_gradient import RowGradient
from ..positions.learned import (
    Align,
    check_positions,
    neighbours,
    padding_row,
    resize_grid,
    resize_linear,
    rows_at,
    small_normal,
)
from ._module import Module, upcast
from ._positions import gradient_of, positions_of, vectors
from .token import Embedding


class LearnedPositions(Module):
    """Adds to each vector the row of its position.

    Args:
        max_positions: How many positions there are. One that is not smaller is a
            ValueError that names both.
        embedding_dim: Width of a row.
        row_offset: How many rows come before that of position 0; OPT and RoBERTa have 2.
        padding_idx: One of those rows, for padding: it is zero, gets no gradient, and
            whatever else writes to it is undone. RoBERTa's is 1, which position -1 reads.
        scale: What a row is multiplied by when it is added; x-transformers takes
            ``embedding_dim ** -0.5``.
        weight: The table to use, of ``max_positions + row_offset`` rows, not copied if it
            fits. A padding row in it stays.
        init: How a new table is drawn, normal with standard deviation 0.02 by default; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: A seed or a generator for ``init``.

    Shape:
        - x: ``(..., length, embedding_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers, or reals, which mix the
          two rows around them; None is ``0, 1, …`` moved on by ``offset``
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

    prefix: ClassVar[str] = "position."

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
        self.max_positions = positive("max_positions", max_positions)
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        self.row_offset = not_negative("row_offset", row_offset)
        padding_idx = padding_row(padding_idx, row_offset)
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
        x = vectors(x, self.embedding_dim)
        rows = self._rows(positions_of(x.shape, positions=positions, offset=offset))
        return (upcast(x) + rows).astype(x.dtype, copy=False)

    def encode(
        self, positions: Shaped[Any, "*seq"] | list[Any] | int | float, *, dtype: Any = None
    ) -> Float[np.ndarray, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or reals of any shape.
            dtype: What the vectors are rounded to, the table's dtype by default.
        """
        rows = self._rows(positions_array(positions))
        into = self.weight.dtype if dtype is None else float_dtype(dtype)
        return rows.astype(into, copy=False)

    def vjp(
        self,
        x: Float[Any, "*batch length embedding_dim"] | list[Any],
        positions: Shaped[Any, "*seq"] | list[Any] | None = None,
        *,
        offset: Any = 0,
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, Any]]]:
        """Return the output and the function to the gradients of ``x`` and ``weight``.

        Example:
            >>> y, pull = LearnedPositions(9, 2).vjp(np.zeros((3, 2, 2)), offset=4)
            >>> grad = pull(np.ones((3, 2, 2)))["weight"]
            >>> grad.ids.tolist(), grad.values.tolist()
            ([4, 5], [[3.0, 3.0], [3.0, 3.0]])
        """
        x = vectors(x, self.embedding_dim)
        found = positions_of(x.shape, positions=positions, offset=offset).copy()
        y = self(x, found)

        def pull(dy: Any) -> dict[str, Any]:
            dy = gradient_of(y, dy)
            return {"x": dy.astype(y.dtype), "weight": self.row_gradient(found, dy)}

        return y, pull

    def row_gradient(
        self, positions: np.ndarray, dy: Float[np.ndarray, "*batch length embedding_dim"]
    ) -> RowGradient:
        """Return the table's gradient, given that of the vectors at ``positions``.

        Args:
            positions: One for each vector, or ``(length,)`` for every sequence.
            dy: Gradient of the vectors.
        """
        dy = upcast(dy) * self.scale
        if positions.ndim == 1:
            dy = dy.sum(axis=tuple(range(dy.ndim - 2)))
        positions = np.broadcast_to(positions, dy.shape[:-1])
        if not is_real(positions):
            rows = positions.astype(np.int64) + self.row_offset
            return self.table.row_gradient(rows, dy)
        _, low, high, share = neighbours(
            positions, first=-self.row_offset, last=self.max_positions - 1
        )
        share = share.astype(dy.dtype)[..., None]
        rows = np.stack([low, high]).astype(np.int64) + self.row_offset
        return self.table.row_gradient(rows, np.stack([dy * (1 - share), dy * share]))

    def resize(self, max_positions: int, *, align: Align = "ends") -> None:
        """Change the number of positions in place, by linear interpolation.

        Rows before position 0 are kept.

        Args:
            max_positions: How many positions there shall be.
            align: Where new rows lie among the old; see
                :func:`firstlayer.positions.learned.resize_linear`.
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
        """Change the table of an image's patches to another grid in place, bicubically.

        Args:
            new_grid: Height and width in patches that it shall have.
            grid: Height and width that it has.
            class_tokens: How many positions come before the patches, and are kept.
            antialias: As in :func:`firstlayer.positions.learned.resize_grid`.
            nudge: Likewise.
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
        """Make ``value`` the padding row, from now on."""
        self.table.set_padding(value)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the table under the name ``weight``."""
        return self.table.parameters()

    def embeddings(self) -> dict[str, Any]:
        """Return the table under its parameter's name."""
        return self.table.embeddings()

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Copy a table into this one. Its padding row becomes what padding is."""
        self.table.load_state_dict(state)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "max_positions": self.max_positions,
            "embedding_dim": self.embedding_dim,
            "row_offset": self.row_offset,
            "padding_idx": self.table.padding_idx,
            "scale": self.scale,
            "dtype": self.weight.dtype.name,
        }

    @property
    def _positions(self) -> np.ndarray:
        # By the parameters: rows that an optimizer has left behind catch up first.
        return self.parameters()["weight"][self.row_offset :]

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows as they are added, in the dtype they are worked on in."""
        check_positions(
            positions, max_positions=self.max_positions, row_offset=self.row_offset
        )
        if is_real(positions):
            self.table.catch_up()
            rows = rows_at(self.weight, positions, row_offset=self.row_offset)
        else:
            rows = upcast(self.table(positions.astype(np.int64) + self.row_offset))
        return rows if self.scale == 1.0 else rows * self.scale

    def _replace(self, rows: np.ndarray) -> None:
        before = self.weight[: self.row_offset]
        # In the same table, which an optimizer may know.
        self.table.weight = np.concatenate([before, rows])
        self.table.num_embeddings = len(self.table.weight)
        self.max_positions = len(rows)
