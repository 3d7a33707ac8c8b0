"""T5's relative bias for NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import boolean, float_dtype, positive
from ..embeddings.init import Init, Seed, initial_table
from ..files.layer_configs import config_of
from ..positions.t5 import clipped_index, reach, relative_positions, t5_bias, t5_buckets
from ._bias import Bias, KPositions, QPositions, checked_pair, gradient_like
from ._module import as_parameter, upcast


class T5Bias(Bias):
    """Adds a learned bias per bucket of distances to the attention scores.

    Args:
        num_heads: Number of heads. Positive.
        num_buckets: Number of buckets: even and at least 4, or at least 2 if not
            ``bidirectional``.
        max_distance: Distance from which on all distances share a bucket. Greater than the
            number of distances with their own bucket: ``num_buckets / 4``, or ``num_buckets
            / 2`` if not ``bidirectional``.
        bidirectional: Whether keys after the query have their own buckets: True in T5's
            encoder, False in its decoder.
        weight: Table to use, without a copy if its dtype and layout fit.
        init: Initializer of a new table; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - weight: ``(num_buckets, num_heads)``
        - q_positions: ``(q_length,)`` or ``(batch, q_length)``, integers or reals
        - k_positions: ``(k_length,)`` or ``(batch, k_length)``
        - output: ``(num_heads, q_length, k_length)``, with a leading ``batch`` if either
          has one

    T5 does not divide its scores by √head_dim, and all its layers share one table. If
    ``bidirectional``, the first row of the second half is never used, as in T5.

    Example:
        >>> layer = T5Bias(8, rng=0)
        >>> whole = layer.bias(range(200), range(200))
        >>> step = layer.bias([199], range(200))
        >>> step.shape, bool((step[:, 0] == whole[:, -1]).all())
        ((8, 1, 200), True)
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        weight: Float[Any, "num_buckets num_heads"] | None = None,
        init: Init = "truncated_normal",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        #: Bucket of each relative position, from the most negative upwards.
        self.buckets = t5_buckets(
            num_buckets, max_distance=max_distance, bidirectional=bidirectional
        )
        self.num_heads = positive("num_heads", num_heads)
        self.num_buckets = int(num_buckets)
        self.max_distance, self.bidirectional = (
            int(max_distance),
            boolean("bidirectional", bidirectional),
        )
        shape = (self.num_buckets, self.num_heads)
        if weight is None:
            self.weight = initial_table(shape, init=init, rng=rng, dtype=dtype)
        else:
            self.weight = as_parameter(weight, shape, dtype=dtype)

    def bias(
        self, q_positions: QPositions, k_positions: KPositions, *, dtype: Any = None
    ) -> Float[np.ndarray, "*batch num_heads q_length k_length"]:
        dtype = self.weight.dtype if dtype is None else float_dtype(dtype)
        out = t5_bias(
            *checked_pair(q_positions, k_positions),
            # NumPy has no NaN of bfloat16: with one, the result would be float64.
            weight=upcast(self.weight),
            buckets=self.buckets,
            bidirectional=self.bidirectional,
        )
        return out.astype(dtype, copy=False)

    def vjp(
        self, q_positions: QPositions, k_positions: KPositions
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the bias and the pullback from its gradient to the table's.

        Example:
            >>> layer = T5Bias(1, num_buckets=4, max_distance=2)
            >>> bias, pullback = layer.vjp([0, 1], [0, 1])
            >>> pullback(np.ones_like(bias))["weight"].ravel().tolist()
            [2.0, 1.0, 0.0, 1.0]
        """
        bias = self.bias(q_positions, k_positions)
        relative = relative_positions(*checked_pair(q_positions, k_positions))
        left, right = reach(self.buckets, bidirectional=self.bidirectional)
        bucket = self.buckets[clipped_index(relative, left=left, right=right)].ravel()

        def pullback(dbias: Float[Any, "*batch heads q k"]) -> dict[str, np.ndarray]:
            by_head = np.moveaxis(gradient_like(dbias, bias), -3, 0)
            sums = [
                np.bincount(bucket, weights=head.ravel(), minlength=self.num_buckets)
                for head in by_head
            ]
            dtype = compute_dtype(self.weight.dtype)
            return {"weight": np.stack(sums, axis=1).astype(dtype)}

        return bias, pullback

    def parameters(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.weight.dtype.name)
