"""Learned positions for torch."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .._check import not_negative, number, positive
from ..files.layer_configs import config_of
from ..positions.learned import (
    Align,
    check_padding_idx,
    check_positions,
    neighbours,
    resize_grid,
    resize_linear,
)
from ._positions.arguments import (
    Offset,
    Positions,
    check_vectors,
    check_width,
    on_host,
    positions_of,
    positions_tensor,
    signed,
)
from ._positions.bias import parameter
from ._table.lookup import lookup
from ._table.module import write_padding_row
from ._tensors.buffers import repr_of
from ._tensors.dtypes import dtype_name, upcast
from ._tensors.memory import array_of, is_plain_cpu, tensor_of


class LearnedPositions(nn.Module):
    """Adds the table row of its position to each vector.

    Args:
        max_positions: Number of positions. A position that is not smaller raises a
            ValueError on the CPU, and gives NaN on other devices and in compiled code.
        embedding_dim: Width of each vector.
        row_offset: Number of rows before that of position 0; 2 in OPT and RoBERTa.
        padding_idx: One of those rows, for padding. It is zero in a new table and gets no
            gradient from a lookup. In RoBERTa it is 1, the row of position -1.
        scale: Factor of the added rows; x-transformers has ``embedding_dim ** -0.5``.
        weight: Table of ``max_positions + row_offset`` rows to use, not copied if device
            and dtype match. None draws one with standard deviation 0.02.
        device: Device of the table.
        dtype: Dtype of the table.

    Shape:
        - weight: ``(max_positions + row_offset, embedding_dim)``
        - x: ``(..., length, embedding_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers, or reals, which
          interpolate between two rows; None is ``0, 1, …`` plus ``offset``
        - output: as ``x``, in the dtype of ``x``

    Rows are added in float32 (float64 for float64) and the sum is rounded to the dtype of
    ``x`` once; gradients are summed in float32 too. Autocast changes nothing.

    Example:
        >>> layer = LearnedPositions(512, 4)
        >>> layer(torch.zeros(2, 3, 4), offset=torch.tensor([0, 100])).shape
        torch.Size([2, 3, 4])
        >>> layer(torch.zeros(1, 600, 4))
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
        weight: Any = None,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        self.max_positions = positive("max_positions", max_positions)
        self.embedding_dim = positive("embedding_dim", embedding_dim)
        self.row_offset = not_negative("row_offset", row_offset)
        padding_idx = check_padding_idx(padding_idx, row_offset)
        self.padding_idx, self.scale = padding_idx, number("scale", scale)
        shape = (max_positions + row_offset, embedding_dim)
        self.weight = parameter(weight, shape, device=device, dtype=dtype)
        if weight is None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table; the padding row becomes zero."""
        nn.init.normal_(self.weight, std=0.02)
        if self.padding_idx is not None:
            self.set_padding(0.0)

    def set_padding(self, value: Float[Tensor, " embedding_dim"] | float) -> None:
        """Write a vector or a number to the padding row.

        Example:
            >>> layer = LearnedPositions(4, 2, row_offset=1, padding_idx=0)
            >>> layer.set_padding(0.5)
            >>> layer.weight[0].tolist()
            [0.5, 0.5]
        """
        write_padding_row(self.weight, self.padding_idx, value)

    def forward(
        self,
        x: Float[Tensor, "*batch length embedding_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
    ) -> Float[Tensor, "*batch length embedding_dim"]:
        """Return ``x`` plus the rows of its positions.

        Args:
            x: Token vectors.
            positions: Position of each vector; None is ``offset, offset + 1, …``.
            offset: Number of preceding positions: one number, or one for each sequence.
        """
        check_vectors(x, self.embedding_dim)
        positions = positions_of(x, positions=positions, offset=offset)
        rows = self._rows(positions)
        check_width(rows, self.embedding_dim, name="weight")
        return (upcast(x) + rows).to(x.dtype)

    def encode(
        self, positions: Positions, *, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or reals of any shape.
            dtype: Dtype of the vectors; None is the table's.

        Example:
            >>> LearnedPositions(4, 2).encode(torch.tensor([2, 0])).shape
            torch.Size([2, 2])
        """
        positions = positions_tensor(positions, device=self.weight.device)
        return self._rows(positions).to(dtype or self.weight.dtype)

    def resize(self, max_positions: int, *, align: Align = "ends") -> None:
        """Change the number of positions in place, by linear interpolation.

        Rows before position 0 are kept. ``weight`` stays the same parameter; an optimizer
        with a state for it does not follow. ``align`` is that of
        :func:`firstlayer.positions.learned.resize_linear`.

        Example:
            >>> layer = LearnedPositions(4, 2)
            >>> layer.resize(16)
            >>> layer.weight.shape
            torch.Size([16, 2])
        """
        self._set_positions(resize_linear(self._positions(), max_positions, align=align))

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
            >>> layer = LearnedPositions(5, 8)  # a class token and a grid of 2 × 2
            >>> layer.resize_grid((3, 3), grid=(2, 2))
            >>> layer.weight.shape
            torch.Size([10, 8])
        """
        rows = resize_grid(
            self._positions(),
            new_grid,
            grid=grid,
            class_tokens=class_tokens,
            antialias=antialias,
            nudge=nudge,
        )
        self._set_positions(rows)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> config = LearnedPositions(512, 4, row_offset=2).config()
            >>> LearnedPositions(**config).row_offset
            2
        """
        return config_of(self, dtype=dtype_name(self.weight.dtype))

    def extra_repr(self) -> str:
        return repr_of(self)

    def _rows(self, positions: Shaped[Tensor, "*seq"]) -> Float[Tensor, "*seq width"]:
        """Return the rows that are added, in the compute dtype."""
        checked = is_plain_cpu(positions)
        if checked:
            check_positions(
                on_host(positions),
                max_positions=self.max_positions,
                row_offset=self.row_offset,
            )
        if positions.is_floating_point():
            rows = self._interpolate(positions)
        else:
            index = signed(positions).to(torch.int64)
            rows = self._lookup(index) if checked else self._lookup_or_nan(index)
        return rows if self.scale == 1.0 else rows * self.scale

    def _lookup_or_nan(self, positions: Tensor) -> Tensor:
        inside = (positions >= -self.row_offset) & (positions < self.max_positions)
        rows = self._lookup(torch.where(inside, positions, 0))
        return torch.where(inside[..., None], rows, float("nan"))

    def _interpolate(self, positions: Tensor) -> Tensor:
        inside, low, high, share = neighbours(
            positions, first=-self.row_offset, last=self.max_positions - 1
        )
        a, b = self._lookup(low), self._lookup(high)
        share = share.to(a.dtype)[..., None]
        return torch.where(inside[..., None], a * (1 - share) + b * share, float("nan"))

    def _lookup(self, positions: Tensor) -> Tensor:
        rows = lookup(
            positions + self.row_offset,
            self.weight,
            padding_idx=self.padding_idx,
            upcast_output=True,
        )
        return upcast(rows)

    def _positions(self) -> np.ndarray:
        return array_of(self.weight.detach().cpu())[self.row_offset :]

    def _set_positions(self, rows: np.ndarray) -> None:
        weight = self.weight
        table = tensor_of(rows).to(weight.device)
        weight.grad = None
        weight.data = torch.cat([weight.data[: self.row_offset], table])
        self.max_positions = len(rows)
