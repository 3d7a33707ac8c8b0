"""What the layers promise that others do not keep, measured here and there in one run."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from firstlayer.numpy import Embedding, RotaryPositions, SinusoidalPositions


@dataclass(frozen=True)
class Promise:
    """One measurement: what, by whom, and what they and we get.

    Args:
        name: What is measured.
        peer: Whose layer ours is held against.
        theirs: What it gives, None where it is not installed.
        ours: What ours gives.
    """

    name: str
    peer: str
    theirs: str | None
    ours: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def measured() -> Iterator[Promise]:
    """Yield every measurement."""
    for function in (
        far_rotation,
        far_sinusoid,
        other_base,
        frequent_id,
        wrong_id,
        padding,
        training_memory,
    ):
        name, peer, theirs, ours = function()
        yield Promise(name, peer, _or_missing(theirs), _or_missing(ours) or "needs torch")


def _or_missing(measure: Callable[[], str]) -> str | None:
    try:
        return measure()
    except ImportError:
        return None


def far_rotation():
    """Rotate the first pair of features to position 1,000,000."""
    far = 1_000_000

    def theirs() -> str:
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(hidden_size=128, num_attention_heads=1)
        cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), torch.tensor([[far]]))
        return _error(_worst_turn(cos[0, 0, :64].numpy(), sin[0, 0, :64].numpy(), far))

    def ours() -> str:
        cos, sin = RotaryPositions(128).phases(np.array([far]))
        return _error(_worst_turn(cos[0], sin[0], far))

    return (
        "rotary at position 1,000,000: error of cosine and sine",
        "transformers",
        theirs,
        ours,
    )


def far_sinusoid():
    """Make 4096 sinusoidal rows for a bfloat16 model and count how many differ."""

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
    """Make a second rotary layer with another base beside the first."""
    x = np.ones((8, 8), np.float32)

    def theirs() -> str:
        import equinox as eqx
        import jax.numpy as jnp

        first, second = (
            eqx.nn.RotaryPositionalEmbedding(8, theta=theta) for theta in (1e4, 5e5)
        )
        return _moved(np.asarray(first(jnp.asarray(x))), np.asarray(second(jnp.asarray(x))))

    def ours() -> str:
        return _moved(RotaryPositions(8)(x), RotaryPositions(8, base=5e5)(x))

    return "a second rotary layer with base 500,000", "equinox", theirs, ours


def frequent_id():
    """Look one id up 3000 times in bfloat16 and sum its gradient of ones."""

    def theirs() -> str:
        import torch

        layer = torch.nn.Embedding(4, 1, dtype=torch.bfloat16)
        layer(torch.ones(3000, dtype=torch.long)).sum().backward()
        return f"{layer.weight.grad[1].item():g}"  # pyright: ignore

    def ours() -> str:
        y, pull = Embedding(4, 1, dtype=ml_dtypes.bfloat16).vjp(np.ones(3000, int))
        return f"{pull(np.ones_like(y))['weight'].values.item():g}"

    return "gradient of an id seen 3000 times in bfloat16", "torch", theirs, ours


def wrong_id():
    """Look up an id that is not there."""

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


def padding():
    """Draw every row again after construction, as a model's own init does."""

    def theirs() -> str:
        import torch

        layer = torch.nn.Embedding(5, 64, padding_idx=0)
        torch.nn.init.normal_(layer.weight)
        return f"norm {layer(torch.tensor(0)).norm().item():.2g}"

    def ours() -> str:
        layer = Embedding(5, 64, padding_idx=0)
        layer.weight[...] = np.random.default_rng(0).standard_normal((5, 64))
        return f"norm {np.linalg.norm(layer(0)):.2g}"

    return "padding row after the table is drawn again", "torch", theirs, ours


def _worst_turn(cos: np.ndarray, sin: np.ndarray, position: int) -> float:
    angle = position * np.longdouble(10_000.0) ** (
        -np.arange(0, 128, 2) / np.longdouble(128)
    )
    return max(np.abs(cos - np.cos(angle)).max(), np.abs(sin - np.sin(angle)).max())


def _error(value: float) -> str:
    return f"{value:.1g}"


def _moved(first: np.ndarray, second: np.ndarray) -> str:
    return f"differs by {np.abs(first - second).max():.2g}"


def training_memory():
    """Train a table of nearly a gigabyte with AdamW on 32 × 128 ids a step."""

    def measure(who: str) -> str:
        from .optim import memory_of_a_step

        return f"{memory_of_a_step(who):,.0f} MB"

    return (
        "memory of a step on 1,000,000 × 256 (977 MB)",
        "torch AdamW, dense",
        lambda: measure("torch AdamW(fused=True), dense"),
        lambda: measure("ours"),
    )
