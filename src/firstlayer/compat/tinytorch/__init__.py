"""Drop-in API of TinyTorch on torch tensors, with gradients in every configuration.

In TinyTorch the position table gets no gradient, and with scaling, sinusoids or unbatched
input neither does the token table. Ids are integers here: TinyTorch stores them as float32,
which cannot represent 16,777,217.
"""

# Imported first: raises the error that names the package to install without torch.
from ... import torch as _torch  # noqa: F401
from .analysis import analyze_embedding_memory_scaling as analyze_embedding_memory_scaling
from .analysis import analyze_embedding_performance as analyze_embedding_performance
from .analysis import (
    analyze_positional_encoding_strategies as analyze_positional_encoding_strategies,
)
from .layers import Embedding as Embedding
from .layers import EmbeddingLayer as EmbeddingLayer
from .layers import PositionalEncoding as PositionalEncoding
from .layers import create_sinusoidal_embeddings as create_sinusoidal_embeddings
from .tensor import Tensor as Tensor

__all__ = [
    "Embedding",
    "EmbeddingLayer",
    "PositionalEncoding",
    "Tensor",
    "analyze_embedding_memory_scaling",
    "analyze_embedding_performance",
    "analyze_positional_encoding_strategies",
    "create_sinusoidal_embeddings",
]
