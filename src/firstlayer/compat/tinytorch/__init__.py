"""TinyTorch's names, on torch tensors: every parameter learns, in every configuration.

In TinyTorch the position table never trains, and scaling, sinusoids and a sequence without
a batch axis cut the token table off too. Here they are torch's own operations, and ids are
integers: as float32, which TinyTorch keeps them in, 16,777,217 would be another id.
"""

# First, for it says what to install where there is no torch.
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
