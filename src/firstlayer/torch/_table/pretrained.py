"""Tables of ``from_pretrained``: tensors, or files with vectors."""

import os
from typing import Any

import torch
from torch import Tensor

from .._tensors.errors import WrongType, WrongValue


def table_tensor(embeddings: Tensor | str | os.PathLike[str]) -> Any:
    """Return a table as it is, or the one in a file as a float32 tensor."""
    if isinstance(embeddings, str | os.PathLike):
        from ...vector_files.reading import read_rows

        return torch.from_numpy(read_rows(embeddings))
    if not isinstance(embeddings, Tensor):
        name = type(embeddings).__name__
        raise WrongType(f"embeddings must be a tensor or a path, got {name}")
    if embeddings.dim() != 2:
        shape = tuple(embeddings.shape)
        raise WrongValue(f"embeddings must be 2-dimensional, got shape {shape}")
    return embeddings
