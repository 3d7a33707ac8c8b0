"""The embedding layer of a transformers checkpoint as torch tensors."""

import os

from torch import Tensor

from ..files.hf_embeddings import Options, read_embedding_checkpoint
from ._tensors.memory import tensor_of


def embedding_tensors(
    checkpoint_dir: str | os.PathLike[str],
) -> tuple[Options, Options | None, dict[str, Tensor]]:
    """Return the options of the layer, those of its learned positions, and its tensors.

    The tensors are memory-mapped. Writing to them does not change the file.

    Args:
        checkpoint_dir: Folder of the checkpoint.
    """
    found = read_embedding_checkpoint(checkpoint_dir)
    tensors = {name: tensor_of(array) for name, array in found.arrays.items()}
    return found.options, found.position, tensors
