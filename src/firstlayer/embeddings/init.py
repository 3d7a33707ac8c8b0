"""Initial values of embedding tables."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import kernels
from .._check import float_dtype, one_of

Init = str | Callable[[tuple[int, ...], np.random.Generator], Any]
Seed = int | np.random.Generator | None


def normal(
    shape: tuple[int, ...], rng: np.random.Generator, *, std: float = 1.0
) -> np.ndarray:
    """Draw from a normal distribution, the default of ``torch.nn.Embedding``."""
    out = kernels.aligned_empty(shape, np.float32)
    rng.standard_normal(dtype=np.float32, out=out)
    out *= np.float32(std)
    return out


def uniform(
    shape: tuple[int, ...], rng: np.random.Generator, *, limit: float = 0.05
) -> np.ndarray:
    """Draw uniformly from ``[-limit, limit)``, the default of Keras embeddings."""
    return _aligned(rng.uniform(-limit, limit, shape), np.float32)


def xavier(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw uniformly within ``√(6 / (rows + width))`` (Glorot and Bengio 2010)."""
    return uniform(shape, rng, limit=float(np.sqrt(6.0 / max(1, sum(shape)))))


def truncated_normal(
    shape: tuple[int, ...], rng: np.random.Generator, *, std: float = 0.02
) -> np.ndarray:
    """Draw from a normal distribution, redrawing entries beyond two ``std``."""
    out = normal(shape, rng)
    while (beyond := np.abs(out) > 2).any():
        out[beyond] = rng.standard_normal(int(beyond.sum()), dtype=np.float32)
    out *= np.float32(std)
    return out


def zeros(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return zeros."""
    return kernels.aligned_zeros(shape)


INITS = {
    "normal": normal,
    "uniform": uniform,
    "xavier": xavier,
    "truncated_normal": truncated_normal,
    "zeros": zeros,
}


def initial_table(
    shape: tuple[int, ...], *, init: Init = "normal", rng: Seed = None, dtype: Any = None
) -> np.ndarray:
    """Return a new table.

    It is aligned to cache lines, unless a function returns it in this dtype.

    Args:
        shape: Shape of the table.
        init: ``"normal"`` (standard deviation 1), ``"uniform"`` (within 0.05),
            ``"xavier"``, ``"truncated_normal"`` (standard deviation 0.02), ``"zeros"``, or
            a function of the shape and a generator.
        rng: Seed or generator. None draws a random seed.
        dtype: float64, float32, float16 or bfloat16; None is float32.

    Example:
        >>> a, b = (initial_table((3, 2), rng=7, dtype="float16") for _ in range(2))
        >>> bool((a == b).all()), a.dtype.name
        (True, 'float16')
    """
    draw = INITS[one_of("init", init, tuple(INITS))] if isinstance(init, str) else init
    if not callable(draw):
        raise TypeError(f"init must be a name or a function, got {type(init).__name__}")
    table = np.asarray(draw(shape, np.random.default_rng(rng)))
    if table.shape != shape:
        raise ValueError(f"init must return an array of shape {shape}, got {table.shape}")
    dtype = float_dtype(dtype)
    return np.ascontiguousarray(table) if table.dtype == dtype else _aligned(table, dtype)


def _aligned(table: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a copy in a dtype, aligned to cache lines."""
    out = kernels.aligned_empty(table.shape, dtype)
    out[...] = table
    return out
