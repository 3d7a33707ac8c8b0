"""Rows by id, and the gradient of their table.

A plain lookup of few rows is torch's own; kernels are faster for many. This module also
replaces what torch gets wrong: half-precision gradients of repeated ids are summed in
float32, sparse gradients are coalesced, ``max_norm`` does not write to the table, and
``scale_grad_by_freq`` has a correct second derivative. Kernels do this eagerly on the CPU,
plain operators everywhere else.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.compiler import is_compiling

# Imported by name: F.embedding itself may be patched to call this module.
from torch.nn.functional import embedding as torch_embedding

from ... import kernels
from ..._check import out_of_range, padding_index
from ...embeddings.row_gradient import IdGroups, RowGradient
from .._tensors.dtypes import FLOATS, HALF, compute_dtype, dtype_name, upcast
from .._tensors.errors import (
    OutOfRange,
    WrongType,
    WrongValue,
    check_tensor,
    out_of_range_error,
    reject_torchrec,
)
from .._tensors.memory import (
    NUMPY_DTYPES,
    array_of,
    array_of_table,
    is_plain_cpu,
    is_recorded,
    kernel_eligible,
    tensor_of,
    threads_of_torch,
)
from .._tensors.row_parameter import is_row_tensor, without_catch_up
from .max_norm import renormalized

#: Dtypes of ids that torch's lookup accepts.
INDEX = frozenset({torch.int64, torch.int32})
# Up to this many entries, upcasting a table costs less than a kernel call.
SMALL_TABLE = 1 << 17
# From this many entries on, the kernels gather rows. They are faster, and after torch's
# lookup, OpenMP threads keep spinning on the core that the kernels of the backward and of
# row optimizers need.
LARGE_OUTPUT = 1 << 17


def lookup(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    upcast_output: bool = False,
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return rows of a table, as :func:`firstlayer.torch.functional.embedding` does.

    Stale rows must have been caught up.

    Args:
        ids: Row ids.
        weight: The table.
        padding_idx: Id whose row gets no gradient.
        max_norm: Maximum norm of returned rows; longer ones are scaled down.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs.
        sparse: Make the gradient a sparse tensor.
        upcast_output: Return rows in the compute dtype, float32 or float64.
    """
    if not isinstance(ids, Tensor):
        reject_torchrec(ids, "its values()")
        if not hasattr(ids, "__torch_function__"):
            check_tensor(ids, name="ids")
        # A symbolic proxy.
        return torch_embedding(
            ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, upcast_output
    if is_row_tensor(weight):
        table: Any = weight
        table.check_whole_table()
        # The caller has caught up the rows of these ids.
        with without_catch_up():
            return _lookup(ids, weight, *options)
    return _lookup(ids, weight, *options)


def _lookup(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
    upcast_output: bool,
) -> Tensor:
    if is_recorded():
        # ONNX counts negative ids from the end. The new id is out of range everywhere.
        ids = torch.where(as_index(ids) < 0, weight.shape[0], as_index(ids))
    try:
        if (
            max_norm is None
            and weight.dtype not in HALF
            and ids.dtype in INDEX
            and not (sparse or scale_grad_by_freq)
            and not (_is_large(ids, weight) and _is_eligible(ids, weight))
        ):
            return torch_embedding(ids, weight, padding_idx)
        padding_idx = checked_padding_idx(padding_idx, weight.shape[0])
        options = LookupOptions(
            weight.shape[0], weight.dtype, padding_idx, scale_grad_by_freq, sparse
        )
        rows = _rows(as_index(ids), weight, options=options, upcast_output=upcast_output)
    except IndexError:
        if not is_plain_cpu(ids):
            raise
        raise out_of_range_error(ids, weight.shape[0]) from None
    except RuntimeError as error:
        # Torch raises RuntimeError for lookups in a table without rows.
        empty = weight.dim() == 2 and not weight.shape[0] and ids.numel()
        if not empty or isinstance(error, TypeError | ValueError) or not is_plain_cpu(ids):
            raise
        raise out_of_range_error(ids, 0) from None
    except AssertionError:
        checked_padding_idx(padding_idx, weight.shape[0])
        raise
    return rows if max_norm is None else renormalized(rows, max_norm, norm_type=norm_type)


def checked_padding_idx(padding_idx: int | None, num_embeddings: int) -> int | None:
    """Return ``padding_idx`` counted from the front, or None."""
    try:
        return padding_index(padding_idx, num_embeddings)
    except ValueError as error:
        raise WrongValue(*error.args) from None


def as_index(ids: Integer[Tensor, "*batch"], *, name: str = "ids") -> Tensor:
    """Return integers of any dtype as int64 or int32.

    A uint64 beyond int64 becomes negative, which is out of range as well.
    """
    if ids.dtype in INDEX:
        return ids
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise WrongType(f"{name} must be integers, got {dtype_name(ids.dtype)}")
    return ids.to(torch.int64)


class LookupOptions(NamedTuple):
    """Properties of a table and its lookup that the table's gradient depends on."""

    num_embeddings: int
    dtype: torch.dtype
    padding_idx: int | None = None
    scale_grad_by_freq: bool = False
    sparse: bool = False

    @property
    def needs_own_backward(self) -> bool:
        """Whether torch's backward would give another gradient."""
        return self.sparse or self.scale_grad_by_freq or self.dtype in HALF

    def gradient(
        self,
        ids: Integer[Tensor, "*batch"],
        dy: Float[Tensor, "*batch embedding_dim"],
        *,
        groups: IdGroups | None = None,
    ) -> Tensor:
        """Return the table's gradient.

        Args:
            ids: Ids of the lookup.
            dy: Gradient of its output.
            groups: The ids' groups, if they are known.
        """
        small = (
            self.num_embeddings * dy.shape[-1] <= SMALL_TABLE and dy.numel() <= SMALL_TABLE
        )
        plain = small and not (self.sparse or self.scale_grad_by_freq)
        if plain or torch.is_grad_enabled() or not kernel_eligible(dy):
            return self._gradient_by_operators(ids, dy)
        groups = IdGroups.of(array_of(ids)) if groups is None else groups
        values = array_of(dy.contiguous())
        with threads_of_torch():
            rows = groups.sum(values, skip=self.padding_idx, mean=self.scale_grad_by_freq)
        return self.to_tensor(rows)

    def to_tensor(self, rows: RowGradient) -> Tensor:
        """Return a row gradient as a sparse or dense tensor in the table's dtype."""
        # Ids ascend. They may have been changed after the forward.
        if len(rows.ids) and rows.ids[-1] >= self.num_embeddings:
            raise OutOfRange(*out_of_range(rows.ids, self.num_embeddings).args)
        shape = self.num_embeddings, rows.values.shape[1]
        if self.sparse:
            ids, values = (
                tensor_of(rows.ids[None]),
                tensor_of(rows.values, dtype=self.dtype),
            )
            if not len(rows.ids):
                # Accumulation resizes empty tensors, which NumPy's memory does not allow.
                ids, values = ids.clone(), values.clone()
            return torch.sparse_coo_tensor(
                ids, values, shape, check_invariants=False, is_coalesced=True
            )
        if len(rows.ids) == self.num_embeddings:
            return tensor_of(rows.values, dtype=self.dtype)
        # np.zeros maps pages on first write; torch.zeros would write all of them.
        out = np.zeros(shape, NUMPY_DTYPES[self.dtype])
        with threads_of_torch():
            kernels.store_rows(rows.values, out, rows.ids, noise=None)
        return tensor_of(out)

    def _gradient_by_operators(self, ids: Tensor, dy: Tensor) -> Tensor:
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
    """Return how often each id occurs in ``ids``, in the dtype of ``like``."""
    ones = like.new_ones(()).expand(ids.numel())
    counts = like.new_zeros(num_embeddings).index_add(0, ids.reshape(-1), ones)
    return counts[ids]


def divide_gradient(
    x: Float[Tensor, "*batch embedding_dim"], by: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return ``x`` unchanged; its gradient is divided by ``by``."""
    constant = x.detach()
    return constant + (x - constant) / by[..., None]


class _Lookup(torch.autograd.Function):
    """Lookup with the gradient of :class:`LookupOptions`."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, options: LookupOptions, upcast_output: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.options = options
        ctx.groups = None
        if not (weight.is_contiguous() and _is_large(ids, weight)):
            rows = torch_embedding(ids, weight)
        elif options.sparse:
            # Needed in the backward, and the order in which row optimizers update rows.
            ctx.groups = IdGroups.of(array_of(ids))
            rows = _gather_by_kernel(ids, weight, ctx.groups.order)
        else:
            rows = _gather_by_kernel(ids, weight)
        return upcast(rows) if upcast_output else rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,) = ctx.saved_tensors
        gradient = ctx.options.gradient(ids, grads[0], groups=ctx.groups)
        return gradient, None, None, None


def _is_large(ids: Tensor, weight: Tensor) -> bool:
    """Return whether kernels gather the rows faster. Sizes that are symbols are small."""
    if is_compiling() or weight.dim() != 2:
        return False
    size: Any = ids.numel() * weight.shape[1]
    return type(size) is int and size >= LARGE_OUTPUT


def _is_eligible(ids: Tensor, weight: Tensor) -> bool:
    """Return whether kernels may read the ids and the table."""
    return weight.dtype in FLOATS and is_plain_cpu(weight, ids)


def _gather(ids: Tensor, weight: Tensor) -> Tensor:
    by_kernel = weight.is_contiguous() and _is_large(ids, weight)
    if not by_kernel or not _is_eligible(ids, weight):
        return torch_embedding(ids, weight)
    return _gather_by_kernel(ids, weight)


def _gather_by_kernel(
    ids: Tensor, weight: Tensor, order: np.ndarray | None = None
) -> Tensor:
    flat = np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)
    with threads_of_torch():
        rows = kernels.gather_rows(array_of_table(weight), flat, order=order)
    if rows is None:
        raise IndexError("index out of range in self")
    return tensor_of(rows.reshape(*ids.shape, weight.shape[1]))


