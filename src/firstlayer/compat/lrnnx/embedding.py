"""Token embeddings of lrnnx, with optional learned positions.

The vectors of padding are zero and train nothing, with positions enabled too. In lrnnx a
padding token carries its position vector, whose gradient reaches the position table.
"""

from jaxtyping import Float, Integer
from torch import Tensor, nn

from ..._check import probability
from ...embeddings.layer import mask_rows
from ...torch import Embedding, LearnedPositions
from ...torch._positions.arguments import Offset, Positions


class PositionEmbedding(nn.Module):
    """Look up learned vectors by position.

    Args:
        max_position_embeddings: Number of positions.
        embedding_dim: Width of each vector.

    Shape:
        - positions: integers of any shape; a position of ``max_position_embeddings`` or
          more is a ValueError
        - output: ``(*positions.shape, embedding_dim)``

    Example:
        >>> import torch
        >>> PositionEmbedding(1024, 256)(torch.arange(50)[None]).shape
        torch.Size([1, 50, 256])
    """

    def __init__(self, max_position_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.position_embedding = LearnedPositions(max_position_embeddings, embedding_dim)
        nn.init.normal_(self.position_embedding.weight)

    def forward(
        self, positions: Integer[Tensor, "*seq"]
    ) -> Float[Tensor, "*seq embedding_dim"]:
        return self.position_embedding.encode(positions)


class TokenEmbedding(nn.Module):
    """Token rows plus optional learned positions, zero at padding, then dropout.

    Args:
        vocab_size: Number of ids.
        embedding_dim: Width of each vector.
        padding_idx: Id of padding. Negative values count from the end.
        max_position_embeddings: Number of positions. Required with ``use_position``.
        use_position: Whether to add positions.
        dropout: Probability of dropping an entry during training.

    Shape:
        - token_ids: ``(..., length)`` integers
        - positions: ``(length,)`` or one per id; None is ``0, 1, …`` plus ``offset``. Use
          :func:`firstlayer.positions.from_mask` for left-padded rows.
        - output: ``(..., length, embedding_dim)``

    Example:
        >>> import torch
        >>> embedding = TokenEmbedding(
        ...     100, 8, padding_idx=0, max_position_embeddings=32, use_position=True
        ... )
        >>> embedding(torch.tensor([[5, 6, 0, 0]]))[0, 2:].abs().sum().item()
        0.0
        >>> list(embedding.state_dict())
        ['token_embedding.weight', 'position_embedding.position_embedding.weight']
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_position_embeddings: int | None = None,
        use_position: bool = False,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if use_position and max_position_embeddings is None:
            raise ValueError("use_position needs max_position_embeddings, got None")
        self.vocab_size, self.embedding_dim = vocab_size, embedding_dim
        self.token_embedding = Embedding(vocab_size, embedding_dim, padding_idx)
        self.position_embedding = None
        if use_position and max_position_embeddings is not None:
            self.position_embedding = PositionEmbedding(
                max_position_embeddings, embedding_dim
            )
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def forward(
        self,
        token_ids: Integer[Tensor, "*batch"],
        positions: Positions | None = None,
        *,
        offset: Offset = 0,
    ) -> Float[Tensor, "*batch embedding_dim"]:
        vectors = self.token_embedding(token_ids)
        if self.position_embedding is not None:
            add_positions = self.position_embedding.position_embedding
            vectors = add_positions(vectors, positions, offset=offset)
        if self.padding_idx is not None:
            vectors = mask_rows(vectors, self.token_embedding.mask(token_ids))
        return self.dropout(vectors)

    @property
    def padding_idx(self) -> int | None:
        """Id of padding, counted from the front, or None."""
        return self.token_embedding.padding_idx
