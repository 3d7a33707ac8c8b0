"""Bags of rows on torch: sums, means and maxima, with gradients of every order.

:mod:`firstlayer.embeddings.bag` defines the result. Eager calls on the CPU run on the
kernels, in the backward too, or on torch's operator if it gives the same result faster.
Everything else, and a backward that is itself differentiated, runs on plain operators.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Integer
from torch import Tensor

from ...embeddings.bag import Mode
from ...embeddings.ragged import Bags, bag_bounds
from ...embeddings.row_gradient import GradientMemory
from .._table.lookup import as_index
from .._tensors.errors import torch_errors
from .._tensors.memory import is_plain_cpu, kernel_eligible, tensor_of
from .._tensors.row_parameter import is_row_tensor, without_catch_up
from .kernels import pool_by_kernels
from .operators import pool_by_operators
from .options import BagOptions, checked_bags
from .torch_operator import is_stock, pool_by_torch


def pool_bags(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    offsets: Integer[Tensor, " bags"] | None,
    weights: Tensor | None,
    options: BagOptions,
    gathered: Tensor | None = None,
) -> Float[Tensor, "bags embedding_dim"]:
    """Return a row for each bag; see :func:`firstlayer.torch.functional.embedding_bag`.

    Stale rows must have been caught up.

    Args:
        ids: Ids.
        weight: The table.
        offsets: Start of each bag, or None.
        weights: ``per_sample_weights`` or None.
        options: Options of the bags.
        gathered: Row of each of the flat ids, read instead of the table. Only for ordinary
            tensors on the CPU, a contiguous table and no ``max_norm``.
    """
    if is_row_tensor(weight):
        table: Any = weight
        table.check_whole_table()
        with without_catch_up():
            return _pool(ids, weight, offsets, weights, options, gathered)
    return _pool(ids, weight, offsets, weights, options, gathered)


def pool_checked(
    bags: Bags,
    weight: Float[Tensor, "num_embeddings embedding_dim"],
    *,
    weights: Float[Tensor, " n"] | None,
    mode: Mode,
    sparse: bool,
    memory: GradientMemory | None = None,
) -> Float[Tensor, "bags embedding_dim"]:
    """Return a row for each bag, by the kernels; stale rows must have been caught up.

    Args:
        bags: Bags whose ids are in range and which no other code changes.
        weight: Contiguous table that the kernels can read.
        weights: ``per_sample_weights`` of the flat ids, in the compute dtype, or None.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Make the gradient of the table a coalesced sparse tensor.
        memory: Memory for the gradient of the table.
    """
    options = BagOptions(mode, None, 2.0, False, sparse, True, None, memory)
    ids = tensor_of(bags.ids)
    with without_catch_up():
        return pool_by_kernels(
            weight, weights, ids=ids, bags=bags, options=options, gathered=None
        )


def _pool(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    options: BagOptions,
    gathered: Tensor | None,
) -> Tensor:
    if is_plain_cpu(ids, offsets, weights):
        stock = offsets is None and weights is None and is_stock(ids, weight, options)
        kernels_run = (
            options.max_norm is None and kernel_eligible(weight) and weight.is_contiguous()
        )
        if kernels_run and stock:
            return pool_by_torch(weight, ids, options, gathered)
        lookup_options = options.lookup_options(weight)
        bags = checked_bags(ids, lookup_options, options, offsets=offsets, weights=weights)
        if kernels_run:
            return pool_by_kernels(
                weight, weights, ids=ids, bags=bags, options=options, gathered=gathered
            )
    elif (ids.ndim, offsets is None) not in ((1, False), (2, True)):
        with torch_errors():
            bag_bounds(tuple(ids.shape), None if offsets is None else np.array([0]))
    return pool_by_operators(
        as_index(ids), weight, offsets=offsets, weights=weights, options=options
    )
