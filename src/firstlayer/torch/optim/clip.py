"""Clipping gradients by their norm, row gradients among them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .._tensors.dtypes import compute_dtype
from .sparse_gradient import coalesced


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Shorten gradients in place so that all together they have a norm within a bound.

    As ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients. Rows that have no
    gradient add nothing to a norm, so the norm is that of the dense gradients, exactly.

    Args:
        parameters: Whose gradients; those without one are passed over.
        max_norm: What the norm shall not exceed.
        norm_type: The p of the p-norm, ``inf`` for the largest entry.
        error_if_nonfinite: Raise if the norm is not finite, and change nothing.

    Returns:
        The norm as it was.

    Example:
        >>> layer = torch.nn.Embedding(9, 1, sparse=True)
        >>> layer(torch.tensor([4, 7, 4, 7, 4, 7, 4])).sum().backward()
        >>> clip_grad_norm_(layer.parameters(), 1.0)
        tensor(5.)
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    values, p = [_values(p) for p in given if p.grad is not None], float(norm_type)
    # A gradient without rows is zero everywhere; of no numbers there is no largest.
    values = [v for v in values if v.numel()]
    if not values:
        return torch.zeros((), device="cpu")
    norms = [torch.linalg.vector_norm(v, p, dtype=compute_dtype(v.dtype)) for v in values]
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), p)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients must be finite, got {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for part in values:
        # Not in the dtype of half gradients: a rounded factor would be off for all of them.
        part.mul_(factor.to(part.device))
    return total


def _values(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None or not grad.is_sparse:
        return grad  # pyright: ignore
    if not grad.is_coalesced():
        # Of an id that occurs twice the norm is that of the sum.
        parameter.grad = grad = coalesced(grad)
    return grad._values()
