"""Transformer-XL's scores: a query is also multiplied with an encoding of the distance.

The score of a query ``q`` at ``m`` and a key ``k`` at ``n`` is
``((q + u)·k + (q + v)·W R[m - n]) / √head_dim``, where ``R`` are sinusoids of the distance
and ``W``, ``u`` and ``v`` are learned (Dai et al. 2019, https://arxiv.org/abs/1901.02860).
Distances, unlike positions, stay the same when keys of earlier segments are cached
("memories"), and may be negative, for keys after the query (XLNet).

Encoding every pair would take head_dim times the memory of the scores. There are only
``q_length + k_length - 1`` distances: each query is multiplied with all of them, and
``relative_shift`` moves each row so that a column is a key. Apart from those that build
constants and plan distances, these functions create no arrays and run unchanged on NumPy,
torch and JAX.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int64

from .._array import move_axis, namespace_of
from .._check import integer
from .phases import phase_tables
from .sinusoidal import frequencies
from .turns import turn_constants


def xl_tables(
    embedding_dim: int, *, base: float = 10_000.0
) -> tuple[
    Float32[np.ndarray, "levels 2 3 256 pairs"], Float32[np.ndarray, "levels pairs"]
]:
    """Return the tables and the rates of the sinusoids.

    See :func:`firstlayer.positions.phases.phase_tables`.

    Args:
        embedding_dim: Number of features of a sinusoid.
        base: Ratio of the slowest wavelength to the fastest.

    Example:
        >>> tables, rates = xl_tables(4)
        >>> tables.shape, rates.shape
        ((1, 2, 3, 256, 2), (1, 2))
    """
    return phase_tables(frequencies(embedding_dim, base=base))


def xl_turns(embedding_dim: int, *, base: float = 10_000.0) -> Int64[np.ndarray, "7 pairs"]:
    """Return the constants of the sinusoids in float64.

    See :func:`firstlayer.positions.turns.turn_constants`.

    Args:
        embedding_dim: As in :func:`xl_tables`.
        base: As in :func:`xl_tables`.

    Example:
        >>> xl_turns(4).shape
        (7, 2)
    """
    return turn_constants(frequencies(embedding_dim, base=base))


def distance_range(q_length: int, k_length: int, offset: int | None) -> tuple[int, int]:
    """Return the largest distance of a query from a key, and the number of distances.

    Args:
        q_length: Number of queries.
        k_length: Number of keys.
        offset: Number of keys before the first query; None if the queries are the last.

    Example:
        >>> distance_range(2, 5, None)
        (4, 6)
    """
    offset = k_length - q_length if offset is None else integer("offset", offset)
    rows = q_length if q_length > 1 else 1
    return offset + rows - 1, rows + k_length - 1


def relative_shift(
    by_distance: Float[Any, "*lead q_length distances"], k_length: int
) -> Float[Any, "*lead q_length k_length"]:
    """Return values by key from values by distance, largest distance of all first.

    A row begins one column earlier than the row above it. In flattened form, that is the
    same as rows that are shorter by one.

    Args:
        by_distance: Values of each query, for ``q_length + k_length - 1`` distances.
        k_length: Number of keys.

    Example:
        >>> relative_shift(np.array([[4, 3, 2, 1], [4, 3, 2, 1]]), 3).tolist()
        [[3, 2, 1], [4, 3, 2]]
    """
    *lead, q_length, width = by_distance.shape
    if q_length <= 1:
        return by_distance
    xp = namespace_of(by_distance)
    flat = xp.reshape(by_distance, (*lead, q_length * width))
    flat = flat[..., q_length - 1 : q_length * width]
    # One number is left over at the end.
    rows = xp.reshape(flat[..., : q_length * (width - 1)], (*lead, q_length, width - 1))
    return rows[..., :k_length]


def xl_scores(
    q: Float[Any, "*lead num_heads q_length head_dim"],
    k: Float[Any, "*lead num_heads k_length head_dim"],
    keys: Float[Any, "num_heads distances head_dim"],
    *,
    u: Float[Any, "num_heads head_dim"],
    v: Float[Any, "num_heads head_dim"],
) -> Float[Any, "*lead num_heads q_length k_length"]:
    """Return the scaled scores of every query and key.

    Args:
        q: Queries, in float32 or float64.
        k: Keys, in the dtype of ``q``.
        keys: From :func:`distance_keys`, for the distances of :func:`distance_range`,
            largest first.
        u: Added to queries that are multiplied with keys.
        v: Added to queries that are multiplied with encodings.

    Example:
        >>> one, q = np.ones((1, 1)), np.ones((1, 2, 1))
        >>> keys = np.array([[[1.0], [0.0], [-1.0]]])
        >>> xl_scores(q, 0 * q, keys, u=one, v=one).tolist()
        [[[0.0, -2.0], [2.0, 0.0]]]
    """
    # Not mT, which an exporter of ONNX does not know.
    content = (q + u[:, None, :]) @ move_axis(k, -1, -2)
    by_distance = (q + v[:, None, :]) @ move_axis(keys, -1, -2)
    scores = content + relative_shift(by_distance, k.shape[-2])
    return scores / math.sqrt(u.shape[1])


def distance_keys(
    encodings: Float[Any, "distances embedding_dim"],
    weight: Float[Any, "heads_times_head_dim embedding_dim"],
    num_heads: int,
) -> Float[Any, "num_heads distances head_dim"]:
    """Return the projected encoding of each distance for each head.

    Example:
        >>> distance_keys(np.ones((5, 3)), np.ones((8, 3)), 2).shape
        (2, 5, 4)
    """
    keys = encodings @ move_axis(weight, -1, -2)
    shape = (keys.shape[0], num_heads, keys.shape[1] // num_heads)
    return move_axis(namespace_of(keys).reshape(keys, shape), 0, 1)
