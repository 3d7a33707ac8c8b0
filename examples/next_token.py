"""Predict the next token with NumPy alone: lookup, positions and a tied head.

Reads the source of a standard-library module, gives every word an id, and trains token and
position tables so that a distance-weighted average of the previous words predicts the next
one. Run it: ``python examples/next_token.py``.
"""

import inspect
import re
from typing import Any

import numpy as np

from firstlayer.numpy import AlibiBias, EmbeddingLayer

LENGTH, STEPS, RATE = 32, 90, 4.0


def read_words() -> tuple[list[str], np.ndarray]:
    """Return the words of a module's source, and the text as ids."""
    import argparse

    text = re.findall(r"\w+|[^\w\s]", inspect.getsource(argparse))
    words = sorted(set(text))
    number = {word: index for index, word in enumerate(words)}
    return words, np.array([number[word] for word in text])


def attention() -> np.ndarray:
    """Return causal attention weights that decay with distance."""
    positions = np.arange(LENGTH)
    scores = AlibiBias(1, max_bias=1.0).bias(positions, positions)[0]
    scores[positions[None, :] > positions[:, None]] = -np.inf
    weights = np.exp(scores)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_loss(logits: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean cross-entropy and its gradient."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    chance = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    picked = np.take_along_axis(chance, target[..., None], axis=-1)
    np.put_along_axis(chance, target[..., None], picked - 1, axis=-1)
    return float(-np.log(picked).mean()), chance / target.size


def step(layer: EmbeddingLayer, look: np.ndarray, batch: np.ndarray) -> float:
    """Take one gradient step on a batch and return the loss."""
    ids, target = batch[:, :-1], batch[:, 1:]
    vectors, pull = layer.vjp(ids)
    mixed = look @ vectors
    logits, pull_head = layer.token.logits_vjp(mixed)
    loss, dlogits = softmax_loss(logits, target)
    head: dict[str, Any] = pull_head(dlogits)
    gradients = pull(look.T @ head["x"])
    # The tied head gives every row a gradient; the lookup only the rows it read.
    layer.token.weight -= RATE * head["weight"]
    for name, table in layer.parameters().items():
        table[gradients[name].ids] -= RATE * gradients[name].values
    return loss


def main() -> None:
    """Train, and print the loss."""
    rng = np.random.default_rng(0)
    words, text = read_words()
    layer = EmbeddingLayer(len(words), 64, max_positions=LENGTH, rng=rng)
    look = attention()
    print(
        f"{len(text):,} tokens of {len(words):,} words, {np.log(len(words)):.2f} nats each"
    )
    for number in range(1, STEPS + 1):
        starts = rng.integers(0, len(text) - LENGTH - 1, 32)
        loss = step(layer, look, text[starts[:, None] + np.arange(LENGTH + 1)])
        if number % 30 == 0:
            print(f"step {number}: {loss:.2f} nats per token")


if __name__ == "__main__":
    main()
