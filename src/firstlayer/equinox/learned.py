"""Learned positions for Equinox."""

from typing import Any, ClassVar, Self

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Shaped

from .._array import is_real
from .._check import not_negative, number, positive
from ..embeddings.token import mask_out_of_range
from ..positions.learned import (
    Align,
    check_positions,
    neighbours,
    padding_row,
    resize_grid,
    resize_linear,
)
from ._module import Module, replaced, upcast
from ._positions.arguments import Offset, Positions, arrived, checked, positions_of, vectors
from ._table.lookup import How, find, nan_outside, rows_at
from ._table.parameters import Init, Key, small_normal, table_dtype
from .token import Embedding


class LearnedPositions(Module):
    """Adds to each vector the row of its position.

    Args:
        max_positions: How many positions there are. One that is not smaller is a
            ValueError that names both, and NaN where it is traced.
        embedding_dim: Width of a row.
        row_offset: How many rows come before that of position 0; OPT and RoBERTa have 2.
        padding_idx: One of those rows, for padding: it is zero, gets no gradient, and
            whatever an optimizer makes of it is not read. RoBERTa's is 1, which position
            -1 reads.
        scale: What a row is multiplied by when it is added; x-transformers takes
            ``embedding_dim ** -0.5``.
        weight: The table to use, of ``max_positions + row_offset`` rows. A padding row in
            it stays.
        init: How a new table is drawn, as for :class:`firstlayer.equinox.Embedding`; normal with
            standard deviation 0.02 by default.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: What a new table is drawn with.

    Shape:
        - x: ``(..., length, embedding_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers, or reals, which mix the
          two rows around them; None is ``0, 1, …`` moved on by ``offset``
        - output: as ``x``, in the dtype of ``x``

    Rows are added in float32, float64 for float64, and the sum is rounded to the dtype of
    ``x`` once; a row's gradient is summed in float32 too.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer = LearnedPositions(512, 4, key=jax.random.key(0))
        >>> layer(jnp.zeros((2, 3, 4)), offset=[0, 100]).shape
        (2, 3, 4)
        >>> layer(jnp.zeros((1, 600, 4)))
        Traceback (most recent call last):
        ...
        ValueError: positions must be smaller than max_positions 512, got 599
    """

    prefix: ClassVar[str] = "position."

    table: Embedding
    max_positions: int = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    row_offset: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        max_positions: int,
        embedding_dim: int,
        *,
        row_offset: int = 0,
        padding_idx: int | None = None,
        scale: float = 1.0,
        weight: Any = None,
        init: Init = small_normal,
        dtype: Any = None,
        key: Key | None = None,
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
            key=key,
        )

    @property
    def weight(self) -> Float[Array, "rows embedding_dim"]:
        """The table, ``max_positions + row_offset`` rows."""
        return self.table.weight

    def __call__(
        self,
        x: Float[Array | np.ndarray, "*batch length embedding_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
        key: Key | None = None,
    ) -> Float[Array, "*batch length embedding_dim"]:
        """Return ``x`` with its rows added.

        Args:
            x: The vectors.
            positions: Where they stand.
            offset: How many positions came before, a number or one per row.
            key: Ignored; for :class:`equinox.nn.Sequential`.
        """
        x = vectors(x, self.embedding_dim)
        found = positions_of(x, positions=positions, offset=offset, check=self._check)
        wide, rows = upcast(x), self._rows(found)
        work = np.promote_types(wide.dtype, rows.dtype)
        return (wide.astype(work) + rows.astype(work)).astype(x.dtype)

    def encode(
        self, positions: Positions, *, dtype: Any = None
    ) -> Float[Array, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or reals of any shape.
            dtype: What the vectors are rounded to, the table's dtype by default.
        """
        rows = self._rows(checked(arrived(positions), self._check))
        return rows.astype(self.weight.dtype if dtype is None else table_dtype(dtype))

    def resize(self, max_positions: int, *, align: Align = "ends") -> Self:
        """Return a layer with another number of positions, by linear interpolation.

        Rows before position 0 are kept. Happens on the host, not in ``jit``.

        Args:
            max_positions: How many positions there shall be.
            align: Where new rows lie among the old; see
                :func:`firstlayer.positions.learned.resize_linear`.
        """
        before, rows = np.split(self._host(), [self.row_offset])
        return self._with(before, resize_linear(rows, max_positions, align=align))

    def resize_grid(
        self,
        new_grid: tuple[int, int],
        *,
        grid: tuple[int, int],
        class_tokens: int = 1,
        antialias: bool = False,
        nudge: float = 0.0,
    ) -> Self:
        """Return a layer for another grid of an image's patches, bicubically.

        Args:
            new_grid: Height and width in patches that it shall have.
            grid: Height and width that it has.
            class_tokens: How many positions come before the patches, and are kept.
            antialias: As in :func:`firstlayer.positions.learned.resize_grid`.
            nudge: Likewise.
        """
        before, rows = np.split(self._host(), [self.row_offset])
        resized = resize_grid(
            rows,
            new_grid,
            grid=grid,
            class_tokens=class_tokens,
            antialias=antialias,
            nudge=nudge,
        )
        return self._with(before, resized)

    def set_padding(
        self, value: Float[Any, " embedding_dim"] | list[float] | float
    ) -> Self:
        """Return a layer whose padding row is ``value``."""
        return replaced(self, table=self.table.set_padding(value))

    def parameters(self) -> dict[str, Float[Array, "rows embedding_dim"]]:
        """Return the table under the name ``weight``, its padding row as it is read."""
        return self.table.parameters()

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

    def _filled(self, parameters: dict[str, Float[Array, "..."]]) -> Self:
        return replaced(self, table=self.table.with_parameters(parameters))

    def _check(self, positions: Shaped[np.ndarray, "..."]) -> None:
        check_positions(
            positions, max_positions=self.max_positions, row_offset=self.row_offset
        )

    def _rows(self, positions: Shaped[Array, "*seq"]) -> Float[Array, "*seq width"]:
        """Return the rows as they are added, in the dtype they are worked on in."""
        ends = {"first": -self.row_offset, "last": self.max_positions - 1}
        if is_real(positions):
            inside, low, high, share = neighbours(positions, **ends)
            a, b = self._at(low), self._at(high)
            share = share.astype(a.dtype)[..., None]
            rows = nan_outside(a * (1 - share) + b * share, inside)
        else:
            inside, near = mask_out_of_range(positions, **ends)
            rows = nan_outside(self._at(near), inside)
        return rows if self.scale == 1.0 else rows * self.scale

    def _at(self, positions: Shaped[Array, "*seq"]) -> Float[Array, "*seq width"]:
        table = self.table
        found = find(
            positions + self.row_offset,
            table.weight,
            num_embeddings=table.num_embeddings,
            padding_idx=table.padding_idx,
        )
        how = How(wide=True)
        return rows_at(found, table.weight, how=how, padding=table.padding_row)

    def _host(self) -> np.ndarray:
        return np.asarray(self.parameters()["weight"])

    def _with(self, before: np.ndarray, rows: np.ndarray) -> Self:
        weight = np.concatenate([before, rows])
        padding_idx = self.table.padding_idx
        table = Embedding(*weight.shape, padding_idx=padding_idx, weight=weight)
        return replaced(self, table=table, max_positions=len(rows))
