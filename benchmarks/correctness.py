"""Errors of common implementations that Firstlayer avoids, each measured in one run."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from firstlayer.numpy import Embedding, RotaryPositions, SinusoidalPositions


@dataclass(frozen=True)
class Comparison:
    """One measurement of Firstlayer and of a peer.

    Args:
        name: Measured quantity.
        peer: Library compared with.
        theirs: Result of the peer, or None if it is not installed.
        ours: Result of Firstlayer.
    """

    name: str
    peer: str
    theirs: str | None
    ours: str

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)


def measured() -> Iterator[Comparison]:
    """Yield every comparison."""
    for function in (
        far_rotation,
        far_sinusoid,
        other_base,
        frequent_id,
        wrong_id,
        training_memory,
    ):
        name, peer, theirs, ours = function()
        yield Comparison(
            name, peer, _or_missing(theirs), _or_missing(ours) or "needs torch"
        )


def _or_missing(measure: Callable[[], str]) -> str | None:
    try:
        return measure()
    except ImportError:
        return None


def far_rotation():
    """Compare cosines and sines at position 1,000,000."""
    far = 1_000_000

    def theirs() -> str:
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(hidden_size=128, num_attention_heads=1)
        cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), torch.tensor([[far]]))
        return _error(_largest_error(cos[0, 0, :64].numpy(), sin[0, 0, :64].numpy(), far))

    def ours() -> str:
        cos, sin = RotaryPositions(128).phases(np.array([far]))
        return _error(_largest_error(cos[0], sin[0], far))

    return (
        "rotary at position 1,000,000: error of cosine and sine",
        "transformers",
        theirs,
        ours,
    )


def far_sinusoid():
    """Count the distinct rows among 4096 sinusoidal positions in bfloat16."""

    def theirs() -> str:
        import torch
        from x_transformers.x_transformers import ScaledSinusoidalEmbedding

        layer = ScaledSinusoidalEmbedding(64, theta=10_000).bfloat16()
        rows = layer(torch.ones(1, 4096, 64, dtype=torch.bfloat16))
        return f"{len(np.unique(rows.detach().float().numpy(), axis=0))} rows"

    def ours() -> str:
        rows = SinusoidalPositions(64).encode(np.arange(4096), dtype="bfloat16")
        return f"{len(np.unique(rows.astype(np.float32), axis=0))} rows"

    return (
        "4096 sinusoidal positions in bfloat16: different rows",
        "x-transformers",
        theirs,
        ours,
    )


def other_base():
    """Compare two rotary layers with different bases in one process."""
    x = np.ones((8, 8), np.float32)

    def theirs() -> str:
        import equinox as eqx
        import jax.numpy as jnp

        first, second = (
            eqx.nn.RotaryPositionalEmbedding(8, theta=theta) for theta in (1e4, 5e5)
        )
        return _difference(
            np.asarray(first(jnp.asarray(x))), np.asarray(second(jnp.asarray(x)))
        )

    def ours() -> str:
        return _difference(RotaryPositions(8)(x), RotaryPositions(8, base=5e5)(x))

    return "a second rotary layer with base 500,000", "equinox", theirs, ours


def frequent_id():
    """Sum the gradient of an id that occurs 4096 times in bfloat16."""

    def theirs() -> str:
        import torch

        layer = torch.nn.Embedding(4, 1, dtype=torch.bfloat16)
        layer(torch.ones(4096, dtype=torch.long)).sum().backward()
        return f"{layer.weight.grad[1].item():g}"  # pyright: ignore

    def ours() -> str:
        y, pull = Embedding(4, 1, dtype=ml_dtypes.bfloat16).vjp(np.ones(4096, int))
        return f"{pull(np.ones_like(y))['weight'].values.item():g}"

    return "gradient of an id that occurs 4096 times in bfloat16", "torch", theirs, ours


def wrong_id():
    """Look up an id out of range."""

    def theirs() -> str:
        import equinox as eqx
        import jax

        layer = eqx.nn.Embedding(5, 2, key=jax.random.key(0))
        same = bool((layer(jax.numpy.array(7)) == layer.weight[4]).all())
        return "the last row" if same else "another row"

    def ours() -> str:
        try:
            Embedding(5, 2)([7])
        except IndexError as error:
            return str(error)
        return "no error"

    return "id 7 of a table of 5", "equinox", theirs, ours


def _largest_error(cos: np.ndarray, sin: np.ndarray, position: int) -> float:
    angle = position * np.longdouble(10_000.0) ** (
        -np.arange(0, 128, 2) / np.longdouble(128)
    )
    return max(np.abs(cos - np.cos(angle)).max(), np.abs(sin - np.sin(angle)).max())


def _error(value: float) -> str:
    return f"{value:.1g}"


def _difference(first: np.ndarray, second: np.ndarray) -> str:
    return f"differs by {np.abs(first - second).max():.2g}"


def training_memory():
    """Measure the peak memory of an AdamW step on a 977 MB table."""

    def measure(who: str) -> str:
        from .optim import memory_of_a_step

        return f"{memory_of_a_step(who):,.0f} MB"

    return (
        "memory of a step on 1,000,000 × 256 (977 MB)",
        "torch AdamW, dense",
        lambda: measure("torch AdamW(fused=True), dense"),
        lambda: measure("ours"),
    )
