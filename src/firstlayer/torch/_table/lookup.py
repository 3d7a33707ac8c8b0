"""Rows by id, and the gradient that goes back to their table.

A plain lookup is torch's own. What torch has wrong is done here: half-precision gradients
of repeated ids are summed in float32, row gradients are summed by id, ``max_norm`` leaves
the table alone, and ``scale_grad_by_freq`` has a right second derivative. Eager on the CPU
that runs on the kernels; everywhere else it is plain operators.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

# Under its own name: F.embedding itself may be patched to call what is in here.
from torch.nn.functional import embedding as torch_embedding

from ... import kernels
from ..._check import float_dtype, padding_index
from ...embeddings.row_gradient import RowGradient, sum_by_id
from ...embeddings.token import clip_norms
from .._tensors.buffers import compute_dtype, name_of, upcast
from .._tensors.errors import WrongType, WrongValue, bad_id, explained
from .._tensors.memory import (
    array_of,
    array_of_table,
    concrete,
    eager,
    fusable,
    tensor_of,
    threads_of_torch,
)

HALF = frozenset({torch.float16, torch.bfloat16})
#: What torch looks up by; other integers are converted first.
INDEX = frozenset({torch.int64, torch.int32})
# Up to this many entries a table is widened at less than the cost of a kernel call.
SMALL = 1 << 17
# From this many on, rows are gathered by the kernels: OpenMP's threads go on spinning after
# torch's lookup, on the core that the kernels of the gradient and of a row optimizer need.
LARGE = 1 << 17


def lookup(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    padding_row: Float[Tensor, " embedding_dim"] | None = None,
    wide: bool = False,
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return rows of a table, as :func:`firstlayer.torch.functional.embedding` does.

    Args:
        ids: Which rows.
        weight: The table.
        padding_idx: The id whose row gets no gradient.
        max_norm: Rows longer than this are returned shortened to it.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        sparse: Whether the gradient is a row gradient, a sparse tensor.
        padding_row: What to return for padding if the table cannot be trusted to hold it.
        wide: Return rows in the dtype of the work, float32 or float64.
    """
    if not isinstance(ids, Tensor):
        # A symbol that stands for ids, or what torch has its own words for.
        return torch_embedding(
            ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    try:
        if (
            max_norm is None
            and padding_row is None
            and weight.dtype not in HALF
            and ids.dtype in INDEX
            and not (sparse or scale_grad_by_freq)
        ):
            return torch_embedding(ids, weight, padding_idx)
        padding_idx = padding_of(padding_idx, weight.shape[0])
        how = Table(weight.shape[0], weight.dtype, padding_idx, scale_grad_by_freq, sparse)
        used = as_index(ids)
        rows = _rows(used, weight, how=how, wide=wide)
    except IndexError as error:
        raise explained(error, ids, weight.shape[0]) from None
    except RuntimeError as error:
        # What torch says of a table without rows; of anything else it says enough.
        empty = weight.dim() == 2 and not weight.shape[0] and ids.numel()
        if not empty or isinstance(error, TypeError | ValueError) or not concrete(ids):
            raise
        raise bad_id(ids, 0) from None
    except AssertionError:
        padding_of(padding_idx, weight.shape[0])
        raise
    if padding_row is not None:
        # Not simply .to(rows): an exported program would hold the device it names.
        row = padding_row if padding_row.device == rows.device else padding_row.to(rows)
        rows = torch.where((used == padding_idx)[..., None], row.to(rows.dtype), rows)
    return rows if max_norm is None else shortened(rows, max_norm, norm_type=norm_type)


def padding_of(padding_idx: int | None, num_embeddings: int) -> int | None:
    """Return ``padding_idx`` counted from the front, or None."""
    try:
        return padding_index(padding_idx, num_embeddings)
    except ValueError as error:
        raise WrongValue(*error.args) from None


def as_index(ids: Integer[Tensor, "*batch"], *, name: str = "ids") -> Tensor:
    """Return integers of any dtype as those that torch looks up by.

    A uint64 beyond int64 becomes a negative number, which is no row either.
    """
    if ids.dtype in INDEX:
        return ids
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise WrongType(f"{name} must be integers, got {name_of(ids.dtype)}")
    return ids.to(torch.int64)


def shortened(
    rows: Float[Tensor, "*batch embedding_dim"], max_norm: float, *, norm_type: float
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return rows within ``max_norm``, with the gradient of rows that were so all along.

    That is torch's: it shortens the table in place, and then looks up.
    """
    kept = rows.detach()
    short = clip_norms(upcast(kept), max_norm=max_norm, norm_type=norm_type)
    short = short.to(rows.dtype)
    if not rows.requires_grad and eager():
        return short
    return short + (rows - kept)


class Table(NamedTuple):
    """What a table's gradient depends on beside the ids and the gradient of the rows."""

    num_embeddings: int
    dtype: torch.dtype
    padding_idx: int | None
    scale_grad_by_freq: bool
    sparse: bool

    @property
    def is_special(self) -> bool:
        """Whether torch's own backward does not do what is asked."""
        return self.sparse or self.scale_grad_by_freq or self.dtype in HALF

    def gradient(
        self, ids: Integer[Tensor, "*batch"], dy: Float[Tensor, "*batch embedding_dim"]
    ) -> Tensor:
        """Return the table's gradient, given that of the rows looked up by ``ids``."""
        small = self.num_embeddings * dy.shape[-1] <= SMALL and dy.numel() <= SMALL
        plain = small and not (self.sparse or self.scale_grad_by_freq)
        if plain or torch.is_grad_enabled() or not fusable(dy):
            return self._plain_gradient(ids, dy)
        with threads_of_torch():
            rows = sum_by_id(
                array_of(ids),
                array_of(dy.contiguous()),
                skip=self.padding_idx,
                mean=self.scale_grad_by_freq,
            )
        return self.filled(rows)

    def filled(self, rows: RowGradient) -> Tensor:
        """Return row gradients as the tensor that ``.grad`` shall be."""
        shape = self.num_embeddings, rows.values.shape[1]
        if self.sparse:
            ids, values = (
                tensor_of(rows.ids[None]),
                tensor_of(rows.values, dtype=self.dtype),
            )
            if not len(rows.ids):
                # Accumulating resizes what has no rows, which NumPy's memory refuses.
                ids, values = ids.clone(), values.clone()
            return torch.sparse_coo_tensor(
                ids, values, shape, check_invariants=False, is_coalesced=True
            )
        if len(rows.ids) == self.num_embeddings:
            return tensor_of(rows.values, dtype=self.dtype)
        # Pages that nobody writes to are not made: torch would fill them with zeros.
        out = np.zeros(shape, float_dtype(name_of(self.dtype)))
        with threads_of_torch():
            kernels.store_rows(rows.values, out, rows.ids, noise=None)
        return tensor_of(out)

    def _plain_gradient(self, ids: Tensor, dy: Tensor) -> Tensor:
        d = upcast(dy)
        if self.scale_grad_by_freq:
            d = d / frequencies(ids, self.num_embeddings, like=d)[..., None]
        skip = -1 if self.padding_idx is None else self.padding_idx
        summed = torch.ops.aten.embedding_backward.default(
            d, ids, self.num_embeddings, skip, False, self.sparse
        )
        return summed.to(self.dtype)


def frequencies(
    ids: Integer[Tensor, "*batch"], num_embeddings: int, *, like: Tensor
) -> Float[Tensor, "*batch"]:
    """Return for each id how often it is among ``ids``, in the dtype of ``like``."""
    ones = like.new_ones(()).expand(ids.numel())
    counts = like.new_zeros(num_embeddings).index_add(0, ids.reshape(-1), ones)
    return counts[ids]


def with_gradient_divided(
    x: Float[Tensor, "*batch embedding_dim"], by: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return ``x`` itself, whose gradient is divided."""
    kept = x.detach()
    return kept + (x - kept) / by[..., None]


def _gathered(ids: Tensor, weight: Tensor) -> Tensor:
    """Return rows of a table that the kernels may read."""
    if ids.numel() * weight.shape[1] < LARGE or not weight.is_contiguous():
        return torch_embedding(ids, weight)
    flat = np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)
    with threads_of_torch():
        rows = kernels.gather_rows(array_of_table(weight), flat)
    if rows is None:
        raise IndexError("index out of range in self")
    return tensor_of(rows).view(*ids.shape, weight.shape[1])


class _Lookup(torch.autograd.Function):
    """A lookup whose gradient is made by :class:`Table`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, how: Table, wide: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.how = how
        rows = _gathered(ids, weight)
        return upcast(rows) if wide else rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,) = ctx.saved_tensors
        return ctx.how.gradient(ids, grads[0]), None, None, None


def _is_ragged(ids: Any) -> bool:
    """Tell whether ids are rows of different lengths, one after the other in memory."""
    jagged = ids.is_nested and ids.layout is torch.jagged
    return jagged and ids.lengths() is None and ids._ragged_idx == 1


def _rows(ids: Any, weight: Tensor, *, how: Table, wide: bool) -> Tensor:
    dtype = compute_dtype(weight.dtype) if wide else weight.dtype
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return torch_embedding(ids, weight).to(dtype)
    if _is_ragged(ids):
        rows = _rows(ids.values(), weight, how=how, wide=wide)
        return torch.nested.nested_tensor_from_jagged(rows, ids.offsets())
    if fusable(weight) and concrete(ids):
        return _Lookup.apply(weight, ids, how, wide)  # pyright: ignore
    if weight.dtype in HALF and not (how.sparse or torch.compiler.is_exporting()):
        # Elsewhere than on the CPU torch itself sums in float32; rows are summed later.
        weight = upcast(weight) if weight.device.type == "cpu" else weight
    padding_idx, compiled = how.padding_idx, torch.compiler.is_compiling()
    if how.sparse and compiled and padding_idx is not None:
        # torch leaves padding out of a row gradient; while compiling, how much that is
        # cannot be known. Here its gradient is zero.
        rows = torch_embedding(ids, weight, sparse=True)
        rows = torch.where((ids == padding_idx)[..., None], rows.detach(), rows)
    else:
        rows = torch_embedding(ids, weight, padding_idx, sparse=how.sparse)
    if how.scale_grad_by_freq:
        rows = upcast(rows)
        rows = with_gradient_divided(rows, frequencies(ids, len(weight), like=rows))
    return rows.to(dtype)
