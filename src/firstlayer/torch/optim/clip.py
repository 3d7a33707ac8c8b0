"""Gradient clipping by norm, for sparse and dense gradients."""

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
    """Clip the norm of all gradients together, in place.

    Works as ``torch.nn.utils.clip_grad_norm_`` and also accepts sparse gradients of any
    layer. Rows without a gradient add nothing to a norm, so the norm is that of dense
    gradients.

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
    values, p = [_values(x) for x in parameters if x.grad is not None], float(norm_type)
    # A gradient without rows is zero, and the inf-norm of an empty tensor is an error.
    values = [v for v in values if v.numel()]
    if not values:
        return torch.zeros((), device="cpu")
    norms = [torch.linalg.vector_norm(v, p, dtype=compute_dtype(v.dtype)) for v in values]
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), p)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients must be finite, got {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for part in values:
        # Not rounded to the gradient's dtype: the rounding error would affect every entry.
        part.mul_(factor.to(part.device))
    return total


def _values(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None or not grad.is_sparse:
        return grad  # pyright: ignore
    if not grad.is_coalesced():
        # The norm is that of the sum over repeated ids.
        parameter.grad = grad = coalesced(grad)
    return grad._values()
