"""Array functions of torch, as the ``ops`` of update rules."""

import torch
from torch import Tensor
from torch import absolute as absolute
from torch import maximum as maximum
from torch import sign as sign
from torch import sqrt as sqrt


def multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return ``x * y + z`` in the memory of ``x``, by one operator instead of two.

    Example:
        >>> multiply_add(torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([4.0]))
        tensor([10.])
    """
    return torch.addcmul(z, x, y, out=x)
