"""Train the model of ``transformer.py`` in JAX, with Equinox's attention projections.

Positions are added to the vectors (learned, sinusoidal), rotate queries and keys (rotary),
or are added to the attention scores (ALiBi, T5). The projections are those of
``eqx.nn.MultiheadAttention``; attention itself is computed by JAX, because Equinox's takes
neither a bias nor a cache. The cache has a fixed length, so one compiled step decodes at
every position.

Run it: ``python examples/transformer_jax.py --positions t5``, optionally with a file.
"""

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from firstlayer.equinox import AlibiBias, EmbeddingLayer, RotaryPositions, T5Bias

SCHEMES = ["learned", "sinusoidal", "rotary", "alibi", "t5", "none"]
LENGTH, BATCH, WIDTH, HEADS, LAYERS, RATE = 64, 16, 64, 4, 2, 3e-3

# Keys and values of LENGTH positions per layer; later positions are still empty.
Cache = list[tuple[Array, Array]]


class Block(eqx.Module):
    """Causal attention and a feed-forward network, each with pre-norm."""

    attention: eqx.nn.MultiheadAttention
    maps: eqx.nn.MLP
    first: eqx.nn.LayerNorm
    second: eqx.nn.LayerNorm

    def __init__(self, *, key: Array) -> None:
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.maps = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=two)
        self.first, self.second = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)

    def __call__(
        self, x: Array, *, rotary: Any, offset: Any, scores: Any, past: Any
    ) -> tuple[Array, tuple[Array, Array]]:
        """Return the vectors, and the cache with the new keys and values written."""
        normed, (bias, mask) = jax.vmap(self.first)(x), scores
        made = self.attention
        q, k, v = (
            jax.vmap(project)(normed).reshape(len(x), HEADS, -1)
            for project in (made.query_proj, made.key_proj, made.value_proj)
        )
        if rotary is not None:
            q, k = rotary(q, offset=offset), rotary(k, offset=offset)
        if past is not None:
            k = jax.lax.dynamic_update_slice_in_dim(past[0], k, offset, axis=0)
            v = jax.lax.dynamic_update_slice_in_dim(past[1], v, offset, axis=0)
        mixed = jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask)
        x = x + jax.vmap(made.output_proj)(mixed.reshape(len(x), -1))
        return x + jax.vmap(self.maps)(jax.vmap(self.second)(x)), (k, v)


class Transformer(eqx.Module):
    """Byte-level language model with the named position scheme."""

    embedding: EmbeddingLayer
    rotary: RotaryPositions | None
    bias: AlibiBias | T5Bias | None
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, scheme: str, *, key: Array) -> None:
        first, second, *others = jax.random.split(key, 2 + LAYERS)
        added = scheme if scheme in ("learned", "sinusoidal") else None
        self.embedding = EmbeddingLayer(
            256,
            WIDTH,
            position=added,
            max_positions=LENGTH if added == "learned" else None,
            scale=True,
            key=first,
        )
        phases = scheme == "rotary"
        self.rotary = RotaryPositions(WIDTH // HEADS, heads_axis=-2) if phases else None
        self.bias = AlibiBias(HEADS) if scheme == "alibi" else None
        if scheme == "t5":
            self.bias = T5Bias(HEADS, bidirectional=False, key=second)
        self.blocks = [Block(key=other) for other in others]
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(
        self, ids: Array, cache: Cache | None = None, *, offset: Any = 0
    ) -> tuple[Array, Cache]:
        """Return the logits of each next byte, and the updated cache."""
        x = self.embedding(ids, offset=offset)
        scores = self.scores(offset, len(ids), LENGTH if cache else len(ids))
        filled = []
        for number, block in enumerate(self.blocks):
            past = cache[number] if cache else None
            x, kept = block(x, rotary=self.rotary, offset=offset, scores=scores, past=past)
            filled.append(kept)
        return self.embedding.logits(jax.vmap(self.norm)(x)), filled

    def scores(self, offset: Any, length: int, keys: int) -> tuple[Any, Array]:
        """Return the position bias and the causal mask."""
        q, k = offset + jnp.arange(length), jnp.arange(keys)
        bias = None if self.bias is None else self.bias(q, k)
        return bias, k <= q[:, None]


def empty_cache() -> Cache:
    """Return an empty cache."""
    empty = jnp.zeros((LENGTH, HEADS, WIDTH // HEADS))
    return [(empty, empty)] * LAYERS


@eqx.filter_jit
def next_byte(model: Transformer, ids: Array, cache: Cache, offset: Any) -> Any:
    """Return the most likely next byte, and the updated cache."""
    logits, cache = model(ids, cache, offset=offset)
    return logits[-1].argmax(), cache


def write(model: Transformer, ids: list[int], count: int) -> list[int]:
    """Return ``ids`` continued greedily, one byte at a time with a cache."""
    cache, new, offset = empty_cache(), ids, 0
    for _ in range(count):
        found, cache = next_byte(model, jnp.asarray(new), cache, np.int32(offset))
        offset, new = offset + len(new), [int(found)]
        ids = ids + new
    return ids


def loss_of(model: Transformer, rows: Array) -> Array:
    """Return the mean cross-entropy on a batch."""
    logits, _ = jax.vmap(model)(rows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    return losses.mean()


def train(model: Transformer, text: np.ndarray, *, steps: int) -> Transformer:
    """Train the model, print the loss, and return the model."""
    rng, optimizer = np.random.default_rng(0), optax.adamw(RATE)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step_of(model: Transformer, state: Any, rows: Array) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, rows)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, loss

    for step in range(1, steps + 1):
        starts = rng.integers(0, len(text) - LENGTH, (BATCH, 1))
        rows = jnp.asarray(text[starts + np.arange(LENGTH + 1)])
        model, state, loss = step_of(model, state, rows)
        if step % 50 == 0 or step == steps:
            print(f"step {step}: {loss:.2f} nats per byte")
    return model


def main(arguments: list[str] | None = None) -> None:
    """Train, then generate text."""
    parser = argparse.ArgumentParser(description="Learn to write, by any position scheme.")
    parser.add_argument("file", nargs="?", help="what to read instead of a Python module")
    parser.add_argument("--positions", choices=SCHEMES, default="rotary")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    path = Path(options.file or Path(sysconfig.get_path("stdlib")) / "argparse.py")
    text = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int32)
    model = Transformer(options.positions, key=jax.random.key(0))
    print(f"{len(text):,} bytes; uniform guessing costs {math.log(256):.2f} nats per byte")
    model = train(model, text, steps=options.steps)
    written = write(model, text[:16].tolist(), LENGTH - 16)
    # Greedy predictions of one forward over the whole text, without a cache.
    whole = eqx.filter_jit(model)(jnp.asarray(written[:-1]))[0].argmax(-1)
    same = whole[15:].tolist() == written[16:]
    print(
        f"generated with a cache, {'equal' if same else 'NOT equal'} to the output without:"
    )
    print(bytes(written).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
