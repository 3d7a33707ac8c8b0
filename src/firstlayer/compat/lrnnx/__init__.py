"""lrnnx's names: token and position embeddings, the LRU, and the classifier over it.

Checkpoints of lrnnx load: parameters have the names and shapes they have there. It runs
wherever torch does; lrnnx itself needs CUDA for everything but its embeddings.
"""

# First, for it says what to install where there is no torch.
from ... import torch as _torch  # noqa: F401
from .classifier import Classifier as Classifier
from .embedding import PositionEmbedding as PositionEmbedding
from .embedding import TokenEmbedding as TokenEmbedding
from .lru import LRU as LRU

__all__ = ["LRU", "Classifier", "PositionEmbedding", "TokenEmbedding"]
