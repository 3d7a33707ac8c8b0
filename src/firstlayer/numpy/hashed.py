"""Embeddings of hashed ids, of quotients and remainders, and of frequent ids on NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

from .._check import ids_in_range, not_negative
from ..embeddings.hashed import (
    COMBINE_HASHES,
    FrequencyRows,
    HashedArguments,
    HashedRows,
    QuotientRemainderArguments,
    QuotientRemainderRows,
    in_given_order,
    int64_bits,
    sorted_frequent,
    vector_width,
)
from ..embeddings.init import Init, Seed
from ..embeddings.row_gradient import RowGradient
from ..files.layer_configs import config_of
from ._module import Module, checked_gradient, upcast
from .bag import EmbeddingBag
from .token import Embedding

Ids = Integer[Any, "*batch"] | Sequence[Any] | int


class CombinedRows(Module):
    """Base class of layers that combine several rows of one table for each id."""

    table: Embedding
    importance: Embedding | None = None
    combine: str
    embedding_dim: int

    def _rows(self, ids: Ids) -> np.ndarray:
        """Return the rows of each id, ``(..., columns)``."""
        raise NotImplementedError

    def _importance_rows(self, ids: Ids) -> np.ndarray:
        """Return the row of each id in the table of importance."""
        raise NotImplementedError

    def __call__(self, ids: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return the vectors of the ids.

        Args:
            ids: Ids of any shape and any integer dtype.
        """
        return self._forward(ids)[0]

    def vjp(
        self, ids: Ids
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, RowGradient]]]:
        """Return the output and its pullback, to the row gradients of the tables.

        Example:
            >>> from firstlayer.numpy import HashedEmbedding
            >>> layer = HashedEmbedding(100, 4, rng=0)
            >>> vectors, pull = layer.vjp([2**40, -7])
            >>> gradients = pull(np.ones_like(vectors))
            >>> sorted(gradients) == sorted(layer.parameters())
            True
        """
        return self._forward(ids)

    def _forward(self, ids: Ids) -> tuple[np.ndarray, Callable[[np.ndarray], Any]]:
        rows = self._rows(ids)
        shape, columns = rows.shape[:-1], rows.shape[-1]
        rows = rows.reshape(-1, columns)
        weights, pull_weights = None, None
        if self.importance is not None:
            weights, pull_weights = self.importance.vjp(
                self._importance_rows(ids).reshape(-1)
            )
        if isinstance(self.table, EmbeddingBag):
            y, pull_table = self.table.vjp(rows, None, weights)
        else:
            y, pull_table = self._combined(rows, weights)

        def pull(dy: np.ndarray) -> dict[str, RowGradient]:
            dy = checked_gradient(dy, (*shape, self.embedding_dim))
            gradients = pull_table(dy.reshape(y.shape))
            result = {"table.weight": gradients["weight"]}
            if pull_weights is not None:
                dweights = gradients["per_sample_weights"]
                result["importance.weight"] = pull_weights(dweights)["weight"]
            return result

        return y.reshape(*shape, self.embedding_dim), pull

    def _combined(
        self, rows: np.ndarray, weights: np.ndarray | None
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, Any]]]:
        """Return concatenated or multiplied rows, and the pullback."""
        vectors, pull_rows = self.table.vjp(rows)
        dtype, wide = vectors.dtype, upcast(vectors)
        factors = None if weights is None else upcast(weights)[..., None]
        if self.combine == "multiply":
            y = wide[:, 0] * wide[:, 1]
        else:
            y = wide if factors is None else wide * factors
            y = y.reshape(len(rows), self.embedding_dim)

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = upcast(dy)
            if self.combine == "multiply":
                return pull_rows(d[:, None] * wide[:, ::-1])
            d = d.reshape(wide.shape)
            if factors is None:
                return pull_rows(d)
            return {**pull_rows(d * factors), "per_sample_weights": (d * wide).sum(-1)}

        return y.astype(dtype, copy=False), pull

    def parameters(self) -> dict[str, np.ndarray]:
        parts = {"table": self.table, "importance": self.importance}
        return {
            f"{part}.weight": layer.parameters()["weight"]
            for part, layer in parts.items()
            if layer is not None
        }

    def config(self) -> dict[str, Any]:
        return config_of(self, dtype=self.table.weight.dtype.name)