def is_jagged(ids: Any) -> bool:
    """Return whether ids are a contiguous nested tensor, ragged in the second axis."""
    jagged = ids.is_nested and ids.layout is torch.jagged
    return jagged and ids.lengths() is None and ids._ragged_idx == 1


def _rows(
    ids: Any, weight: Tensor, *, options: LookupOptions, upcast_output: bool
) -> Tensor:
    dtype = compute_dtype(weight.dtype) if upcast_output else weight.dtype
    # torch.jit.trace checks that it records the same operators without gradients.
    if not (weight.requires_grad and (torch.is_grad_enabled() or is_recorded())):
        return _gather(ids, weight).to(dtype)
    if is_jagged(ids):
        rows = _rows(ids.values(), weight, options=options, upcast_output=upcast_output)
        return torch.nested.nested_tensor_from_jagged(rows, ids.offsets())
    if _is_eligible(ids, weight):
        return _Lookup.apply(weight, ids, options, upcast_output)  # pyright: ignore
    if weight.dtype in HALF and not (options.sparse or is_recorded()):
        # On other devices torch sums in float32. Sparse gradients are coalesced later.
        # Recorded lookups are for inference: upcasting the table would cost too much.
        weight = upcast(weight) if weight.device.type == "cpu" else weight
    padding_idx, compiling = options.padding_idx, torch.compiler.is_compiling()
    if options.sparse and compiling and padding_idx is not None:
        # Torch drops padding from a sparse gradient, whose size is then unknown to the
        # compiler. Here the gradient of padding is zero instead.
        rows = torch_embedding(ids, weight, sparse=True)
        rows = torch.where((ids == padding_idx)[..., None], rows.detach(), rows)
    else:
        rows = torch_embedding(ids, weight, padding_idx, sparse=options.sparse)
    if options.scale_grad_by_freq:
        rows = upcast(rows)
        rows = divide_gradient(rows, frequencies(ids, len(weight), like=rows))
    return rows.to(dtype)
