"""FIRE for NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import float_dtype, number, positive, positive_number
from ..embeddings.init import Seed, initial_table, uniform
from ..files.layer_configs import config_of
from ..positions.fire import fire_bias, normalized_distances
from ..positions.t5 import distances
from ._bias import Bias, KPositions, QPositions, checked_pair, gradient_like
from ._module import upcast

NETWORK = ("hidden_weight", "hidden_bias", "head_weight", "head_bias")


class FireBias(Bias):
    """Adds a learned function of normalized distance to attention scores (FIRE).

    Args:
        num_heads: Number of heads. Positive.
        width: Number of hidden units of the network. Positive.
        c: Initial value of the parameter ``c``, the strength of the log compression of
            distances.
        threshold: Lower bound of query positions in the normalization, times the parameter
            ``multiplier``. Positive.
        eps: Added to the denominator. Positive.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for the network, initialized like torch's linear layers.

    Shape:
        - c, multiplier: ``()``
        - hidden_weight, hidden_bias: ``(width,)``
        - head_weight: ``(num_heads, width)``; head_bias: ``(num_heads,)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one

    Count positions from the start of the text, because the bias depends on absolute query
    positions beyond ``threshold``.

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
        self.num_heads = positive("num_heads", num_heads)
        self.width = positive("width", width)
        self.threshold = positive_number("threshold", threshold)
        self.eps = positive_number("eps", eps)
        dtype, rng = float_dtype(dtype), np.random.default_rng(rng)
        self.c = np.array(number("c", c), dtype)
        self.multiplier = np.array(1.0, dtype)
        self.hidden_weight, self.hidden_bias, self.head_weight, self.head_bias = (
            initial_table(
                shape,
                init=lambda shape, rng, limit=limit: uniform(shape, rng, limit=limit),
                rng=rng,
                dtype=dtype,
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
        dtype = self.c.dtype if dtype is None else float_dtype(dtype)
        values = self._upcast_parameters()
        x = self._network_input(*checked_pair(q_positions, k_positions), values)
        out = fire_bias(x, **{name: values[name] for name in NETWORK})
        return out.astype(dtype, copy=False)

    def vjp(
        self, q_positions: QPositions, k_positions: KPositions
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the bias and the pullback from its gradient to those of the parameters.

        Example:
            >>> bias, pullback = FireBias(2, rng=0).vjp([1], [0])
            >>> sorted(pullback(np.ones_like(bias)))[:3]
            ['c', 'head_bias', 'head_weight']
        """
        bias = self.bias(q_positions, k_positions)
        values = self._upcast_parameters()
        q, k = (x.copy() for x in checked_pair(q_positions, k_positions))
        x = self._network_input(q, k, values)

        def pullback(dbias: Float[Any, "*batch heads q k"]) -> dict[str, np.ndarray]:
            d = gradient_like(dbias, bias).astype(x.dtype, copy=False)
            grads, dx = _network_gradients(d, x, values)
            return self._input_gradients(dx, x, q, k, values) | grads

        return bias, pullback

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ("c", "multiplier", *NETWORK)}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.c.dtype.name)

    def _upcast_parameters(self) -> dict[str, np.ndarray]:
        return {name: upcast(value.copy()) for name, value in self.parameters().items()}

    def _network_input(
        self, q: np.ndarray, k: np.ndarray, values: dict[str, np.ndarray]
    ) -> np.ndarray:
        c = values["c"]
        threshold = np.asarray(values["multiplier"] * self.threshold, c.dtype)
        return normalized_distances(q, k, c=c, threshold=threshold, eps=self.eps)

    def _input_gradients(
        self,
        dx: np.ndarray,
        x: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        values: dict[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Return the gradients of ``c`` and ``multiplier``, given that of the input."""
        dtype = compute_dtype(x.dtype)
        distance, q = distances(q, k, dtype=dtype), q.astype(dtype)[..., :, None]
        rate = np.abs(values["c"])
        threshold = np.abs(values["multiplier"] * self.threshold)
        bounded = np.where(q < threshold, threshold, q)
        denominator = np.log1p(rate * bounded) + self.eps
        dnumerator, ddenominator = dx / denominator, -dx * x / denominator
        drate = dnumerator * distance / (1 + rate * distance)
        drate = drate + ddenominator * bounded / (1 + rate * bounded)
        dbounded = ddenominator * rate / (1 + rate * bounded)
        dthreshold = _total(np.where(q < threshold, dbounded, 0))
        dthreshold = dthreshold * np.sign(values["multiplier"])
        return {
            "c": np.asarray(_total(drate) * np.sign(values["c"])),
            "multiplier": np.asarray(dthreshold * self.threshold),
        }


def _network_gradients(
    d: np.ndarray, x: np.ndarray, values: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the gradients of the network's parameters, and that of its input."""
    d = np.moveaxis(d, -3, -1).reshape(-1, len(values["head_bias"]))
    flat = x.reshape(-1)
    sums = flat[:, None] * values["hidden_weight"] + values["hidden_bias"]
    dsums = np.where(sums <= 0, 0, d @ values["head_weight"])
    grads = {
        "hidden_weight": flat @ dsums,
        "hidden_bias": _total(dsums, axis=0),
        "head_weight": d.T @ np.where(sums <= 0, 0, sums),
        "head_bias": _total(d, axis=0),
    }
    return grads, (dsums @ values["hidden_weight"]).reshape(x.shape)


def _total(values: np.ndarray, *, axis: int | None = None) -> np.ndarray:
    return np.asarray(values.sum(axis=axis, dtype=np.float64), values.dtype)
