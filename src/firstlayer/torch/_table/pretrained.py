"""Tables of ``from_pretrained``: tensors, or files with vectors."""

import os
from typing import Any

import torch
from torch import Tensor


def table_tensor(embeddings: Tensor | str | os.PathLike[str]) -> Any:
    """Return a tensor as it is, or the table in a file as a float32 tensor."""
    if isinstance(embeddings, str | os.PathLike):
        from ...vector_files.reading import read_rows

        return torch.from_numpy(read_rows(embeddings))
    return embeddings
