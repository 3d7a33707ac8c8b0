"""Time2Vec for Equinox."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from .._array import compute_dtype, is_real
from .._check import same_dtype
from ..positions.time2vec import check_width, time2vec
from ._module import Module, compiled
from ._parameters import Init, Key, check_parameters, draw_parameter, given_parameter
from ._positions import Positions, as_positions


class Time2Vec(Module):
    """Maps times to one linear feature and sines with learned frequencies and phases.

    Args:
        embedding_dim: Number of features, at least 2.
        weight: Slope of the linear feature, then the frequencies in radians per unit.
        bias: Offset of the linear feature, then the phases in radians.
        init: Distribution of new parameters, as for
            :class:`firstlayer.equinox.Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for new parameters.

    Shape:
        - weight, bias: ``(embedding_dim,)``
        - times: ``(...)``, integers or reals
        - output: ``(..., embedding_dim)``, in the dtype of real times, or of the parameters
          if times are integers

    The product of a frequency and a time is rounded to float32, or float64 if times or
    parameters are: subtract a near origin from large times such as timestamps.

    Example:
        >>> layer = Time2Vec(3, weight=[2.0, 3.0, 5.0], bias=[1.0, 0.0, 0.0])
        >>> layer([0.0, 4.0])[:, 0].tolist(), layer(jnp.ones((7, 5))).shape
        ([1.0, 9.0], (7, 5, 3))
    """

    weight: Float[Array, " embedding_dim"]
    bias: Float[Array, " embedding_dim"]
    embedding_dim: int = eqx.field(static=True)

    def __init__(
        self,
        embedding_dim: int,
        *,
        weight: Any = None,
        bias: Any = None,
        init: Init = "normal",
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        self.embedding_dim = check_width(embedding_dim)
        keys = (None, None) if key is None else jax.random.split(key)
        shape = (self.embedding_dim,)
        self.weight, self.bias = (
            draw_parameter(shape, init=init, key=own, dtype=dtype)
            if value is None
            else given_parameter(value, shape, dtype=dtype, name=name)
            for name, value, own in zip(
                ("weight", "bias"), (weight, bias), keys, strict=True
            )
        )
        same_dtype("weight and bias", self.weight.dtype.name, self.bias.dtype.name)

    def __call__(
        self, times: Positions, *, key: Key | None = None
    ) -> Float[Array, "*shape embedding_dim"]:
        """Return the features of each time.

        Args:
            times: Integers or reals of any shape.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        array = as_positions(times, name="times")
        dtype = None if is_real(array) else self.weight.dtype
        if dtype is not None and not isinstance(array, jax.Array):
            # JAX would truncate 64-bit integers to 32 bits.
            array = array.astype(compute_dtype(dtype))
        return _features(self, array, dtype)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        return {"weight": self.weight, "bias": self.bias}


@partial(compiled, static_argnums=2)
def _features(
    layer: Time2Vec, times: Shaped[Array, "*shape"], dtype: np.dtype | None
) -> Float[Array, "*shape embedding_dim"]:
    check_parameters(layer, weight=(layer.embedding_dim,), bias=(layer.embedding_dim,))
    is_float64 = jnp.float64 in (times.dtype, layer.weight.dtype)
    compute = jnp.float64 if is_float64 else jnp.float32
    weight, bias = layer.weight.astype(compute), layer.bias.astype(compute)
    features = time2vec(times, weight=weight, bias=bias)
    return features.astype(times.dtype if dtype is None else dtype)
