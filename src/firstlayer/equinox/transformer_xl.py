"""Transformer-XL's relative scores for Equinox."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from .._array import axis_specs, explicit_mesh
from .._check import number, positive, same_dtype
from ..positions.phases import LIMIT, phases
from ..positions.sinusoidal import encode
from ..positions.transformer_xl import (
    distance_keys,
    distance_range,
    xl_scores,
    xl_tables,
    xl_turns,
)
from ..positions.turns import float64_phases
from ._constant import Constant
from ._module import Module, compiled, upcast_together
from ._parameters import Init, Key, check_parameters, draw_parameter, given_parameter
from ._positions import check_reach, checked_vectors


class TransformerXLScores(Module):
    """Computes attention scores with learned products of queries and distances.

    Transformer-XL and XLNet: ``((q + u)·k + (q + v)·W R) / √head_dim``, where ``R`` are
    sinusoids of the distance from the key to the query, negative for keys after it.

    Args:
        num_heads: Number of heads. Positive.
        head_dim: Number of features of queries and keys. Positive.
        embedding_dim: Width of the sinusoids (``d_model``); None is that of all heads,
            ``num_heads * head_dim``.
        base: Ratio of the slowest wavelength of the sinusoids to the fastest.
        max_distance: Larger distances are replaced by this one (``clamp_len``); None is no
            limit.
        weight: Projection ``W`` of the sinusoids to all heads (``r_net`` in Transformer-XL;
            ``r`` in XLNet is its transpose).
        u: Added to queries before they are multiplied with keys (``r_w_bias``).
        v: Added to queries before they are multiplied with ``W R`` (``r_r_bias``).
        init: Distribution of new parameters, as for
            :class:`firstlayer.equinox.Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for new parameters.

    Shape:
        - weight: ``(num_heads * head_dim, embedding_dim)``
        - u, v: ``(num_heads, head_dim)``
        - q: ``(..., num_heads, q_length, head_dim)``
        - k: ``(..., num_heads, k_length, head_dim)``
        - output: ``(..., num_heads, q_length, k_length)``, in the dtype of ``q``

    The queries are the last of the keys, unless ``offset`` is given: with cached keys of
    earlier segments, or in a step of decoding, pass all keys and only the new queries.
    Padding and packed documents need only a mask, because distances do not change.

    Products use full float32 precision on every device (float64 if any input is), and the
    result is rounded once.

    Example:
        >>> layer = TransformerXLScores(2, 4, key=jax.random.key(0))
        >>> layer.scores(jnp.ones((3, 2, 5, 4)), jnp.ones((3, 2, 9, 4))).shape
        (3, 2, 5, 9)
    """

    weight: Float[Array, "width embedding_dim"]
    u: Float[Array, "num_heads head_dim"]
    v: Float[Array, "num_heads head_dim"]
    tables: Constant = eqx.field(static=True)
    rates: Constant = eqx.field(static=True)
    #: The same for float64; see :mod:`firstlayer.positions.turns`.
    turns: Constant = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    base: float = eqx.field(static=True)
    max_distance: int | None = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        embedding_dim: int | None = None,
        base: float = 10_000.0,
        max_distance: int | None = None,
        weight: Any = None,
        u: Any = None,
        v: Any = None,
        init: Init = "truncated_normal",
        dtype: Any = None,
        key: Key | None = None,
    ) -> None:
        self.num_heads = positive("num_heads", num_heads)
        self.head_dim = positive("head_dim", head_dim)
        width = self.num_heads * self.head_dim
        self.embedding_dim = (
            width if embedding_dim is None else positive("embedding_dim", embedding_dim)
        )
        self.base = number("base", base)
        self.max_distance = (
            None if max_distance is None else positive("max_distance", max_distance)
        )
        tables, rates = xl_tables(self.embedding_dim, base=self.base)
        self.tables, self.rates = Constant(tables), Constant(rates)
        self.turns = Constant(xl_turns(self.embedding_dim, base=self.base))
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        shape = (self.num_heads, self.head_dim)
        self.weight, self.u, self.v = (
            draw_parameter(shape, init=init, key=own, dtype=dtype)
            if value is None
            else given_parameter(value, shape, dtype=dtype, name=name)
            for name, value, shape, own in zip(
                ("weight", "u", "v"),
                (weight, u, v),
                ((width, self.embedding_dim), shape, shape),
                keys,
                strict=True,
            )
        )
        own = (self.weight, self.u, self.v)
        same_dtype("weight, u and v", *(value.dtype.name for value in own))

    def scores(
        self,
        q: Float[Array | np.ndarray, "*lead num_heads q_length head_dim"],
        k: Float[Array | np.ndarray, "*lead num_heads k_length head_dim"],
        *,
        offset: int | None = None,
    ) -> Float[Array, "*lead num_heads q_length k_length"]:
        """Return the scores of every query and key.

        Args:
            q: Queries, without positions.
            k: Keys, without positions, those of earlier segments first.
            offset: Number of keys before the first query; None is ``k_length - q_length``.
        """
        q, k = self._checked("q", q), self._checked("k", k)
        largest, count = distance_range(q.shape[-2], k.shape[-2], offset)
        ends = np.array([largest, largest - count + 1])
        if self.max_distance is not None:
            ends = ends.clip(-self.max_distance, self.max_distance)
            # Every distance is replaced by the limit there, and the sum fits into 32 bits.
            largest = min(max(largest, -LIMIT), LIMIT + count)
        check_reach(ends, name="distances")
        return _scores(self, q, k, np.int32(largest))

    def __call__(
        self,
        q: Float[Array | np.ndarray, "*lead num_heads q_length head_dim"],
        k: Float[Array | np.ndarray, "*lead num_heads k_length head_dim"],
        *,
        offset: int | None = None,
    ) -> Float[Array, "*lead num_heads q_length k_length"]:
        """Return the scores of every query and key; see :meth:`scores`."""
        return self.scores(q, k, offset=offset)

    def parameters(self) -> dict[str, Float[Array, "..."]]:
        return {"weight": self.weight, "u": self.u, "v": self.v}

    def _encodings(
        self, largest: Int32[Array, ""], count: int, dtype: Any
    ) -> Float[Array, "distances embedding_dim"]:
        # Counted by JAX: a long NumPy array would be a constant in every compiled program.
        distances = largest - jnp.arange(count, dtype=jnp.int32)
        if self.max_distance is not None:
            distances = jnp.clip(distances, -self.max_distance, self.max_distance)
        if dtype == jnp.float64:
            both = float64_phases(distances, jnp.asarray(self.turns.array))
        else:
            tables, rates = (jnp.asarray(c.array) for c in (self.tables, self.rates))
            both = phases(distances, tables, rates)
        return encode(*both, embedding_dim=self.embedding_dim, layout="half")

    def _checked(self, name: str, x: Any) -> Float[Array, "..."]:
        width = (np.shape(x) or (self.head_dim,))[-1]
        x = checked_vectors(x, width, name=name)
        if x.shape[-1] != self.head_dim or x.shape[-3:-2] != (self.num_heads,):
            raise ValueError(
                f"{name} must have shape (..., {self.num_heads}, length, {self.head_dim}), "
                f"got {x.shape}"
            )
        return x


@compiled
def _scores(
    layer: TransformerXLScores, q: Array, k: Array, largest: Int32[Array, ""]
) -> Float[Array, "*lead num_heads q_length k_length"]:
    heads, head_dim = layer.num_heads, layer.head_dim
    check_parameters(
        layer,
        weight=(heads * head_dim, layer.embedding_dim),
        u=(heads, head_dim),
        v=(heads, head_dim),
    )
    q_upcast, k_upcast, weight, u, v = upcast_together(q, k, *layer.parameters().values())
    count = distance_range(q.shape[-2], k.shape[-2], None)[1]
    with jax.default_matmul_precision("highest"):
        encodings = layer._encodings(largest, count, weight.dtype)
        keys = distance_keys(encodings, weight, layer.num_heads)
        out = xl_scores(q_upcast, k_upcast, _by_head(keys, q), u=u, v=v)
    return out.astype(q.dtype)


def _by_head(keys: Float[Array, "num_heads distances head_dim"], q: Array) -> Array:
    """Return keys sharded over heads as the queries are, on a mesh of explicit axes."""
    mesh = explicit_mesh(q)
    if mesh is None:
        return keys
    spec = jax.sharding.PartitionSpec(axis_specs(q)[-3], None, None)
    return jax.sharding.reshard(keys, jax.sharding.NamedSharding(mesh, spec))
