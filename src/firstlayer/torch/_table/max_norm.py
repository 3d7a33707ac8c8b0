"""``max_norm``: rows scaled down to a maximum norm, in outputs and in the stored table."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...embeddings.token import clip_norms
from .._tensors.dtypes import compute_dtype, upcast
from .._tensors.memory import is_eager
from .._tensors.shard import is_distributed
from .disk import before_write


def renormalized(
    rows: Float[Tensor, "*batch embedding_dim"], max_norm: float, *, norm_type: float
) -> Float[Tensor, "*batch embedding_dim"]:
    """Return rows scaled down to ``max_norm``; the gradient passes through unscaled.

    The gradient equals torch's, which renormalizes the table in place before the lookup.
    """
    constant = rows.detach()
    short = clip_norms(upcast(constant), max_norm=max_norm, norm_type=norm_type)
    short = short.to(rows.dtype)
    if not rows.requires_grad and is_eager():
        return short
    return short + (rows - constant)


@torch.no_grad()
def renormalize_rows(
    weight: Tensor, rows: Tensor | None, *, max_norm: float, norm_type: float
) -> None:
    """Scale rows of a table down to ``max_norm`` in place.

    Args:
        weight: The table.
        rows: Row ids, or a bool for each row of the table; None for all rows.
        max_norm: Maximum norm.
        norm_type: The p of the p-norm.
    """
    if rows is None:
        rows = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    index = rows
    if rows.dtype == torch.bool:
        if not weight.is_cpu:
            # Selecting the rows that are too long would synchronize with the device.
            short = renormalized(weight, max_norm, norm_type=norm_type)
            weight.copy_(torch.where(rows[:, None], short, weight))
            return
        dtype = compute_dtype(weight.dtype)
        norms = torch.linalg.vector_norm(weight, norm_type, dim=1, dtype=dtype)
        index = (rows & (norms > max_norm)).nonzero()[:, 0]
    if index.numel():
        before_write(weight, index)
        weight[index] = renormalized(weight[index], max_norm, norm_type=norm_type)


@torch.no_grad()
def renormalize_shard(weight: Any, *, max_norm: float, norm_type: float) -> None:
    """Scale this rank's rows of a row-sharded table down to ``max_norm`` in place.

    The gradient is reduced over all ranks, so rows without a gradient are skipped. No-op
    for tables that are not sharded by rows.
    """
    placements = getattr(weight, "placements", ())
    by_rows = all(part.is_replicate() or part.is_shard(0) for part in placements)
    if placements and by_rows and weight.grad is not None:
        rows = (weight.grad.to_local() != 0).any(dim=1)
        renormalize_rows(weight.to_local(), rows, max_norm=max_norm, norm_type=norm_type)


def rows_with_gradient(weight: Tensor) -> Tensor | None:
    """Return the rows that have a gradient, or None for all rows.

    Ids for a sparse gradient, a bool for each row for a dense one. In a distributed run it
    is always all rows: replicas must renormalize the same rows, and each has only its
    own ids.
    """
    grad = weight.grad
    if grad is None or is_distributed():
        return None
    return grad.indices()[0] if grad.is_sparse else (grad != 0).any(dim=1)
