"""Embedding layers of TinyTorch: plain objects with ``forward`` and ``parameters``."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float

from ..._check import ids_in_range, positive
from ...embeddings.layer import add_embeddings
from ...torch import SinusoidalPositions
from ...torch.functional import embedding
from .tensor import Tensor

PosEncoding = Literal["learned", "sinusoidal"] | None


class OutOfRange(IndexError, ValueError):
    """Id out of range: an IndexError as in Firstlayer, a ValueError as in TinyTorch."""


class Embedding:
    """Look up rows of a learned table by id.

    Args:
        vocab_size: Number of ids.
        embed_dim: Width of each row.

    Shape:
        - indices: integers of any shape; an error names the first one out of range
        - output: ``(*indices.shape, embed_dim)``

    The table is drawn uniformly from ±√(6 / (vocab_size + embed_dim)).

    Example:
        >>> embed = Embedding(vocab_size=100, embed_dim=64)
        >>> embed(Tensor([[1, 2, 3], [4, 5, 6]])).shape
        torch.Size([2, 3, 64])
    """

    def __init__(self, vocab_size: int, embed_dim: int) -> None:
        self.vocab_size = positive("vocab_size", vocab_size)
        self.embed_dim = positive("embed_dim", embed_dim)
        self.weight = _drawn(_token_limit(vocab_size, embed_dim), vocab_size, embed_dim)

    def forward(self, indices: Any) -> Tensor:
        """Return the rows of ``indices``."""
        return _as_tensor(embedding(_checked(indices, self.vocab_size), self.weight))

    def __call__(self, indices: Any) -> Tensor:
        return self.forward(indices)

    def parameters(self) -> list[Tensor]:
        """Return the trained tensors."""
        return [self.weight]

    def __repr__(self) -> str:
        return f"Embedding(vocab_size={self.vocab_size}, embed_dim={self.embed_dim})"


class PositionalEncoding:
    """Add a learned position row to each vector.

    Args:
        max_seq_len: Number of positions.
        embed_dim: Width of each vector.
        limit: Rows are drawn uniformly from ±``limit``; √(2 / embed_dim) if None.

    Shape:
        - x: ``(batch, length, embed_dim)``
        - output: as ``x``

    Example:
        >>> PositionalEncoding(512, 64)(torch.zeros(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self, max_seq_len: int, embed_dim: int, *, limit: float | None = None
    ) -> None:
        self.max_seq_len = positive("max_seq_len", max_seq_len)
        self.embed_dim = positive("embed_dim", embed_dim)
        limit = _position_limit(embed_dim) if limit is None else limit
        self.position_embeddings = _drawn(limit, max_seq_len, embed_dim)

    def forward(
        self, x: Float[torch.Tensor, "batch length embed_dim"], start_pos: int = 0
    ) -> Tensor:
        """Return ``x`` plus its position rows, starting at ``start_pos``."""
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            want = f"(batch, seq, {self.embed_dim})"
            raise ValueError(f"x must have shape {want}, got {tuple(x.shape)}")
        end = start_pos + x.shape[1]
        if start_pos < 0 or end > self.max_seq_len:
            raise ValueError(
                f"positions must be within max_seq_len {self.max_seq_len}, "
                f"got {start_pos} to {end - 1}"
            )
        return _as_tensor(x + self.position_embeddings[start_pos:end])

    def __call__(self, x: Any, start_pos: int = 0) -> Tensor:
        return self.forward(x, start_pos)

    def parameters(self) -> list[Tensor]:
        """Return the trained tensors."""
        return [self.position_embeddings]

    def __repr__(self) -> str:
        return (
            f"PositionalEncoding(max_seq_len={self.max_seq_len}, "
            f"embed_dim={self.embed_dim})"
        )


def create_sinusoidal_embeddings(max_seq_len: int, embed_dim: int) -> Tensor:
    """Return sines (even columns) and cosines (odd columns) of the first positions.

    An odd ``embed_dim`` ends with a sine. The absolute error is at most 2.5e-7.

    Args:
        max_seq_len: Number of positions.
        embed_dim: Width of each row.

    Example:
        >>> create_sinusoidal_embeddings(2, 4).data.round(4).tolist()[0]
        [0.0, 1.0, 0.0, 1.0]
    """
    positions = range(positive("max_seq_len", max_seq_len))
    return _as_tensor(SinusoidalPositions(embed_dim).encode(positions))


class EmbeddingLayer:
    """Token rows, optionally scaled, plus learned or sinusoidal positions.

    Args:
        vocab_size: Number of ids.
        embed_dim: Width of each vector.
        max_seq_len: Number of learned positions. Sinusoidal positions are unlimited.
        pos_encoding: ``"learned"``, ``"sinusoidal"`` or None. The attribute of this name is
            a :class:`PositionalEncoding`, a Tensor with the first ``max_seq_len``
            sinusoids, or None.
        scale_embeddings: Multiply token rows, not positions, by √embed_dim.

    Shape:
        - tokens: ``(length,)``, ``(batch, length)`` or more axes
        - output: ``(*tokens.shape, embed_dim)``

    Learned positions are drawn from at most half the range of the token rows.

    Example:
        >>> layer = EmbeddingLayer(50_000, 512, max_seq_len=2048, pos_encoding="learned")
        >>> layer(Tensor([[1, 2, 3], [4, 5, 6]])).shape
        torch.Size([2, 3, 512])
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        max_seq_len: int = 512,
        pos_encoding: PosEncoding = "learned",
        scale_embeddings: bool = False,
    ) -> None:
        if pos_encoding not in ("learned", "sinusoidal", None):
            rule = "'learned', 'sinusoidal' or None"
            raise ValueError(f"pos_encoding must be {rule}, got {pos_encoding!r}")
        self.vocab_size, self.embed_dim = vocab_size, embed_dim
        self.max_seq_len = positive("max_seq_len", max_seq_len)
        self.pos_encoding_type: PosEncoding = pos_encoding
        self.scale_embeddings = scale_embeddings
        self.token_embedding = Embedding(vocab_size, embed_dim)
        self.pos_encoding: PositionalEncoding | Tensor | None = None
        if pos_encoding == "learned":
            tokens = _token_limit(vocab_size, embed_dim)
            tokens *= math.sqrt(embed_dim) if scale_embeddings else 1.0
            limit = min(_position_limit(embed_dim), tokens / 2)
            self.pos_encoding = PositionalEncoding(max_seq_len, embed_dim, limit=limit)
        elif pos_encoding == "sinusoidal":
            self.pos_encoding = create_sinusoidal_embeddings(max_seq_len, embed_dim)

    def forward(self, tokens: Any, start_pos: int = 0) -> Tensor:
        """Return the vectors of ``tokens``, with positions starting at ``start_pos``."""
        rows = add_embeddings(self.token_embedding(tokens), scale=self.scale_embeddings)
        if self.pos_encoding is None:
            return rows
        if isinstance(self.pos_encoding, Tensor):
            end = start_pos + rows.shape[-2]
            if 0 <= start_pos and end <= self.max_seq_len:
                return _as_tensor(rows + self.pos_encoding[start_pos:end])
            return _as_tensor(SinusoidalPositions(self.embed_dim)(rows, offset=start_pos))
        batched = rows.reshape(-1, *rows.shape[-2:])
        return _as_tensor(self.pos_encoding(batched, start_pos).reshape(rows.shape))

    def __call__(self, tokens: Any, start_pos: int = 0) -> Tensor:
        return self.forward(tokens, start_pos)

    def parameters(self) -> list[Tensor]:
        """Return the trained tensors: the token table and a learned position table."""
        found = self.token_embedding.parameters()
        if isinstance(self.pos_encoding, PositionalEncoding):
            found += self.pos_encoding.parameters()
        return found

    def __repr__(self) -> str:
        return (
            f"EmbeddingLayer(vocab_size={self.vocab_size}, embed_dim={self.embed_dim}, "
            f"pos_encoding={self.pos_encoding_type!r})"
        )


def _token_limit(vocab_size: int, embed_dim: int) -> float:
    return math.sqrt(6.0 / (vocab_size + embed_dim))


def _position_limit(embed_dim: int) -> float:
    return math.sqrt(2.0 / embed_dim)


def _drawn(limit: float, *shape: int) -> Tensor:
    return Tensor(torch.empty(shape).uniform_(-limit, limit), requires_grad=True)


def _as_tensor(x: torch.Tensor) -> Tensor:
    return x.as_subclass(Tensor)


def _checked(indices: Any, vocab_size: int) -> torch.Tensor:
    """Return indices as int64, or raise an error that names the first one out of range."""
    if isinstance(indices, torch.Tensor):
        indices = indices.detach().numpy()
    try:
        found = ids_in_range(indices, vocab_size, name="indices", bound="vocab_size")
    except IndexError as error:
        raise OutOfRange(*error.args) from None
    return torch.from_numpy(found)
