"""Gradient clipping by norm, for sparse and dense gradients, whole or sharded."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._tensors.dtypes import compute_dtype
from .._tensors.errors import WrongValue
from .._tensors.shard import shard_of
from .sparse_gradient import coalesced

#: Process groups over which entries of a gradient are sharded.
Groups = tuple[Any, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the norm of all gradients together, in place.

    Works as ``torch.nn.utils.clip_grad_norm_`` and also accepts sparse gradients of any
    layer. Rows without a gradient add nothing to a norm, so the norm is that of dense
    gradients.

    Sharded tables (:mod:`firstlayer.torch.sharding`) and parameters of ``fully_shard`` may
    be among the parameters: every entry counts once. All ranks must then call it, with the
    same parameters in the same order.

    Args:
        parameters: Parameters whose gradients are clipped; those without one are skipped.
        max_norm: Maximum norm.
        norm_type: The p of the p-norm; ``inf`` for the largest entry.
        error_if_nonfinite: Raise if the norm is not finite, and change nothing.

    Returns:
        Norm of the gradients before clipping.

    Example:
        >>> layer = torch.nn.Embedding(9, 1, sparse=True)
        >>> layer(torch.tensor([4, 7, 4, 7, 4, 7, 4])).sum().backward()
        >>> clip_grad_norm_(layer.parameters(), 1.0)
        tensor(5.)
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    p = float(norm_type)
    values, norms = [], []
    sharded: dict[Groups, list[Tensor]] = {}
    devices: dict[Groups, torch.device] = {}
    for parameter in parameters:
        groups = _groups_of(parameter)
        if groups and groups not in sharded:
            # A rank without a gradient takes part in the sum.
            sharded[groups], devices[groups] = [], parameter.device
        if parameter.grad is None:
            continue
        part = _values(parameter)
        # A gradient without rows is zero, and the inf-norm of an empty tensor is an error.
        if part.numel():
            values.append(part)
            dtype = None if part.is_complex() else compute_dtype(part.dtype)
            norm = torch.linalg.vector_norm(part, p, dtype=dtype)
            (sharded[groups] if groups else norms).append(norm)
    for groups, parts in sharded.items():
        norms.append(_norm_over_ranks(parts, groups, p, device=devices[groups]))
    if not norms:
        return torch.zeros((), device="cpu")
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), p)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients must be finite, got {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for part in values:
        # Not rounded to the gradient's dtype: the rounding error would affect every entry.
        part.mul_(factor.to(part.device))
    return total


def _groups_of(parameter: Tensor) -> Groups:
    shard = shard_of(parameter)
    if shard is not None:
        return shard.groups
    dtensor: Any = parameter
    placements = enumerate(getattr(dtensor, "placements", ()))
    return tuple(dtensor.device_mesh.get_group(n) for n, p in placements if p.is_shard())


def _norm_over_ranks(
    parts: list[Tensor], groups: Groups, p: float, *, device: torch.device
) -> Tensor:
    """Return the norm of gradients whose entries are on several ranks.

    Args:
        parts: Norm of each gradient on this rank.
        groups: Process groups of the other ranks.
        p: The p of the p-norm.
        device: Device of the groups' tensors.
    """
    if p <= 0:
        raise WrongValue(f"norm_type must be positive for sharded gradients, got {p}")
    import torch.distributed as dist

    own = [part.to(device, torch.float64) for part in parts]
    mine = torch.stack(own) if own else torch.zeros(1, dtype=torch.float64, device=device)
    is_max = math.isinf(p)
    total = mine.max() if is_max else mine.pow(p).sum()
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
    dtype = parts[0].dtype if parts else torch.float32
    return (total if is_max else total.pow(1 / p)).to(dtype)


def _values(parameter: Tensor) -> Tensor:
    """Return the entries of a gradient that this rank has and that may not be zero."""
    grad: Any = parameter.grad
    if hasattr(grad, "device_mesh"):
        return grad.to_local()
    if not grad.is_sparse:
        # An ordinary tensor, also of a part of a table, whose norm is summed over ranks.
        return grad.detach()
    if not grad.is_coalesced():
        # The norm is that of the sum over repeated ids.
        parameter.grad = grad = coalesced(grad)
    return grad._values()
