"""Transformer-XL's relative scores for NumPy."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from .._array import compute_dtype
from .._check import (
    dtype_text,
    host_array,
    is_float,
    number,
    positions_in_reach,
    positive,
    same_dtype,
)
from ..embeddings.init import Init, Seed, initial_table
from ..files.layer_configs import config_of
from ..positions.phases import LIMIT
from ..positions.sinusoidal import encode, features_at
from ..positions.transformer_xl import (
    distance_keys,
    distance_range,
    relative_shift,
    xl_scores,
    xl_tables,
    xl_turns,
)
from ..positions.turns import float64_phases
from ._bias import gradient_like, sum_to, upcast_together
from ._module import Module, as_parameter, native_byte_order


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
            ``r`` in XLNet is its transpose). Used without a copy if possible.
        u: Added to queries before they are multiplied with keys (``r_w_bias``).
        v: Added to queries before they are multiplied with ``W R`` (``r_r_bias``).
        init: Initializer of new parameters; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - weight: ``(num_heads * head_dim, embedding_dim)``
        - u, v: ``(num_heads, head_dim)``
        - q: ``(..., num_heads, q_length, head_dim)``
        - k: ``(..., num_heads, k_length, head_dim)``
        - output: ``(..., num_heads, q_length, k_length)``, in the dtype of ``q``

    The queries are the last of the keys, unless ``offset`` is given: with cached keys of
    earlier segments, or in a step of decoding, pass all keys and only the new queries.
    Padding and packed documents need only a mask, because distances do not change.

    Example:
        >>> layer = TransformerXLScores(2, 4, rng=0)
        >>> layer.scores(np.ones((3, 2, 5, 4)), np.ones((3, 2, 9, 4))).shape
        (3, 2, 5, 9)
        >>> scores, pull = layer.vjp(np.ones((2, 5, 4)), np.ones((2, 9, 4)))
        >>> sorted(pull(np.ones_like(scores)))
        ['k', 'q', 'u', 'v', 'weight']
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        embedding_dim: int | None = None,
        base: float = 10_000.0,
        max_distance: int | None = None,
        weight: Float[Any, "width embedding_dim"] | None = None,
        u: Float[Any, "num_heads head_dim"] | None = None,
        v: Float[Any, "num_heads head_dim"] | None = None,
        init: Init = "truncated_normal",
        dtype: Any = None,
        rng: Seed = None,
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
        self.tables, self.rates = xl_tables(self.embedding_dim, base=self.base)
        rng = np.random.default_rng(rng)
        shapes = {
            "weight": (width, self.embedding_dim),
            "u": (self.num_heads, self.head_dim),
            "v": (self.num_heads, self.head_dim),
        }
        self.weight, self.u, self.v = (
            initial_table(shapes[name], init=init, rng=rng, dtype=dtype)
            if value is None
            else as_parameter(value, shapes[name], dtype=dtype, name=name)
            for name, value in (("weight", weight), ("u", u), ("v", v))
        )
        same_dtype("weight, u and v", *(value.dtype.name for value in self._values()))

    def scores(
        self,
        q: Float[Any, "*lead num_heads q_length head_dim"],
        k: Float[Any, "*lead num_heads k_length head_dim"],
        *,
        offset: int | None = None,
    ) -> Float[np.ndarray, "*lead num_heads q_length k_length"]:
        """Return the scores of every query and key.

        Args:
            q: Queries, without positions.
            k: Keys, without positions, those of earlier segments first.
            offset: Number of keys before the first query; None is ``k_length - q_length``.
        """
        q, k = self._checked("q", q), self._checked("k", k)
        q_upcast, k_upcast, weight, u, v = upcast_together(q, k, *self._values())
        encodings = self._encodings(q, k, offset, weight.dtype)
        keys = distance_keys(encodings, weight, self.num_heads)
        out = xl_scores(q_upcast, k_upcast, keys, u=u, v=v)
        return out.astype(q.dtype, copy=False)

    __call__ = scores

    def vjp(
        self,
        q: Float[Any, "*lead num_heads q_length head_dim"],
        k: Float[Any, "*lead num_heads k_length head_dim"],
        *,
        offset: int | None = None,
    ) -> tuple[np.ndarray, Callable[[Any], dict[str, np.ndarray]]]:
        """Return the scores and the pullback to the gradients of inputs and parameters.

        Gradients of ``q`` and ``k`` have their dtypes; those of parameters are upcast.
        """
        scores = self.scores(q, k, offset=offset)
        q, k = self._checked("q", np.array(q)), self._checked("k", np.array(k))
        copies = (value.copy() for value in self._values())
        q_upcast, k_upcast, weight, u, v = upcast_together(q, k, *copies)
        encodings = self._encodings(q, k, offset, weight.dtype)
        keys = distance_keys(encodings, weight, self.num_heads)

        def pullback(dscores: Any) -> dict[str, np.ndarray]:
            d = gradient_like(dscores, scores, name="dscores").astype(q_upcast.dtype)
            d /= math.sqrt(self.head_dim)
            by_distance = np.zeros((*d.shape[:-1], len(encodings)), d.dtype)
            # The shift returns a view of its argument, so this writes into by_distance.
            relative_shift(by_distance, d.shape[-1])[...] = d
            with_u, with_v = q_upcast + u[:, None, :], q_upcast + v[:, None, :]
            dcontent, dposition = d @ k_upcast, by_distance @ keys
            dkeys = sum_to(by_distance.mT @ with_v, keys.shape)
            parameters = {
                "weight": dkeys.mT.reshape(len(weight), len(encodings)) @ encodings,
                "u": _sum_over_queries(dcontent),
                "v": _sum_over_queries(dposition),
            }
            dq, dk = sum_to(dcontent + dposition, q.shape), sum_to(d.mT @ with_u, k.shape)
            dtype = compute_dtype(self.weight.dtype)
            return {
                "q": dq.astype(q.dtype, copy=False),
                "k": dk.astype(k.dtype, copy=False),
                **{name: dx.astype(dtype, copy=False) for name, dx in parameters.items()},
            }

        return scores, pullback

    def parameters(self) -> dict[str, np.ndarray]:
        return {"weight": self.weight, "u": self.u, "v": self.v}

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.weight.dtype.name)

    def _values(self) -> list[np.ndarray]:
        return list(self.parameters().values())

    def _encodings(
        self, q: np.ndarray, k: np.ndarray, offset: int | None, dtype: np.dtype
    ) -> np.ndarray:
        largest, count = distance_range(q.shape[-2], k.shape[-2], offset)
        distances = np.arange(largest, largest - count, -1)
        if self.max_distance is not None:
            distances = distances.clip(-self.max_distance, self.max_distance)
        positions_in_reach(distances, LIMIT, name="distances")
        width = self.embedding_dim
        if dtype == np.float64:
            phases = float64_phases(distances, self.turns)
            return encode(*phases, embedding_dim=width, layout="half")
        return features_at(
            distances,
            *(self.tables, self.rates),
            embedding_dim=width,
            layout="half",
            cos_first=False,
        )

    @cached_property
    def turns(self) -> np.ndarray:
        """Constants of float64 phases; see :mod:`firstlayer.positions.turns`."""
        return xl_turns(self.embedding_dim, base=self.base)

    def _checked(self, name: str, x: Any) -> np.ndarray:
        array = host_array(x, name=name)
        if not is_float(array.dtype):
            raise TypeError(f"{name} must be real, got {dtype_text(array.dtype)}")
        if array.shape[-3:-2] != (self.num_heads,) or array.shape[-1] != self.head_dim:
            raise ValueError(
                f"{name} must have shape (..., {self.num_heads}, length, {self.head_dim}), "
                f"got {array.shape}"
            )
        return native_byte_order(array)


def _sum_over_queries(gradient: np.ndarray) -> np.ndarray:
    lead = tuple(range(gradient.ndim - 3))
    return gradient.sum(axis=(*lead, -2), dtype=np.float64).astype(gradient.dtype)
