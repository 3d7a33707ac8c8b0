"""Drop-in API of lrnnx: token and position embeddings, the LRU, the sequence classifier.

Parameters have lrnnx's names and shapes, so its checkpoints load. Runs on every torch
device; lrnnx itself needs CUDA for everything except its embeddings.
"""

# Imported first: raises the error that names the package to install without torch.
from ... import torch as _torch  # noqa: F401
from .classifier import Classifier as Classifier
from .embedding import PositionEmbedding as PositionEmbedding
from .embedding import TokenEmbedding as TokenEmbedding
from .lru import LRU as LRU

__all__ = ["LRU", "Classifier", "PositionEmbedding", "TokenEmbedding"]
