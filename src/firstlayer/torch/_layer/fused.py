"""The complete layer on the kernels, eager on the CPU, forward and backward.

The forward puts each row together once and writes it once. The backward puts it together
again, where autograd would have kept several arrays of the output's size. Where a gradient
is itself to be differentiated, or is batched, plain operators take over.
"""

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ... import kernels
from ...embeddings.layer import add_embeddings, normalize_rows, normalize_rows_backward
from ...embeddings.layer_gradients import layer_gradients
from .._table.lookup import Table, lookup
from .._tensors.buffers import upcast
from .._tensors.errors import bad_id
from .._tensors.large_pages import wish_for_large_pages
from .._tensors.memory import array_of, array_of_table, fusable, tensor_of, threads_of_torch

# In the place of what autograd keeps.
_GONE = torch.empty(0, device="cpu")


class Part(NamedTuple):
    """A table, the row of it for each token, and what its gradient depends on.

    Args:
        table: The table.
        rows: One for each token, int64 and contiguous, of any shape. Fewer begin again at
            their end.
        how: None if the table has each token's row in order, so that its gradient is that
            of the rows.
    """

    table: Tensor
    rows: Tensor
    how: Table | None

    def each(self, tokens: int) -> Tensor:
        """Return a row for each token."""
        return self.rows.reshape(-1).repeat(tokens // self.rows.numel())

    @property
    def skip(self) -> int | None:
        """The row that gets no gradient."""
        return None if self.how is None else self.how.padding_idx


class Plan(NamedTuple):
    """All that the output is made of.

    Args:
        token: The token table.
        position: The table of positions, or None.
        segment: That of segments, or None.
        norm: Weight and bias of a LayerNorm, or nothing.
        scale: What token rows are multiplied by.
        eps: What the norm adds to the variance.
        shape: Of the output.
        dtype: Of the output.
        mask: False for tokens that become zero in the end, or None.
    """

    token: Part
    position: Part | None
    segment: Part | None
    norm: tuple[Tensor, ...]
    scale: float
    eps: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    mask: Tensor | None

    @property
    def parts(self) -> list[Part]:
        """The tables that are there."""
        return [part for part in self[:3] if part is not None]

    def run(self) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the output."""
        tensors = (*(part.table for part in self.parts), *self.norm)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return _Layer.apply(self, *tensors)  # pyright: ignore
        return self.forward()

    def forward(self) -> Tensor:
        out, norm = torch.empty(self.shape, dtype=self.dtype, device="cpu"), None
        wish_for_large_pages(out)
        rows = array_of(out).reshape(-1, self.shape[-1])
        if self.norm:
            norm = (*map(array_of_table, self.norm), self.eps)
        with threads_of_torch():
            is_fine = kernels.layer_forward(
                _arrays(self.token),
                position=None if self.position is None else _arrays(self.position),
                segment=None if self.segment is None else _arrays(self.segment),
                scale=self.scale,
                norm=norm,
                out=rows,
            )
        if not is_fine:
            raise bad_id(self.token.rows, len(self.token.table))
        return out

    def saved(self) -> list[Tensor]:
        """Return what the way back reads, so that torch notices if it is written to."""
        kept = [part.rows for part in self.parts]
        kept += [] if self.mask is None else [self.mask]
        # Without a norm the gradient does not depend on what is in the tables.
        return kept + ([*(p.table for p in self.parts), *self.norm] if self.norm else [])

    def emptied(self) -> Self:
        """Return the plan without what was saved, which torch lets go of after its use."""
        token, position, segment = (
            part and part._replace(table=self._known_of(part), rows=_GONE)
            for part in self[:3]
        )
        return self._replace(
            token=token,
            position=position,
            segment=segment,
            norm=(_GONE,) * len(self.norm),
            mask=None if self.mask is None else _GONE,
        )

    def _known_of(self, part: Part) -> Tensor:
        """Return a table, or one without rows in its place if its numbers are not read."""
        if self.norm:
            return _GONE
        if part.how is not None:
            return part.table
        none = torch.empty((0, self.shape[-1]), dtype=part.table.dtype, device="cpu")
        return none.requires_grad_(part.table.requires_grad)

    def restored(self, saved: tuple[Tensor, ...]) -> Self:
        """Return the plan with what was saved in the place of what it had."""
        left, count = list(saved), len(self.parts)
        rows = [left.pop(0) for _ in range(count)]
        mask = None if self.mask is None else left.pop(0)
        tables = [part.table for part in self.parts]
        if self.norm:
            tables = [left.pop(0) for _ in range(count)]
        token, position, segment = (
            part and part._replace(table=tables.pop(0), rows=rows.pop(0))
            for part in self[:3]
        )
        return self._replace(
            token=token, position=position, segment=segment, norm=tuple(left), mask=mask
        )

    def pull(self, dy: Tensor) -> list[Tensor | None]:
        """Return the gradients of the tables and of the norm's weight and bias."""
        dy = dy.reshape(-1, self.shape[-1])
        if torch.is_grad_enabled() or not fusable(dy):
            return self._plain_pull(dy)
        with threads_of_torch():
            made = layer_gradients(
                _arrays(self.token),
                position=None if self.position is None else _arrays(self.position),
                segment=None if self.segment is None else _arrays(self.segment),
                scale=self.scale,
                norm=(array_of_table(self.norm[0]), self.eps) if self.norm else None,
                dy=array_of(dy.contiguous()),
                by_id=self.token.how is not None,
                token_padding=self.token.skip,
                position_padding=None if self.position is None else self.position.skip,
                mask=None if self.mask is None else array_of(self.mask).reshape(-1),
            )
        found: list[Any] = [_gradient(self.token, made.token)]
        found += [_gradient(self.position, made.position)] if self.position else []
        found += [_gradient(self.segment, made.segment)] if self.segment else []
        for weight, gradient in zip(
            self.norm, (made.norm_weight, made.norm_bias), strict=False
        ):
            found.append(tensor_of(gradient, dtype=weight.dtype))
        return found

    def _plain_pull(self, dy: Tensor) -> list[Tensor | None]:
        dy, dnorm = upcast(dy), []
        if self.norm:
            rows = (_looked_up(part, len(dy)) for part in self.parts)
            total = add_embeddings(*rows, scale=self.scale != 1.0)
            if self.mask is not None:
                steps = torch.arange(total.shape[-1], dtype=total.dtype, device=dy.device)
                total = torch.where(self.mask.reshape(-1, 1), total, steps)
            y, factor = normalize_rows(total, eps=self.eps)
            dnorm = [(dy * y).sum(0), dy.sum(0)]
            dy = normalize_rows_backward(dy * upcast(self.norm[0]), y, factor)
        found: list[Any] = []
        for part in self.parts:
            d = dy * self.scale if part is self.token and self.scale != 1.0 else dy
            found.append(
                d if part.how is None else part.how.gradient(part.each(len(dy)), d)
            )
        pairs = zip(dnorm, self.norm, strict=True)
        return found + [gradient.to(weight.dtype) for gradient, weight in pairs]


def _arrays(part: Part) -> tuple[np.ndarray, np.ndarray]:
    return array_of_table(part.table), array_of(part.rows).reshape(-1)


def _gradient(part: Part, made: Any) -> Tensor | None:
    if not part.table.requires_grad:
        return None
    if part.how is None or isinstance(made, np.ndarray):
        return tensor_of(made, dtype=part.table.dtype)
    return part.how.filled(made)


def _looked_up(part: Part, tokens: int) -> Tensor:
    rows, sparse = part.each(tokens), part.how is not None and part.how.sparse
    return lookup(rows, part.table, padding_idx=part.skip, sparse=sparse, wide=True)


class _Layer(torch.autograd.Function):
    """What a plan makes of its tensors."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Tensor:
        ctx.plan = plan.emptied()
        ctx.save_for_backward(*plan.saved())
        return plan.forward()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.plan.restored(ctx.saved_tensors).pull(grads[0])
