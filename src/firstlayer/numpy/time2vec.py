"""Time2Vec for NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from .._array import compute_dtype
from .._check import positions_array, same_dtype
from ..embeddings.init import Init, Seed, initial_table
from ..files.layer_configs import config_of
from ..positions.time2vec import check_width, time2vec
from ._module import Module, as_parameter
from ._positions import gradient_of


class Time2Vec(Module):
    """Maps times to one linear feature and sines with learned frequencies and phases.

    Args:
        embedding_dim: Number of features, at least 2.
        weight: Slope of the linear feature, then the frequencies in radians per unit,
            without a copy if possible.
        bias: Offset of the linear feature, then the phases in radians.
        init: Initializer of new parameters; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - weight, bias: ``(embedding_dim,)``
        - times: ``(...)``, integers or reals
        - output: ``(..., embedding_dim)``, in the dtype of real times, or of the parameters
          if times are integers

    The product of a frequency and a time is rounded to float32, or float64 if times or
    parameters are: subtract a near origin from large times such as timestamps.

    Example:
        >>> layer = Time2Vec(3, weight=[2.0, 3.0, 5.0], bias=[1.0, 0.0, 0.0])
        >>> layer([0.0, 4.0])[:, 0].tolist(), layer(np.ones((7, 5))).shape
        ([1.0, 9.0], (7, 5, 3))
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        weight: Float[Any, " embedding_dim"] | list[float] | None = None,
        bias: Float[Any, " embedding_dim"] | list[float] | None = None,
        init: Init = "normal",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.embedding_dim = check_width(embedding_dim)
        rng, shape = np.random.default_rng(rng), (self.embedding_dim,)
        self.weight, self.bias = (
            initial_table(shape, init=init, rng=rng, dtype=dtype)
            if value is None
            else as_parameter(value, shape, dtype=dtype, name=name)
            for name, value in (("weight", weight), ("bias", bias))
        )
        same_dtype("weight and bias", self.weight.dtype.name, self.bias.dtype.name)

    def __call__(
        self, times: Shaped[Any, "*shape"] | list[Any] | float
    ) -> Float[np.ndarray, "*shape embedding_dim"]:
        """Return the features of each time.

        Args:
            times: Integers or reals of any shape.
        """
        times = positions_array(times, name="times")
        weight, bias = self._upcast(times)
        features = time2vec(times, weight=weight, bias=bias)
        return features.astype(self._dtype(times), copy=False)

    def vjp(
        self, times: Shaped[Any, "*shape"] | list[Any] | float
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, np.ndarray]]]:
        """Return the features and the pullback to the gradients of times and parameters.

        The gradient of times, ``"x"``, is in their dtype, or that of the features if they
        are integers; gradients of parameters are upcast.

        Example:
            >>> y, pullback = Time2Vec(2, weight=[2.0, 3.0], bias=[0.0, 0.0]).vjp([0.0])
            >>> pullback([[1.0, 1.0]])["x"].tolist()
            [5.0]
        """
        y, times = self(times), positions_array(times, name="times").copy()
        weight, bias = (x.copy() for x in self._upcast(times))

        def pullback(dy: Any) -> dict[str, np.ndarray]:
            reals = times.astype(weight.dtype)[..., None]
            d = gradient_of(y, dy).astype(weight.dtype)
            d[..., 1:] *= np.cos(reals * weight + bias)[..., 1:]
            lead = tuple(range(d.ndim - 1))
            # Accumulated in float64: there may be many times.
            sums = {
                "weight": (d * reals).sum(axis=lead, dtype=np.float64),
                "bias": d.sum(axis=lead, dtype=np.float64),
            }
            dtype = compute_dtype(self.weight.dtype)
            return {
                "x": (d @ weight).astype(self._dtype(times), copy=False),
                **{name: total.astype(dtype) for name, total in sums.items()},
            }

        return y, pullback

    def parameters(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight, "bias": self.bias}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.weight.dtype.name)

    def _dtype(self, times: np.ndarray) -> np.dtype:
        return self.weight.dtype if times.dtype.kind in "iu" else times.dtype

    def _upcast(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_float64 = np.float64 in (times.dtype, self.weight.dtype)
        dtype = np.float64 if is_float64 else np.float32
        return self.weight.astype(dtype, copy=False), self.bias.astype(dtype, copy=False)
