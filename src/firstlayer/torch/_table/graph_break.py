"""Reading rows of a store in compiled code, between two graphs."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .stored import read_on_host

if TYPE_CHECKING:
    from .stored import StoredEmbedding

# Any: with its declared type, the decorated function has no arguments.
_not_compiled: Any = torch.compiler.disable


@_not_compiled
def read_between_graphs(layer: "StoredEmbedding", ids: Tensor) -> Tensor:
    """Return the same as :func:`read_on_host`, which is not compiled."""
    return read_on_host(layer, ids)
