"""A small causal transformer that is the same in everything but how it knows positions.

Imported by :mod:`firstlayer.analysis.positions` when a study begins: it needs PyTorch.

Layers normalise first, token rows begin at the size of a wave (the original Transformer's
√width), and the head is tied to their table. Positions come in as the schemes publish it:
added to the vectors once (learned, sinusoidal), turned into queries and keys in every layer
(rotary), or added to the scores of every layer (the biases, one of them for all layers).
``none`` leaves it to the causal mask.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ..torch import AlibiBias, EmbeddingLayer, FireBias, KerpleBias, RotaryPositions, T5Bias

BYTES = 256
BIASES = {
    "alibi": AlibiBias,
    "fire": FireBias,
    "kerple": KerpleBias,
    "t5": lambda num_heads: T5Bias(num_heads, bidirectional=False),
}


class Block(nn.Module):
    """Attention to what came before, then two linear maps, each after a norm.

    Args:
        width: Of the vectors.
        heads: How many heads share it.
    """

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        *,
        rotary: RotaryPositions | None,
        positions: Int[Tensor, "*batch length"],
        bias: Float[Tensor, "*batch heads length length"] | None,
    ) -> Float[Tensor, "batch length width"]:
        q, k, v = self._heads(self.qkv(self.before_attention(x)))
        if rotary is not None:
            q, k = rotary(q, positions), rotary(k, positions)
        mixed = scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.before_linear(x))))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = qkv.shape
        split = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        return q, k, v


class Transformer(nn.Module):
    """Predicts the next byte.

    Args:
        scheme: How positions are known; one of :data:`firstlayer.analysis.positions.SCHEMES`.
        layers: How many blocks.
        width: Of the vectors.
        heads: How many heads share it.
        length: The longest text it trains on; a learned table has this many rows.

    Shape:
        - ids: ``(batch, length)`` bytes
        - positions: ``(length,)`` or ``(batch, length)``; None is ``0, 1, …``
        - output: ``(batch, length, 256)`` logits
    """

    def __init__(
        self, scheme: str, *, layers: int, width: int, heads: int, length: int
    ) -> None:
        super().__init__()
        self.embedding = EmbeddingLayer(
            BYTES,
            width,
            position=scheme if scheme in ("learned", "sinusoidal") else None,
            max_positions=length if scheme == "learned" else None,
            scale=True,
        )
        phases = scheme in ("rotary", "randomised")
        self.rotary = RotaryPositions(width // heads) if phases else None
        self.bias = BIASES[scheme](heads) if scheme in BIASES else None
        self.blocks = nn.ModuleList(Block(width, heads=heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        positions: Int[Tensor, "*batch length"] | None = None,
        *,
        last: int | None = None,
    ) -> Float[Tensor, "batch last 256"]:
        """Return the logits of the byte after each of the ``last`` ones, None for all."""
        if positions is None:
            positions = torch.arange(ids.shape[-1])
        added = None if self.embedding.position is None else positions
        x = self.embedding(ids, positions=added)
        bias = None if self.bias is None else self._masked(positions)
        for block in self.blocks:
            x = block(x, rotary=self.rotary, positions=positions, bias=bias)
        x = x if last is None else x[:, -last:]
        return self.embedding.logits(self.norm(x))

    def _masked(self, positions: Tensor) -> Tensor:
        if self.bias is None:
            raise ValueError("this model has no bias")
        bias = self.bias(positions, positions)
        length = positions.shape[-1]
        before = torch.ones(length, length, dtype=torch.bool).tril()
        return torch.where(before, bias, float("-inf"))
