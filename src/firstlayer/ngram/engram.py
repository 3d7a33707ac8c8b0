"""Engram's hash: DeepSeek's demo and V4.1, and MaxText's in 32 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from .._check import boolean, integer, integers, not_negative, positive
from .arguments import at_least, below, distinct, integer_tuple, set_argument
from .hashing import Hashing, Layout
from .primes import next_prime
from .scheme import Scheme, define

#: Added to the seed for each layer.
_LAYER_SEED = 10007


@dataclass(frozen=True, kw_only=True, eq=False)
class Engram(Scheme):
    """Rows of Engram: DeepSeek's demo, DeepSeek-V4.1, and MaxText with ``bits=32``.

    Ids are replaced by canonical ids. For each n from 2 to ``order``, the last n of them
    are multiplied by odd numbers, combined by xor, and reduced modulo ``heads`` primes.
    Ids before the start, in another document or before a dead id read the canonical id of
    ``pad``; at a dead id all of them do.

    NumPy's generator draws the multipliers. The layout of DeepSeek-V4.1 is pinned by a
    test: NumPy may change the numbers that a seed gives.

    Args:
        order: Number of ids in the longest n-gram.
        heads: Number of rows for each n.
        base: Lower bound of the primes, or a list of one for each n.
        layers: Layers with a table. Order matters: no two columns have the same prime.
        canonical: Canonical id of each id, as :func:`canonical_ids` returns them.
        pad: Id whose canonical id is read in place of an id that is not there.
        seed: Seed of the multipliers, together with the layer.
        bits: 64, or 32 for MaxText's multipliers and arithmetic, which give other rows.
        hash_negative: Hash negative ids as they are, as the demo and MaxText do. By default
            they are dead.

    Example:
        >>> scheme = Engram(
        ...     order=3, heads=2, base=100, layers=(1, 5), canonical=np.arange(50), pad=2
        ... )
        >>> scheme.layout(5).sizes, scheme.layout(5).rows
        ((113, 127, 131, 137), 508)
        >>> scheme([[7, 8, 9]], layer=5).shape
        (1, 3, 4)
        >>> history = scheme.advance(None, [[7, 8]])
        >>> one_step = scheme([[9]], layer=5, history=history)
        >>> bool((one_step == scheme([[7, 8, 9]], layer=5)[:, 2:]).all())
        True
    """

    order: int = 4
    heads: int = 8
    base: int | Sequence[int] = 16_000_000
    layers: Sequence[int] = (1, 14)
    canonical: Int[np.ndarray, " vocab"]
    pad: int = 2
    seed: int = 0
    bits: int = 64
    hash_negative: bool = False

    def __post_init__(self) -> None:
        order, heads = at_least("order", self.order, 2), positive("heads", self.heads)
        if isinstance(self.base, int | np.integer):
            set_argument(self, "base", at_least("base", self.base, 2))
            bases = (int(self.base),) * (order - 1)
        else:
            bases = integer_tuple("base", self.base, at_least=2)
            set_argument(self, "base", bases)
        if len(bases) != order - 1:
            raise ValueError(
                f"base must have {order - 1} entries for order {order}, got {len(bases)}"
            )
        layers = distinct("layers", integer_tuple("layers", self.layers, at_least=0))
        if integer("bits", self.bits) not in (32, 64):
            raise ValueError(f"bits must be 32 or 64, got {self.bits}")
        set_argument(self, "hash_negative", boolean("hash_negative", self.hash_negative))
        set_argument(self, "layers", layers)
        numbers = _checked_map(self.canonical)
        set_argument(self, "canonical", numbers.view())
        self.canonical.setflags(write=False)
        below("pad", self.pad, numbers.size, of="the number of canonical ids")
        not_negative("seed", self.seed)
        hashing = Hashing(
            span=order,
            bound=("the number of canonical ids", numbers.size),
            fill=int(numbers[self.pad]),
            negative="hashed" if self.hash_negative else "dead",
            # Not ``canonical``, which is read-only: torch warns about such arrays.
            numbers=numbers,
            heads=heads,
            dtype=f"int{self.bits}",
        )
        define(self, self._tables(order, heads, bases, layers), hashing)

    def _tables(
        self, order: int, heads: int, bases: tuple[int, ...], layers: tuple[int, ...]
    ) -> dict[int | None, Layout]:
        size, seen, layouts = int(self.canonical.max()) + 1, set(), {}
        dtype = np.int32 if self.bits == 32 else np.int64
        half = max(1, (int(np.iinfo(dtype).max) // size) // 2)
        for layer in layers:
            sizes = []
            for base in bases:
                prime = base - 1
                for _ in range(heads):
                    prime = next_prime(prime)
                    while prime in seen:
                        prime = next_prime(prime)
                    seen.add(prime)
                    sizes.append(prime)
            if max(sizes) > np.iinfo(dtype).max:
                raise ValueError(
                    f"base must give primes of {self.bits} bits, got {max(bases)}"
                )
            rng = np.random.default_rng(self.seed + _LAYER_SEED * layer)
            draws = rng.integers(0, half, order, dtype=dtype).tolist()
            layouts[layer] = Layout.of(sizes, [2 * draw + 1 for draw in draws])
        return layouts


def _checked_map(canonical: Any) -> np.ndarray:
    """Return a copy of a map to canonical ids, which are 0 to some number, all used."""
    canonical = integers(canonical, name="canonical").astype(np.int64, copy=True)
    if canonical.ndim != 1 or not canonical.size:
        raise ValueError(
            f"canonical must have one entry for each id, got shape {canonical.shape}"
        )
    if canonical.min() != 0 or np.unique(canonical).size != canonical.max() + 1:
        raise ValueError(
            "canonical must have each number from 0 to its largest, "
            f"got {np.unique(canonical).size} numbers from {canonical.min()} "
            f"to {canonical.max()}"
        )
    return canonical
