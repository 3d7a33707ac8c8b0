"""Small helpers of the tests of torch's lookups."""

import torch
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]


def ids_of(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit, NaN and -0.0 included."""
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(dtype)
