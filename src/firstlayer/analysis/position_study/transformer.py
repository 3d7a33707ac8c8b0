"""A small causal transformer, the same for every position scheme. Needs PyTorch.

Blocks are pre-norm, token rows are scaled by √width as in the original Transformer, and the
head is tied to the token table. Positions enter as each scheme was published: added to the
vectors once (learned, sinusoidal), rotating queries and keys in every block (rotary, xpos),
or added to the scores of every block (biases, shared by all blocks). With ``none``, only
the causal mask carries positions.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ...torch import (
    AlibiBias,
    EmbeddingLayer,
    FireBias,
    KerpleBias,
    RotaryPositions,
    T5Bias,
    XPosRotary,
)

BYTES = 256
BIASES = {
    "alibi": AlibiBias,
    "fire": FireBias,
    "kerple": KerpleBias,
    "t5": lambda num_heads: T5Bias(num_heads, bidirectional=False),
}
ROTARY = {
    "rotary": RotaryPositions,
    "randomised": RotaryPositions,
    "xpos": XPosRotary,
}


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each after a norm.

    Args:
        width: Width of the vectors.
        heads: Number of heads.
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
        rotary: RotaryPositions | XPosRotary | None,
        positions: Int[Tensor, "*batch length"],
        bias: Float[Tensor, "*batch heads length length"] | None,
    ) -> Float[Tensor, "batch length width"]:
        q, k, v = self._heads(self.qkv(self.before_attention(x)))
        if isinstance(rotary, XPosRotary):
            q, k = rotary(q, positions), rotary(k, positions, keys=True)
        elif rotary is not None:
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
    """Model that predicts the next byte.

    Args:
        scheme: One of :data:`firstlayer.analysis.position_study.SCHEMES`.
        layers: Number of blocks.
        width: Width of the vectors.
        heads: Number of heads.
        length: Training length; the number of rows of a learned table.

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
        self.rotary = None
        if scheme in ROTARY:
            self.rotary = ROTARY[scheme](width // heads)
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
        """Return the logits of the byte after each of the ``last`` ids; None is all ids."""
        if positions is None:
            positions = torch.arange(ids.shape[-1])
        has_added = self.embedding.position is not None
        x = self.embedding(ids, positions=positions if has_added else None)
        bias = None if self.bias is None else self._causal_bias(positions)
        for block in self.blocks:
            x = block(x, rotary=self.rotary, positions=positions, bias=bias)
        x = x if last is None else x[:, -last:]
        return self.embedding.logits(self.norm(x))

    def _causal_bias(self, positions: Tensor) -> Tensor:
        if self.bias is None:
            raise ValueError("this model has no bias")
        bias = self.bias(positions, positions)
        length = positions.shape[-1]
        is_visible = torch.ones(length, length, dtype=torch.bool).tril()
        return torch.where(is_visible, bias, float("-inf"))
