"""Rows by id: how a table begins, what a lookup returns, how a table changes its length.

A token embedding is a table with one row for each id. What makes it more than indexing is
decided here, once for every face: how the rows are drawn, what ``max_norm`` means, and
which row becomes which when the vocabulary grows or shrinks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from .._array import cast, namespace_of
from .._check import float_dtype, not_negative, one_of, positive_number

Init = str | Callable[[tuple[int, ...], np.random.Generator], Any]
Seed = int | np.random.Generator | None


def normal(
    shape: tuple[int, ...], rng: np.random.Generator, *, std: float = 1.0
) -> np.ndarray:
    """Draw from a normal distribution, as torch does for its embeddings."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def uniform(
    shape: tuple[int, ...], rng: np.random.Generator, *, limit: float = 0.05
) -> np.ndarray:
    """Draw evenly from ``[-limit, limit)``, as Keras does for its embeddings."""
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def xavier(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw evenly within ``√(6 / (rows + width))`` (Glorot and Bengio 2010)."""
    return uniform(shape, rng, limit=float(np.sqrt(6.0 / max(1, sum(shape)))))


def truncated_normal(
    shape: tuple[int, ...], rng: np.random.Generator, *, std: float = 0.02
) -> np.ndarray:
    """Draw from a normal distribution and again where it fell beyond two ``std``."""
    out = rng.standard_normal(shape, dtype=np.float32)
    while (beyond := np.abs(out) > 2).any():
        out[beyond] = rng.standard_normal(int(beyond.sum()), dtype=np.float32)
    return out * np.float32(std)


def zeros(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return nothing but zeros."""
    return np.zeros(shape, np.float32)


INITS = {
    "normal": normal,
    "uniform": uniform,
    "xavier": xavier,
    "truncated_normal": truncated_normal,
    "zeros": zeros,
}


def initial(
    shape: tuple[int, ...], *, init: Init = "normal", rng: Seed = None, dtype: Any = None
) -> np.ndarray:
    """Return a new table.

    Args:
        shape: Of the table.
        init: ``"normal"`` (standard deviation 1), ``"uniform"`` (within 0.05),
            ``"xavier"``, ``"truncated_normal"`` (standard deviation 0.02), ``"zeros"``, or
            a function of the shape and a generator.
        rng: A seed or a generator; the same seed gives the same table. None is random.
        dtype: float64, float32, float16 or bfloat16; None is float32.

    Example:
        >>> a, b = (initial((3, 2), rng=7, dtype="float16") for _ in range(2))
        >>> bool((a == b).all()), a.dtype.name
        (True, 'float16')
    """
    draw = INITS[one_of("init", init, tuple(INITS))] if isinstance(init, str) else init
    if not callable(draw):
        raise TypeError(f"init must be a name or a function, got {type(init).__name__}")
    table = np.asarray(draw(shape, np.random.default_rng(rng)))
    if table.shape != shape:
        raise ValueError(f"init must return an array of shape {shape}, got {table.shape}")
    return np.ascontiguousarray(table, dtype=float_dtype(dtype))


def whole_inside(
    ids: Integer[Any, "*batch"], *, first: int = 0, last: int
) -> tuple[Bool[Any, "*batch"], Int[Any, "*batch"]]:
    """Return which ids lie between ``first`` and ``last``, and the ids, 0 where not.

    For ids that cannot be refused, of any integer dtype that can be compared.

    Example:
        >>> inside, near = whole_inside(np.array([3, -1, 100], np.int8), last=300)
        >>> inside.tolist(), near.tolist()
        ([True, False, True], [3, 0, 100])
    """
    xp = namespace_of(ids)
    if ids.dtype.itemsize < 4:
        ids = cast(ids, "int32")  # int8 cannot be compared with 1024
    inside = ids <= last
    if "uint" not in str(ids.dtype):
        inside = inside & (ids >= first)
    elif last < 0:
        inside = xp.zeros_like(inside)  # a negative number is huge in JAX's uint32
    return inside, cast(xp.where(inside, ids, xp.zeros_like(ids)), "int32")


def within_norm(
    rows: Float[Any, "*lead embedding_dim"], *, max_norm: float, norm_type: float = 2.0
) -> Float[Any, "*lead embedding_dim"]:
    """Return ``min(1, max_norm / ‖row‖) · row``: long rows are shortened, others unchanged.

    Args:
        rows: In float32 or float64, of any array library.
        max_norm: The greatest norm a row may have. Positive.
        norm_type: The p of the p-norm, ``inf`` for the largest entry.

    Example:
        >>> within_norm(np.array([[3.0, 4.0], [0.3, 0.4]]), max_norm=1.0).round(6).tolist()
        [[0.6, 0.8], [0.3, 0.4]]
    """
    if max_norm == float("inf") or not rows.shape[-1]:
        return (
            rows  # nothing is longer; inf / inf and the largest of nothing are no numbers
        )
    xp = namespace_of(rows)
    size = xp.abs(rows)
    if norm_type == float("inf"):
        norm = xp.amax(size, axis=-1, keepdims=True)
    elif norm_type == 2.0:
        norm = xp.sqrt(xp.sum(rows * rows, axis=-1, keepdims=True))
    else:
        norm = xp.sum(size**norm_type, axis=-1, keepdims=True) ** (1.0 / norm_type)
    return rows * (max_norm / xp.clip(norm, max_norm, None))


def check_norm(max_norm: float | None, norm_type: float) -> tuple[float | None, float]:
    """Return both as floats if they are positive, as infinity is too."""
    if max_norm is not None:
        max_norm = positive_number("max_norm", max_norm, finite=False)
    return max_norm, positive_number("norm_type", norm_type, finite=False)


@dataclass(frozen=True)
class Resized:
    """What became of which row when a table changed its length.

    Args:
        kept: The ids whose rows are what they were.
        added: The ids that are new.
        dropped: The ids that are gone.
    """

    kept: range
    added: range
    dropped: range


def resized(
    weight: np.ndarray,
    num_embeddings: int,
    *,
    init: Init | np.ndarray = "mean",
    rng: Seed = None,
    padding_idx: int | None = None,
) -> tuple[np.ndarray, Resized]:
    """Return a table of ``num_embeddings`` rows that begins with the rows of ``weight``.

    Args:
        weight: The table as it is.
        num_embeddings: How many rows it shall have.
        init: New rows: ``"mean"`` gives each the mean of the old, so that a tied head gives
            no new token an edge; ``"gaussian"`` draws them with the mean and covariance of
            the old; an array holds them; otherwise as in :func:`initial`.
        rng: A seed or a generator, for what is drawn.
        padding_idx: A row that is no token: not part of the mean, and never dropped.

    Example:
        >>> table, what = resized(np.array([[1.0], [3.0]]), 3)
        >>> table.ravel().tolist(), what.added
        ([1.0, 3.0, 2.0], range(2, 3))
    """
    old, n = weight.shape[0], not_negative("num_embeddings", num_embeddings)
    if padding_idx is not None and padding_idx >= n:
        raise ValueError(
            f"num_embeddings must leave the padding row {padding_idx} in place, got {n}"
        )
    table = np.empty((n, weight.shape[1]), weight.dtype)
    table[:old] = weight[:n]
    if n > old:
        tokens = weight if padding_idx is None else np.delete(weight, padding_idx, axis=0)
        table[old:] = _new_rows(n - old, tokens, init, np.random.default_rng(rng))
    return table, Resized(range(min(old, n)), range(old, n), range(n, old))


def _new_rows(
    count: int, tokens: np.ndarray, init: Init | np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    shape = (count, tokens.shape[1])
    if isinstance(init, np.ndarray):
        if init.shape != shape:
            raise ValueError(f"init must have shape {shape}, got {init.shape}")
        return init
    if init not in ("mean", "gaussian"):
        return initial(shape, init=init, rng=rng, dtype=tokens.dtype)
    if not len(tokens):
        raise ValueError(f"init must not be {init!r} for a table without rows")
    mean = tokens.mean(axis=0, dtype=np.float64)
    if init == "mean":
        return np.broadcast_to(mean, shape)
    # Rows drawn as mean + noise · (centred rows) / √n have the covariance of the rows, and
    # no matrix of the width squared needs a root.
    noise = rng.standard_normal((count, len(tokens)))
    return mean + noise @ (tokens - mean) / np.sqrt(len(tokens))
