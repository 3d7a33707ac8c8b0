"""Sparse gradients of torch as row gradients, summed by id, and as tensors to clip."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...embeddings.row_gradient import RowGradient, sum_by_id
from .._tensors.memory import array_of, tensor_of, threads_of_torch
from .._tensors.row_parameter import RowTensor, catch_up_arguments, without_catch_up
from .._tensors.shard_tensor import ShardTensor, check_whole_norm

# Torch's type stubs do not export the functions of lists of tensors.
_torch: Any = torch


def rows_of(grad: Tensor) -> RowGradient:
    """Return a sparse gradient of a table as a row gradient.

    Repeated ids are summed in order, in float32 (float64 for float64). A gradient without
    repeated ids keeps its values and their dtype.
    """
    ids, values = grad._indices(), grad._values().contiguous()
    if ids.shape[0] != 1:
        raise ValueError(f"a row gradient has one sparse axis, got {ids.shape[0]}")
    if not ids.shape[1]:
        # The next accumulation resizes an empty gradient in place, which tensors that
        # NumPy has seen do not allow.
        ids, values = ids.clone(), values.clone()
    index = np.ascontiguousarray(array_of(ids)[0])
    if grad.is_coalesced():
        return RowGradient(index, array_of(values))
    with threads_of_torch():
        return sum_by_id(index, array_of(values))


def coalesced(grad: Tensor) -> Tensor:
    """Return a sparse gradient summed by id, as :func:`rows_of` sums.

    Example:
        >>> layer = torch.nn.Embedding(5, 2, sparse=True)
        >>> layer(torch.tensor([3, 1, 3])).sum().backward()
        >>> coalesced(layer.weight.grad).values().tolist()
        [[1.0, 1.0], [2.0, 2.0]]
    """
    rows = rows_of(grad)
    ids, values = tensor_of(rows.ids)[None], tensor_of(rows.values).to(grad.dtype)
    if not rows.ids.size:
        # torch resizes an empty gradient in place when it accumulates into it, which
        # memory owned by NumPy does not allow.
        ids, values = ids.clone(), values.clone()
    return torch.sparse_coo_tensor(
        ids, values, grad.shape, check_invariants=False, is_coalesced=True
    )


class RowGradientTensor(Tensor):
    """Sparse gradient that ``torch.nn.utils.clip_grad_norm_`` and its relatives accept.

    A sparse tensor in every other respect. Torch's clipping calls functions that do not
    exist for sparse tensors: norms, clamping, and functions of lists of tensors. Entries
    that a row gradient does not store are zero. They add nothing to a norm, and scaling or
    clamping leaves them zero, so these functions work on the stored values here. Scaling in
    place leaves the gradient coalesced.

    Sparse results of torch functions, such as ``grad.clone()`` and ``grad.data``, have this
    class too. Pickles hold a plain sparse tensor.

    Example:
        >>> layer = torch.nn.Embedding(9, 1, sparse=True)
        >>> layer(torch.tensor([4, 7, 4, 7, 4, 7, 4])).sum().backward()
        >>> layer.weight.grad = RowGradientTensor.from_sparse(layer.weight.grad)
        >>> torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        tensor(5.)
    """

    #: Which part of a table the gradient belongs to, or None for the whole.
    table_shard: Any = None

    @staticmethod
    def from_sparse(grad: Tensor) -> "RowGradientTensor":
        """Return a sparse tensor as this class; both share ids and values."""
        if isinstance(grad, RowGradientTensor):
            return grad
        return Tensor._make_subclass(RowGradientTensor, grad)  # pyright: ignore

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(cls, other) for other in types):
            others = [other for other in types if not issubclass(cls, other)]
            if not all(issubclass(other, RowTensor | ShardTensor) for other in others):
                return NotImplemented
            with without_catch_up():
                catch_up_arguments(func, args, kwargs)
        on_values = _ON_VALUES.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            result = NotImplemented
            if on_values is not None:
                result = on_values(func, *args, **kwargs)
            if result is NotImplemented:
                result = func(*args, **kwargs)
            if type(result) is Tensor and result.layout is torch.sparse_coo:
                return RowGradientTensor.from_sparse(result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowGradientTensor":
        memo[id(self)] = copy = self.clone()
        return copy  # pyright: ignore

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach()
        return plain.__reduce_ex__(protocol)


# The functions below run with __torch_function__ disabled. They return NotImplemented if
# torch's own function is to be called.


def _vector_norm(
    func: Any, x: Any, ord: Any = 2, dim: Any = None, keepdim: Any = False, **options: Any
) -> Any:
    if not isinstance(x, RowGradientTensor) or dim is not None or keepdim:
        return NotImplemented
    return func(_values_for_norm(x, ord), ord, **options)


def _foreach_norm(func: Any, tensors: Any, ord: Any = 2, **options: Any) -> Any:
    return func([_values_for_norm(x, ord) for x in tensors], ord, **options)


def _scale(func: Any, x: Any, factor: Any, **options: Any) -> Any:
    """Multiply or divide in place by a number."""
    is_number = isinstance(factor, int | float) or (
        isinstance(factor, Tensor) and not factor.dim() and not factor.is_sparse
    )
    if not isinstance(x, RowGradientTensor) or not is_number:
        return NotImplemented
    func(x._values(), factor, **options)
    return x


def _foreach_scale(func: Any, tensors: Any, factor: Any) -> Any:
    """Multiply or divide in place, by one number or by one number for each tensor."""
    factors = factor if isinstance(factor, list | tuple) else [factor]
    if any(isinstance(x, Tensor) and x.dim() for x in factors):
        return NotImplemented
    if not all(isinstance(x, Tensor) for x in tensors):
        return NotImplemented
    return func(list(map(_stored_values, tensors)), factor)


def _foreach_clamp(func: Any, tensors: Any, limit: Any) -> Any:
    # A positive minimum or a negative maximum would change entries that are not stored.
    is_minimum = func is _torch._foreach_clamp_min_
    if not isinstance(limit, int | float) or (limit > 0 if is_minimum else limit < 0):
        return NotImplemented
    return func([_coalesced_values(x) for x in tensors], limit)


def _clamp(func: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    keeps_zero = all(
        limit is None or isinstance(limit, int | float) and sign * limit >= 0
        for sign, limit in ((-1, min), (1, max))
    )
    if not isinstance(x, RowGradientTensor) or not keeps_zero:
        return NotImplemented
    _coalesced_values(x).clamp_(min, max)
    return x


def _isfinite(func: Any, x: Any) -> Any:
    # Sums over repeated ids may overflow, and entries that are not stored are finite.
    out = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    summed = x.coalesce()
    out[summed._indices()[0]] = func(summed._values())
    return out


def _values_for_norm(x: Tensor, ord: Any) -> Tensor:
    """Return values with the p-norm of ``x``, summed over repeated ids."""
    if not isinstance(x, RowGradientTensor):
        return x
    check_whole_norm(x.table_shard)
    if not isinstance(ord, int | float) or ord < 0:
        # The zeros that are not stored determine these norms.
        return x.to_dense()
    values = (x if x.is_coalesced() else coalesced(x))._values()
    # The inf-norm of an empty tensor is an error.
    return values if values.numel() else values.new_zeros(1)


def _stored_values(x: Tensor) -> Tensor:
    return x._values() if isinstance(x, RowGradientTensor) else x


def _coalesced_values(x: Tensor) -> Tensor:
    """Return the values of ``x``, which is coalesced in place first."""
    if isinstance(x, RowGradientTensor) and not x.is_coalesced():
        x.copy_(coalesced(x))
    return _stored_values(x)


_ON_VALUES: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    _torch._foreach_norm: _foreach_norm,
    Tensor.mul_: _scale,
    Tensor.__imul__: _scale,
    Tensor.div_: _scale,
    Tensor.__itruediv__: _scale,
    _torch._foreach_mul_: _foreach_scale,
    _torch._foreach_div_: _foreach_scale,
    _torch._foreach_clamp_min_: _foreach_clamp,
    _torch._foreach_clamp_max_: _foreach_clamp,
    torch.clamp_: _clamp,
    Tensor.clamp_: _clamp,
    torch.isfinite: _isfinite,
    Tensor.isfinite: _isfinite,
}