class HashedEmbedding(HashedArguments, CombinedRows):
    """Vectors of any 64-bit ids: each id is hashed to several rows of one table.

    Two ids share all rows only if every hash collides. See
    :mod:`firstlayer.embeddings.hashed` for the hash, which is the same in every front end
    and version.

    Args:
        num_rows: Number of rows of the table.
        embedding_dim: Width of each vector.
        hashes: Number of rows for each id.
        combine: ``"sum"``, or ``"concat"`` for rows of ``embedding_dim / hashes``.
        importance_rows: Number of rows of a second table, with a learned weight for each
            hash (hash embeddings, Svenstrup et al. 2017); 0 for none. Weights start at 1.
        seed: Seed of the hashes.
        init: Initial values of the table; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - ids: any shape, any integer dtype, or lists; negative ids too
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    Example:
        >>> embedding = HashedEmbedding(1000, 8, hashes=2, rng=0)
        >>> embedding([[3, 2**40, -1]]).shape
        (1, 3, 8)
        >>> y, pull = embedding.vjp([2**40])
        >>> len(pull(np.ones_like(y))["table.weight"].ids)
        2
    """

    def __init__(
        self,
        num_rows: int,
        embedding_dim: int,
        *,
        hashes: int = 2,
        combine: str = "sum",
        importance_rows: int = 0,
        seed: int = 0,
        init: Init = "normal",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.rows = HashedRows(num_rows=num_rows, hashes=hashes, seed=seed)
        self.embedding_dim, self.combine = embedding_dim, combine
        width = vector_width(
            embedding_dim, columns=hashes, combine=combine, allowed=COMBINE_HASHES
        )
        self.table = _table(
            num_rows, width, combine=combine, init=init, dtype=dtype, rng=rng
        )
        self.importance_rows = not_negative("importance_rows", importance_rows)
        if importance_rows:
            ones = np.ones((importance_rows, hashes), self.table.weight.dtype)
            self.importance = Embedding(weight=ones)
            self._importance = self.rows.importance(importance_rows)

    def _rows(self, ids: Ids) -> np.ndarray:
        return self.rows(int64_bits(ids))

    def _importance_rows(self, ids: Ids) -> np.ndarray:
        return self._importance(int64_bits(ids))[..., 0]


class QuotientRemainderEmbedding(QuotientRemainderArguments, CombinedRows):
    """A vector of its own for every id, from few rows (Shi et al. 2019).

    The vector combines the row of the id's remainder with the row of its quotient:
    ``buckets + ⌈num_embeddings / buckets⌉`` rows in one table instead of
    ``num_embeddings``.

    Args:
        num_embeddings: Number of ids.
        embedding_dim: Width of each vector.
        buckets: Number of remainders; None is about the root of ``num_embeddings``.
        combine: ``"multiply"``, ``"sum"``, or ``"concat"`` for rows of half the width.
        init: Initial values of the table; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - ids: any shape, any integer dtype, or lists
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    Example:
        >>> embedding = QuotientRemainderEmbedding(1_000_000, 8, rng=0)
        >>> embedding([3, 999_999]).shape, embedding.table.num_embeddings
        ((2, 8), 2000)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        buckets: int | None = None,
        combine: str = "multiply",
        init: Init = "normal",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self.rows = QuotientRemainderRows.of(num_embeddings, buckets)
        self.embedding_dim, self.combine = embedding_dim, combine
        width = vector_width(embedding_dim, columns=2, combine=combine)
        self.table = _table(
            self.rows.num_rows, width, combine=combine, init=init, dtype=dtype, rng=rng
        )

    def _rows(self, ids: Ids) -> np.ndarray:
        return self.rows(ids_in_range(ids, self.num_embeddings))


class FrequencyEmbedding(HashedArguments, CombinedRows):
    """Rows of their own for frequent ids, sums of hashed rows for all other 64-bit ids.

    Args:
        frequent_ids: Ids with a row of their own, any 64-bit integers.
        num_rows: Number of rows that the other ids are hashed to.
        embedding_dim: Width of each vector.
        hashes: Number of rows for each of the other ids.
        seed: Seed of the hashes.
        init: Initial values of the table; see
            :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - ids: any shape, any integer dtype, or lists; negative ids too
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    Row ``i`` of ``table.weight`` belongs to ``frequent_ids[i]``. The last row is
    padding: a frequent id has one row instead of ``hashes`` rows.

    Example:
        >>> embedding = FrequencyEmbedding([7, 2**40], 100, 8, rng=0)
        >>> bool((embedding([2**40]) == embedding.table.weight[1]).all())
        True
    """

    def __init__(
        self,
        frequent_ids: Integer[Any, " frequent"] | Sequence[int],
        num_rows: int,
        embedding_dim: int,
        *,
        hashes: int = 2,
        seed: int = 0,
        init: Init = "normal",
        dtype: Any = None,
        rng: Seed = None,
    ) -> None:
        self._frequent, self._order = sorted_frequent(frequent_ids)
        hashed = HashedRows(num_rows=num_rows, hashes=hashes, seed=seed)
        self.rows = FrequencyRows(num_frequent=self._frequent.size, hashed=hashed)
        self.embedding_dim, self.combine = embedding_dim, "sum"
        self.table = _table(
            self.rows.num_rows,
            vector_width(embedding_dim, columns=hashes, combine="sum"),
            combine="sum",
            init=init,
            dtype=dtype,
            rng=rng,
            padding_idx=-1,
        )

    @property
    def frequent_ids(self) -> np.ndarray:
        """Ids with a row of their own, in the order of their rows."""
        return in_given_order(self._frequent, self._order)

    def _rows(self, ids: Ids) -> np.ndarray:
        bits = int64_bits(ids)
        return self.rows(bits, frequent=self._frequent, order=self._order)


def _table(rows: int, width: int, *, combine: str, **options: Any) -> Embedding:
    if combine == "sum":
        return EmbeddingBag(rows, width, mode="sum", **options)
    return Embedding(rows, width, **options)
