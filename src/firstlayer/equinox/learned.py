"""Learned positions for Equinox."""

from functools import partial
from typing import Any, Self

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from .._array import is_real
from .._check import not_negative, number, positive
from ..positions.learned import (
    Align,
    check_padding_idx,
    check_positions,
    neighbours,
    resize_grid,
    resize_linear,
)
from ._ids import IdsArgument, as_int32
from ._lookup import look_up, nan_if_invalid
from ._module import Module, compiled, replace_fields, upcast
from ._parameters import Init, Key, small_normal, table_dtype
from ._positions import (
    Offset,
    Positions,
    PositionsArgument,
    checked_positions,
    checked_vectors,
    positions_argument,
)
from ._sharding import OutSharding, sharding_like
from .token import Embedding


class LearnedPositions(Module):
    """Adds the table row of its position to each vector.

    Args:
        max_positions: Number of positions. A position that is not smaller is a ValueError,
            or NaN if it is traced or on an accelerator.
        embedding_dim: Width of each vector.
        row_offset: Number of rows before that of position 0; 2 in OPT and RoBERTa.
        padding_idx: One of those rows, for padding. It is zero in a new table and gets no
            gradient from a lookup. In RoBERTa it is 1, the row of position -1.
        scale: Factor of the added rows; x-transformers has ``embedding_dim ** -0.5``.
        weight: The table to use, as it is, of ``max_positions + row_offset`` rows.
        init: Distribution of a new table, as for :class:`firstlayer.equinox.Embedding`;
            normal with standard deviation 0.02 by default.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for a new table.

    Shape:
        - x: ``(..., length, embedding_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers, or reals, which
          interpolate between two rows; None is ``0, 1, …`` plus ``offset``
        - output: as ``x``, in the dtype of ``x``

    Rows are added in float32 (float64 for float64) and the sum is rounded once. Gradients
    of a row are summed in float32 too.

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
        padding_idx = check_padding_idx(padding_idx, row_offset)
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

    @property
    def padding_idx(self) -> int | None:
        """Row of padding, or None."""
        return self.table.padding_idx

    def __call__(
        self,
        x: Float[Array | np.ndarray, "*batch length embedding_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
        key: Key | None = None,
    ) -> Float[Array, "*batch length embedding_dim"]:
        """Return ``x`` plus the rows of its positions.

        Args:
            x: Token vectors.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        x = checked_vectors(x, self.embedding_dim)
        return _add(self, x, self._argument(x.shape[:-1], positions, offset))

    def encode(
        self, positions: Positions, *, dtype: Any = None, out_sharding: OutSharding = None
    ) -> Float[Array, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or reals of any shape.
            dtype: Dtype of the result, the table's by default.
            out_sharding: Sharding of the result on a mesh with explicit axes; by default
                that of the positions and of the columns of the table.

        Example:
            >>> import jax.numpy as jnp
            >>> layer = LearnedPositions(3, 1, weight=jnp.ones((3, 1)))
            >>> layer.encode(jnp.array([2, 0])).shape
            (2, 1)
        """
        at = checked_positions(positions, self._check)
        dtype = self.weight.dtype if dtype is None else table_dtype(dtype)
        return _encode(self, at, dtype, out_sharding)

    def resize(self, max_positions: int, *, align: Align = "ends") -> Self:
        """Return a layer with another number of positions, by linear interpolation.

        Rows before position 0 are kept. Runs on the host, not under ``jit``. ``align`` is
        that of :func:`firstlayer.positions.learned.resize_linear`.

        Example:
            >>> import jax.numpy as jnp
            >>> layer = LearnedPositions(4, 2, weight=jnp.ones((4, 2)))
            >>> layer.resize(16).weight.shape
            (16, 2)
        """
        before, rows = np.split(np.asarray(self.weight), [self.row_offset])
        return self._with_rows(before, resize_linear(rows, max_positions, align=align))

    def resize_grid(
        self,
        new_grid: tuple[int, int],
        *,
        grid: tuple[int, int],
        class_tokens: int = 1,
        antialias: bool = False,
        nudge: float = 0.0,
    ) -> Self:
        """Return a layer for another grid of image patches.

        See :func:`firstlayer.positions.learned.resize_grid` for the arguments.

        Example:
            >>> import jax.numpy as jnp
            >>> layer = LearnedPositions(5, 8, weight=jnp.ones((5, 8)))
            >>> layer.resize_grid((3, 3), grid=(2, 2)).weight.shape
            (10, 8)
        """
        before, rows = np.split(np.asarray(self.weight), [self.row_offset])
        resize_table = resize_grid(
            rows,
            new_grid,
            grid=grid,
            class_tokens=class_tokens,
            antialias=antialias,
            nudge=nudge,
        )
        return self._with_rows(before, resize_table)

    def set_padding(
        self, value: Float[Any, " embedding_dim"] | list[float] | float
    ) -> Self:
        """Return a layer with a vector or a number written to the padding row.

        Example:
            >>> import jax.numpy as jnp
            >>> weight = jnp.ones((5, 2))
            >>> layer = LearnedPositions(4, 2, row_offset=1, padding_idx=0, weight=weight)
            >>> layer.set_padding(0.5).weight[0].tolist()
            [0.5, 0.5]
        """
        return replace_fields(self, table=self.table.set_padding(value))

    def parameters(self) -> dict[str, Float[Array, "rows embedding_dim"]]:
        return self.table.parameters()

    def _replace_parameters(self, parameters: dict[str, Float[Array, "..."]]) -> Self:
        return replace_fields(self, table=self.table.with_parameters(parameters))

    def _check(self, positions: Shaped[np.ndarray, "..."]) -> None:
        check_positions(
            positions, max_positions=self.max_positions, row_offset=self.row_offset
        )

    def _argument(
        self, lead: tuple[int, ...], positions: Any, offset: Any
    ) -> PositionsArgument:
        """Return the checked positions of vectors with these leading axes."""
        return positions_argument(
            lead[-1], positions=positions, offset=offset, check=self._check
        )

    def _add(
        self, x: Float[Array, "*batch length width"], argument: PositionsArgument
    ) -> Float[Array, "*batch length width"]:
        """Return ``x`` plus the rows of its positions, within a compiled function."""
        at, x_upcast = argument.fit(x), upcast(x)
        rows = self._rows(at, sharding_like(x, (*at.shape, x.shape[-1])))
        dtype = np.promote_types(x_upcast.dtype, rows.dtype)
        return (x_upcast.astype(dtype) + rows.astype(dtype)).astype(x.dtype)

    def _rows(
        self, positions: Shaped[Array, "*seq"], out_sharding: OutSharding
    ) -> Float[Array, "*seq width"]:
        """Return the rows to add, in the compute dtype, within a compiled function."""
        if is_real(positions):
            valid, low, high, share = neighbours(
                positions, first=-self.row_offset, last=self.max_positions - 1
            )
            a, b = (self._look_up(at, True, out_sharding) for at in (low, high))
            share = share.astype(a.dtype)[..., None]
            rows = nan_if_invalid(a * (1 - share) + b * share, valid)
        else:
            rows = self._look_up(as_int32(positions), False, out_sharding)
        return rows if self.scale == 1.0 else rows * self.scale

    def _look_up(
        self, positions: Int32[Array, "*seq"], in_range: bool, out_sharding: OutSharding
    ) -> Float[Array, "*seq width"]:
        argument = IdsArgument(positions + self.row_offset, in_range)
        options = self.table._options(upcast=True)
        return look_up(options, self.weight, argument, out_sharding)

    def _with_rows(self, before: np.ndarray, rows: np.ndarray) -> Self:
        weight = np.concatenate([before, rows])
        table = Embedding(*weight.shape, padding_idx=self.padding_idx, weight=weight)
        return replace_fields(self, table=table, max_positions=len(rows))


@compiled
def _add(
    layer: LearnedPositions, x: Array, argument: PositionsArgument
) -> Float[Array, "*batch length width"]:
    return layer._add(x, argument)


@partial(compiled, static_argnums=(2, 3))
def _encode(
    layer: LearnedPositions,
    positions: Shaped[Array, "*seq"],
    dtype: np.dtype,
    out_sharding: OutSharding,
) -> Float[Array, "*seq width"]:
    return layer._rows(positions, out_sharding).astype(dtype)
