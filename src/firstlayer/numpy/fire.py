"""FIRE on NumPy: a small network's bias for the share of the way back to a key."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import float_dtype, number, positive, positive_number
from ..embeddings.init import Seed, initial_table, uniform
from ..positions.fire import fire_bias, fire_share
from ..positions.t5 import distances
from ._bias import Bias, KPositions, QPositions, checked_pair, gradient_like
from ._module import upcast

NETWORK = ("hidden_weight", "hidden_bias", "head_weight", "head_bias")


class FireBias(Bias):
    """Adds a learned function of relative distance to the score of every query and key.

    Args:
        num_heads: Outputs of the network. Positive.
        width: Hidden units of the network. Positive.
        c: What the parameter ``c`` begins with: how strongly far distances are drawn
            together.
        threshold: Query positions below this, times the parameter ``multiplier``, count as
            this. Positive.
        eps: Keeps a denominator from zero. Positive.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: A seed or a generator for the network, drawn as torch draws its linear layers.

    Shape:
        - c, multiplier: ``()``
        - hidden_weight, hidden_bias: ``(width,)``
        - head_weight: ``(num_heads, width)``; head_bias: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with ``batch`` in front if either
          has it

    Positions are counted from the start of the text: they matter beyond ``threshold``.

    Example:
        >>> layer = FireBias(8, rng=0)
        >>> whole = layer.bias(range(20), range(20))
        >>> bool((layer.bias([19], range(20))[:, 0] == whole[:, -1]).all())
        True
    """

    def __init__(
        self,
        num_heads: int,
        *,
        width: int = 32,
        c: float = 0.1,
        threshold: float = 512.0,
        eps: float = 1e-6,
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.num_heads, self.width = (
            positive("num_heads", num_heads),
            positive("width", width),
        )
        self.threshold = positive_number("threshold", threshold)
        self.eps = positive_number("eps", eps)
        found, rng = float_dtype(dtype), np.random.default_rng(rng)
        self.c = np.array(number("c", c), found)
        self.multiplier = np.array(1.0, found)
        self.hidden_weight, self.hidden_bias, self.head_weight, self.head_bias = (
            initial_table(
                shape,
                init=lambda shape, rng, limit=limit: uniform(shape, rng, limit=limit),
                rng=rng,
                dtype=found,
            )
            for shape, limit in (
                ((self.width,), 1.0),
                ((self.width,), 1.0),
                ((self.num_heads, self.width), self.width**-0.5),
                ((self.num_heads,), self.width**-0.5),
            )
        )

    def bias(
        self, q_positions: QPositions, k_positions: KPositions, *, dtype: Any = None
    ) -> Float[np.ndarray, "*batch num_heads q_length k_length"]:
        """Return the bias of every query and key.

        Args:
            q_positions: Where the queries stand.
            k_positions: Where the keys stand.
            dtype: Of the result, the parameters' if None. Worked on in float32, or in
                float64 for float64 parameters, and rounded once.
        """
        found = self.c.dtype if dtype is None else float_dtype(dtype)
        wide = self._wide()
        share = self._share(*checked_pair(q_positions, k_positions), wide)
        out = fire_bias(share, **{name: wide[name] for name in NETWORK})
        return out.astype(found, copy=False)

    def vjp(
        self, q_positions: QPositions, k_positions: KPositions
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the bias and the function from its gradient to those of the parameters.

        Example:
            >>> bias, pull = FireBias(2, rng=0).vjp([1], [0])
            >>> sorted(pull(np.ones_like(bias)))[:3]
            ['c', 'head_bias', 'head_weight']
        """
        bias = self.bias(q_positions, k_positions)
        wide = self._wide()
        q, k = (side.copy() for side in checked_pair(q_positions, k_positions))
        share = self._share(q, k, wide)

        def pull(dbias: Float[Any, "*batch heads q k"]) -> dict[str, np.ndarray]:
            d = gradient_like(dbias, bias).astype(share.dtype, copy=False)
            grads, dshare = _through_network(d, share, wide)
            return self._through_share(dshare, share, q, k, wide) | grads

        return bias, pull

    def parameters(self) -> dict[str, np.ndarray]:
        """Return ``c``, ``multiplier`` and the four arrays of the network."""
        return {name: getattr(self, name) for name in ("c", "multiplier", *NETWORK)}

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_heads": self.num_heads,
            "width": self.width,
            "threshold": self.threshold,
            "eps": self.eps,
            "dtype": self.c.dtype.name,
        }

    def _wide(self) -> dict[str, np.ndarray]:
        return {name: upcast(value.copy()) for name, value in self.parameters().items()}

    def _share(self, q: np.ndarray, k: np.ndarray, wide: dict[str, np.ndarray]):
        threshold = np.asarray(wide["multiplier"] * self.threshold, wide["c"].dtype)
        return fire_share(q, k, c=wide["c"], threshold=threshold, eps=self.eps)

    def _through_share(
        self,
        dshare: np.ndarray,
        share: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        wide: dict[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Return the gradients of ``c`` and ``multiplier``, given that of the share."""
        dtype = compute_dtype(share.dtype)
        distance, own = distances(q, k, dtype=dtype), q.astype(dtype)[..., :, None]
        rate, least = np.abs(wide["c"]), np.abs(wide["multiplier"] * self.threshold)
        reached = np.where(own < least, least, own)
        whole = np.log1p(rate * reached) + self.eps
        dpart, dwhole = dshare / whole, -dshare * share / whole
        drate = dpart * distance / (1 + rate * distance)
        drate = drate + dwhole * reached / (1 + rate * reached)
        dleast = np.where(own < least, dwhole * rate / (1 + rate * reached), 0)
        dthreshold = _total(dleast) * np.sign(wide["multiplier"])
        return {
            "c": np.asarray(_total(drate) * np.sign(wide["c"])),
            "multiplier": np.asarray(dthreshold * self.threshold),
        }


def _through_network(
    d: np.ndarray, share: np.ndarray, wide: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the gradients of the network's arrays, and that of its input."""
    d = np.moveaxis(d, -3, -1).reshape(-1, len(wide["head_bias"]))
    x = share.reshape(-1)
    sums = x[:, None] * wide["hidden_weight"] + wide["hidden_bias"]
    dsums = np.where(sums <= 0, 0, d @ wide["head_weight"])
    grads = {
        "hidden_weight": x @ dsums,
        "hidden_bias": _total(dsums, axis=0),
        "head_weight": d.T @ np.where(sums <= 0, 0, sums),
        "head_bias": _total(d, axis=0),
    }
    return grads, (dsums @ wide["hidden_weight"]).reshape(share.shape)


def _total(values: np.ndarray, *, axis: int | None = None) -> np.ndarray:
    return np.asarray(values.sum(axis=axis, dtype=np.float64), values.dtype)
