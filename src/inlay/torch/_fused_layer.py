"""The complete layer on the kernels, eager on the CPU, forward and backward.

The forward puts each row together once and writes it once. The backward puts it together
again, where autograd would have kept several arrays of the output's size, and sums what
arrives for each row of a table by id. Where a gradient is itself to be differentiated, or
is batched, plain operators take over.

Modules are looked through, not called, so this is only for modules that nobody is watching
or has changed: see :func:`plan_of`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .. import kernels
from ..layer import combine, standardise, standardise_pull
from ..learned import check_positions
from ._call import Call
from ._fused import (
    array_of,
    array_of_table,
    concrete,
    fusable,
    tensor_of,
    threads_of_torch,
)
from ._lookup import Table, lookup
from ._optim_pending import settle
from ._positions import on_host, positions_of, signed
from ._tables import widened, work
from .learned import LearnedPositions
from .sinusoidal import SinusoidalPositions
from .token import Embedding


@dataclass(frozen=True, eq=False)
class Source:
    """A table, the row of it for each token, and what its gradient depends on.

    Args:
        table: The table.
        rows: One for each token, int64.
        how: None if the table has each token's row in order, so that its gradient is that
            of the rows.
    """

    table: Tensor
    rows: Tensor
    how: Table | None


@dataclass(frozen=True, eq=False)
class Recipe:
    """What the kernels do with tables, rows and a norm, beside their numbers.

    Args:
        hows: What the gradient of each table depends on; see :class:`Source`.
        normed: Whether there is a LayerNorm.
        scale: What token rows are multiplied by.
        eps: What the norm adds to the variance.
        dtype: Of the output.
    """

    hows: tuple[Table | None, ...]
    normed: bool
    scale: float
    eps: float
    dtype: torch.dtype

    def forward(self, *tensors: Tensor) -> Tensor:
        token, added, norm = self._arrays(tensors)
        out = torch.empty((len(token[1]), token[0].shape[1]), dtype=self.dtype)
        with threads_of_torch():
            kernels.layer(
                token,
                added,
                scale=self.scale,
                norm=(norm[0], norm[1], self.eps) if norm else None,
                out=array_of(out),
            )
        return out

    def pull(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the sums of rows and of the norm's weight and bias."""
        if torch.is_grad_enabled() or not fusable(dy):
            return self._plain_pull(dy, *tensors)
        token, added, norm = self._arrays(tensors)
        with threads_of_torch():
            found = kernels.layer_pull(
                token,
                added,
                scale=self.scale,
                norm=(norm[0], self.eps),
                dy=array_of(dy.contiguous()),
            )
        return tuple(map(tensor_of, found))

    def _plain_pull(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        count, dy, parts = len(self.hows), widened(dy), []
        tables, rows = tensors[:count], tensors[count : 2 * count]
        for table, index, how in zip(tables, rows, self.hows, strict=True):
            padding, sparse = (how.padding_idx, how.sparse) if how else (None, False)
            part = lookup(index, table, padding_idx=padding, sparse=sparse, wide=True)
            parts.append(part)
        total = combine(*parts, scale=self.scale != 1.0)
        y, factor = standardise(total, eps=self.eps)
        d = standardise_pull(dy * widened(tensors[2 * count]), y, factor)
        return d, (dy * y).sum(0), dy.sum(0)

    def _arrays(self, tensors: tuple[Tensor, ...]) -> Any:
        count = len(self.hows)
        tables = map(array_of_table, tensors[:count])
        pairs = tuple(zip(tables, map(array_of, tensors[count:]), strict=False))
        return pairs[0], pairs[1:], tuple(map(array_of_table, tensors[2 * count :]))


@dataclass(frozen=True, eq=False)
class Plan:
    """A recipe and what it is for.

    Args:
        recipe: What to do.
        tensors: The tables, the rows of each, then weight and bias of the norm.
    """

    recipe: Recipe
    tensors: tuple[Tensor, ...]

    def run(self) -> Float[Tensor, "tokens embedding_dim"]:
        """Return the output rows."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors):
            return _Layer.apply(self.recipe, *self.tensors)  # pyright: ignore
        return self.recipe.forward(*self.tensors)


def plan_of(layer: Any, call: Call, *, dtype: torch.dtype) -> Plan | None:
    """Return what the kernels are to do for this call, or None if they may not run.

    Args:
        layer: The complete layer.
        call: Its arguments.
        dtype: Of the output.
    """
    given = [x for x in (call.ids, call.embeds, call.segments) if x is not None]
    if 0 in call.lead or not (_untouched(layer) and _fits(layer) and concrete(*given)):
        return None
    token, position = _token(layer, call), _position(layer, call)
    if token is None or (position is None and layer.position is not None):
        return None
    found = (token, position, _segment(layer, call))
    sources = [source for source in found if source is not None]
    norm, eps = (), 0.0
    if layer.norm is not None:
        norm, eps = (layer.norm.weight, layer.norm.bias), layer.norm.eps
    recipe = Recipe(
        tuple(source.how for source in sources),
        bool(norm),
        layer.embedding_dim**0.5 if layer.scale else 1.0,
        eps,
        dtype,
    )
    tables = (source.table for source in sources)
    return Plan(recipe, (*tables, *(source.rows for source in sources), *norm))


def _untouched(layer: Any) -> bool:
    """Tell whether the parts are what they were made as, and nobody listens to them."""
    token, norm = layer.token, layer.norm
    own = (
        type(token) is Embedding
        and token.max_norm is None
        and not token.scale_grad_by_freq
        and type(layer.position) in (LearnedPositions, SinusoidalPositions, type(None))
        and type(layer.segment) in (Embedding, type(None))
        and (norm is None or (type(norm) is nn.LayerNorm and norm.bias is not None))
    )
    parts = (token, layer.position, layer.segment, norm)
    return own and not (_has_any_global_hook() or any(map(_watched, parts)))


def _watched(module: nn.Module | None) -> bool:
    return module is not None and bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _fits(layer: Any) -> bool:
    """Tell whether all parameters are ordinary memory of one dtype and the right shape."""
    width, position = layer.embedding_dim, layer.position
    tables = [module for module in (layer.token, layer.segment) if module is not None]
    fit = [(table.weight, (table.num_embeddings, width)) for table in tables]
    if type(position) is LearnedPositions:
        fit.append((position.weight, (position.max_positions + position.row_offset, width)))
    if layer.norm is not None:
        fit += [(layer.norm.weight, (width,)), (layer.norm.bias, (width,))]
    weights = [weight for weight, _ in fit]
    return (
        len({weight.dtype for weight in weights}) == 1
        and fusable(*weights)
        and all(weight.is_contiguous() and weight.shape == size for weight, size in fit)
    )


def _token(layer: Any, call: Call) -> Source | None:
    if call.embeds is not None:
        if not fusable(call.embeds):
            return None
        wide = call.embeds.to(work(layer.token.weight.dtype))
        table = wide.reshape(-1, layer.embedding_dim).contiguous()
        return Source(table, torch.arange(len(table)), None)
    weight = layer.token.weight
    settle(weight, call.ids)
    if layer.token._prepared(weight) is not None:
        return None
    return _rows_of(layer.token, call.ids, call.lead, sparse=layer.token.sparse)


def _segment(layer: Any, call: Call) -> Source | None:
    if layer.segment is None:
        return None
    settle(layer.segment.weight, call.segments)
    layer.segment._prepared(layer.segment.weight)
    return _rows_of(layer.segment, call.segments, call.lead, sparse=layer.segment.sparse)


def _position(layer: Any, call: Call) -> Source | None:
    position = layer.position
    if position is None:
        return None
    weight = layer.token.weight
    shape = (*call.lead, layer.embedding_dim)
    if call.positions is None and type(call.offset) is int:
        rows = _counted(position, call.offset, call.lead[-1])
        if rows is not None:
            return _rows_of(position, rows, call.lead)
    found = positions_of(
        weight.new_empty(()).expand(shape),
        positions=call.positions,
        offset=call.offset,
        axes=getattr(position, "axes", 1),
    )
    if not concrete(found):
        return None
    if type(position) is LearnedPositions and position.scale == 1.0:
        if not found.is_floating_point():
            return _learned(position, found, call.lead)
    made = position.encode(found, dtype=work(weight.dtype))
    index = torch.arange(made[..., 0].numel()).reshape(made.shape[:-1])
    table = made.reshape(-1, made.shape[-1]).contiguous()
    how = Table(len(table), table.dtype, None, False, False)
    return Source(table, _for_each_token(index, call.lead), how)


def _counted(position: Any, offset: int, length: int) -> Tensor | None:
    """Return the rows of ``length`` positions in a row, if a plain table has them all."""
    if (
        type(position) is not LearnedPositions
        or position.scale != 1.0
        or position.padding_idx is not None
        or offset < 0
        or offset + length > position.max_positions
    ):
        return None
    first = offset + position.row_offset
    return torch.arange(first, first + length)


def _learned(position: Any, positions: Tensor, lead: tuple[int, ...]) -> Source | None:
    check_positions(
        on_host(positions),
        max_positions=position.max_positions,
        row_offset=position.row_offset,
    )
    if position.padding_idx is not None:
        if position._row_to_insert(position.weight) is not None:
            return None
    rows = signed(positions).to(torch.int64) + position.row_offset
    return _rows_of(position, rows, lead)


def _rows_of(
    module: Any, rows: Any, lead: tuple[int, ...], *, sparse: bool = False
) -> Source:
    weight = module.weight
    how = Table(len(weight), weight.dtype, module.padding_idx, False, sparse)
    return Source(weight, _for_each_token(rows, lead), how)


def _for_each_token(rows: Tensor, lead: tuple[int, ...]) -> Tensor:
    return rows.to(torch.int64).expand(lead).reshape(-1).contiguous()


class _Layer(torch.autograd.Function):
    """What a recipe makes of its tensors."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *tensors: Tensor) -> Tensor:
        ctx.recipe, count = recipe, len(recipe.hows)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        # Without a norm the gradient does not depend on what is in the tables, and they
        # may be written to before it is asked for.
        ctx.save_for_backward(*(tensors if recipe.normed else tensors[count:]))
        return recipe.forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        recipe, count, saved = ctx.recipe, len(ctx.recipe.hows), ctx.saved_tensors
        if recipe.normed:
            rows = saved[count : 2 * count]
            d, *dnorm = recipe.pull(grads[0], *saved)
        else:
            rows, d, dnorm = saved, widened(grads[0]), []
        needed, found = ctx.needs_input_grad[1:], []
        for k, how in enumerate(recipe.hows):
            part = d * recipe.scale if k == 0 and recipe.scale != 1.0 else d
            if not needed[k]:
                part = None
            elif how is not None:
                part = how.gradient(rows[k], part)
            found.append(part)
        dnorm = [g.to(t) for g, t in zip(dnorm, ctx.dtypes[2 * count :], strict=True)]
        return None, *found, *(None for _ in rows), *dnorm
