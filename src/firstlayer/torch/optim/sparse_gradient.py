"""Sparse gradients of torch as row gradients, summed by id."""

import numpy as np
import torch
from torch import Tensor

from ...embeddings.row_gradient import RowGradient, sum_by_id
from .._tensors.dtypes import upcast
from .._tensors.memory import array_of, tensor_of, threads_of_torch


def rows_of(grad: Tensor) -> RowGradient:
    """Return a sparse gradient of a table as a row gradient in the compute dtype.

    Repeated ids are summed in order, in float32 (float64 for float64).
    """
    ids, values = grad._indices(), grad._values().contiguous()
    if ids.shape[0] != 1:
        raise ValueError(f"a row gradient has one sparse axis, got {ids.shape[0]}")
    index = np.ascontiguousarray(array_of(ids)[0])
    if grad.is_coalesced():
        return RowGradient(index, array_of(upcast(values)))
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
