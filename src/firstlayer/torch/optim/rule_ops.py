"""Array functions of torch that change rows in place, as the ``ops`` of update rules.

Gathered rows are private copies, and an operator that allocates its result takes up to
twice as long on the CPU. :class:`firstlayer.optim.rule.ArrayOps` of ``torch`` has the
same functions without changing their arguments.
"""

import torch
from torch import Tensor
from torch import absolute as absolute
from torch import maximum as maximum
from torch import mean as mean
from torch import sign as sign
from torch import sqrt as sqrt

from ...optim.rule import ArrayOps

where = ArrayOps(torch).where


def multiply(x: Tensor, y: Tensor | float) -> Tensor:
    """Return ``x * y`` in the memory of ``x``."""
    return x.mul_(y)


def multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return ``x * y + z`` in the memory of ``x``.

    Example:
        >>> multiply_add(torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([4.0]))
        tensor([10.])
    """
    return torch.addcmul(z, x, y, out=x)


def lerp(x: Tensor, y: Tensor, share: float) -> Tensor:
    """Return ``x``, moved towards ``y`` by a share of their difference."""
    return x.lerp_(y, share)


def addcmul(x: Tensor, y: Tensor, z: Tensor, factor: float) -> Tensor:
    """Return ``x + factor * y * z`` in the memory of ``x``."""
    return x.addcmul_(y, z, value=factor)


def addcdiv(x: Tensor, y: Tensor, z: Tensor, factor: float) -> Tensor:
    """Return ``x + factor * y / z`` in the memory of ``x``."""
    return x.addcdiv_(y, z, value=factor)
