"""Learned positions for torch."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .._check import not_negative, number, positive
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
    on_host,
    positions_of,
    positions_tensor,
    signed,
)
from ._positions.bias import parameter
from ._table.lookup import lookup
from ._table.padding import Padded
from ._tensors.buffers import name_of, repr_of, upcast
from ._tensors.memory import array_of, concrete, tensor_of


class LearnedPositions(Padded):
    """Adds to each vector the row of its position.

    Args:
        max_positions: How many positions there are. One that is not smaller is a
            ValueError that names both on the CPU, and NaN on other devices and in compiled
            code.
        embedding_dim: Width of a row.
        row_offset: How many rows come before that of position 0; OPT and RoBERTa have 2.
        padding_idx: One of those rows, for padding: it is zero, gets no gradient, and
            whatever else writes to it is undone. RoBERTa's is 1, which position -1 reads.
        scale: What a row is multiplied by when it is added; x-transformers takes
            ``embedding_dim ** -0.5``.
        weight: The table to use, of ``max_positions + row_offset`` rows, not copied if it
            fits. A padding row in it stays. None draws one with standard deviation 0.02.
        device: Where the table is.
        dtype: What the table is kept in.

    Shape:
        - weight: ``(max_positions + row_offset, embedding_dim)``
        - x: ``(..., length, embedding_dim)``
        - positions: ``(length,)`` or ``(batch, length)`` integers, or reals, which mix the
          two rows around them; None is ``0, 1, …`` moved on by ``offset``
        - output: as ``x``, in the dtype of ``x``

    Rows are added in float32, float64 for float64, and the sum is rounded to the dtype of
    ``x`` once; a row's gradient is summed in float32 too. Autocast changes nothing.

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
        else:
            self.keep_padding()

    def reset_parameters(self) -> None:
        """Draw the table anew; padding is zero."""
        nn.init.normal_(self.weight, std=0.02)
        if self.padding_idx is not None:
            self.set_padding(0.0)

    def forward(
        self,
        x: Float[Tensor, "*batch length embedding_dim"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
    ) -> Float[Tensor, "*batch length embedding_dim"]:
        """Return ``x`` with the rows of its positions added.

        Args:
            x: Vectors of tokens.
            positions: Where each vector stands; None counts from ``offset``.
            offset: How many positions came before, a number or one per row.
        """
        check_vectors(x, self.embedding_dim)
        found = positions_of(x, positions=positions, offset=offset)
        return (upcast(x) + self._rows(found)).to(x.dtype)

    def encode(
        self, positions: Positions, *, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*seq embedding_dim"]:
        """Return the vectors that are added at these positions.

        Args:
            positions: Integers or reals of any shape.
            dtype: What the vectors are rounded to, the table's dtype by default.
        """
        found = positions_tensor(positions, device=self.weight.device)
        return self._rows(found).to(dtype or self.weight.dtype)

    def resize(self, max_positions: int, *, align: Align = "ends") -> None:
        """Change the number of positions in place, by linear interpolation.

        Rows before position 0 are kept. ``weight`` stays the same parameter; an optimizer
        that has a state for it does not follow.

        Args:
            max_positions: How many positions there shall be.
            align: Where new rows lie among the old; see
                :func:`firstlayer.positions.learned.resize_linear`.
        """
        self._replace(resize_linear(self._positions(), max_positions, align=align))

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
        rows = resize_grid(
            self._positions(),
            new_grid,
            grid=grid,
            class_tokens=class_tokens,
            antialias=antialias,
            nudge=nudge,
        )
        self._replace(rows)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "max_positions": self.max_positions,
            "embedding_dim": self.embedding_dim,
            "row_offset": self.row_offset,
            "padding_idx": self.padding_idx,
            "scale": self.scale,
            "dtype": name_of(self.weight.dtype),
        }

    def extra_repr(self) -> str:
        return repr_of(self)

    def _rows(self, positions: Shaped[Tensor, "*seq"]) -> Float[Tensor, "*seq width"]:
        """Return the rows as they are added, in the dtype they are worked on in."""
        known = concrete(positions)
        if known:
            check_positions(
                on_host(positions),
                max_positions=self.max_positions,
                row_offset=self.row_offset,
            )
        if positions.is_floating_point():
            rows = self._between(positions)
        else:
            rows = self._at(signed(positions).to(torch.int64), known)
        return rows if self.scale == 1.0 else rows * self.scale

    def _at(self, positions: Tensor, known: bool) -> Tensor:
        if known:
            return self._lookup(positions)
        inside = (positions >= -self.row_offset) & (positions < self.max_positions)
        rows = self._lookup(torch.where(inside, positions, 0))
        return torch.where(inside[..., None], rows, float("nan"))

    def _between(self, positions: Tensor) -> Tensor:
        inside, low, high, share = neighbours(
            positions, first=-self.row_offset, last=self.max_positions - 1
        )
        a, b = self._lookup(low), self._lookup(high)
        share = share.to(a.dtype)[..., None]
        return torch.where(inside[..., None], a * (1 - share) + b * share, float("nan"))

    def _lookup(self, positions: Tensor) -> Tensor:
        row = None if self.padding_idx is None else self._row_to_insert(self.weight)
        rows = lookup(
            positions + self.row_offset,
            self.weight,
            padding_idx=self.padding_idx,
            padding_row=row,
            wide=True,
        )
        return upcast(rows)

    def _positions(self) -> np.ndarray:
        return array_of(self.weight.detach().cpu())[self.row_offset :]

    def _replace(self, rows: np.ndarray) -> None:
        self.repair()
        weight = self.weight
        table = tensor_of(rows).to(weight.device)
        weight.grad = None
        weight.data = torch.cat([weight.data[: self.row_offset], table])
        self.max_positions = len(rows)
        self._know(weight)
