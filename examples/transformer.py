"""Train a byte-level transformer on Python source, with a position scheme of your choice.

Positions are added to the vectors (learned, sinusoidal), rotate queries and keys (rotary),
or are added to the attention scores (ALiBi, T5); the rest of the model is the same. The
model then generates text with a KV cache: each new token is embedded alone, with its
offset.

Run it: ``python examples/transformer.py --positions alibi``, optionally with a file.
"""

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from firstlayer.torch import AlibiBias, EmbeddingLayer, RotaryPositions, T5Bias

SCHEMES = ["learned", "sinusoidal", "rotary", "alibi", "t5", "none"]
LENGTH, BATCH, WIDTH, HEADS, LAYERS, RATE = 64, 16, 64, 4, 2, 3e-3

# Keys and values of every previous token, per layer.
Cache = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Causal attention and a feed-forward network, each with pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(
        self, x: Tensor, *, rotary: Any, offset: int, bias: Tensor, past: Any
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the vectors, and the keys and values appended to the cache."""
        batch, length, _ = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if rotary is not None:
            q, k = rotary(q, offset=offset), rotary(k, offset=offset)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mixed = scaled_dot_product_attention(q, k, v, bias)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.second(x)))), (k, v)


class Transformer(nn.Module):
    """Byte-level language model with the named position scheme."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        added = scheme if scheme in ("learned", "sinusoidal") else None
        self.embedding = EmbeddingLayer(
            256,
            WIDTH,
            position=added,
            max_positions=LENGTH if added == "learned" else None,
            scale=True,
        )
        self.rotary = RotaryPositions(WIDTH // HEADS) if scheme == "rotary" else None
        biases = {"alibi": AlibiBias, "t5": lambda n: T5Bias(n, bidirectional=False)}
        self.bias = biases[scheme](HEADS) if scheme in biases else None
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return the logits of each next byte, and the updated cache."""
        offset = cache[0][0].shape[2] if cache else 0
        x = self.embedding(ids, offset=offset)
        bias, filled = self.scores(offset, ids.shape[1]), []
        for number, block in enumerate(self.blocks):
            past = cache[number] if cache else None
            x, kept = block(x, rotary=self.rotary, offset=offset, bias=bias, past=past)
            filled.append(kept)
        return self.embedding.logits(self.norm(x)), filled

    def scores(self, offset: int, length: int) -> Tensor:
        """Return the additive attention mask: causal mask plus position bias."""
        q, k = torch.arange(offset, offset + length), torch.arange(offset + length)
        bias = torch.zeros(length, offset + length)
        if self.bias is not None:
            bias = self.bias(q, k)
        return bias.masked_fill(k > q[:, None], -torch.inf)


@torch.no_grad()
def write(model: Transformer, ids: Tensor, count: int, *, cached: bool = True) -> Tensor:
    """Return ``ids`` continued greedily, one byte at a time."""
    cache, new = None, ids
    for _ in range(count):
        logits, found = model(new if cached else ids, cache)
        new = logits[:, -1:].argmax(-1)
        cache, ids = found if cached else None, torch.cat([ids, new], dim=1)
    return ids


def read_ids(file: str | None) -> Tensor:
    """Return the bytes of a file as ids."""
    path = Path(file or Path(sysconfig.get_path("stdlib")) / "argparse.py")
    return torch.tensor(list(path.read_bytes()))


def train(model: Transformer, text: Tensor, *, steps: int) -> None:
    """Train, and print the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(text) - LENGTH, (BATCH, 1))
        rows = text[starts + torch.arange(LENGTH + 1)]
        logits, _ = model(rows[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: {float(loss.detach()):.2f} nats per byte")


def main(arguments: list[str] | None = None) -> None:
    """Train, then generate text."""
    parser = argparse.ArgumentParser(description="Learn to write, by any position scheme.")
    parser.add_argument("file", nargs="?", help="what to read instead of a Python module")
    parser.add_argument("--positions", choices=SCHEMES, default="rotary")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    text, model = read_ids(options.file), Transformer(options.positions)
    print(f"{len(text):,} bytes; uniform guessing costs {math.log(256):.2f} nats per byte")
    train(model, text, steps=options.steps)
    written = write(model.eval(), text[None, :16], LENGTH - 16)
    same = torch.equal(written, write(model, text[None, :16], LENGTH - 16, cached=False))
    print(
        f"generated with a cache, {'equal' if same else 'NOT equal'} to the output without:"
    )
    print(bytes(written[0].tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
