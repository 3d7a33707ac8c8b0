"""Embeddings of hashed ids, of quotients and remainders, and of frequent ids in JAX.

Without ``jax_enable_x64``, JAX has no 64-bit integers: ids that need more than 32 bits are
passed as NumPy arrays or lists to an eager call, or as pairs of 32 bits; see
:func:`firstlayer.equinox.split_ids`. Rows are computed with 64-bit integers in either case.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Integer

from .._array import axis_specs, exact_integers
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
    joined_pairs,
    sorted_frequent,
    vector_width,
)
from ._constant import Constant
from ._ids import host_values
from ._module import Module, replace_fields
from ._parameters import Init, Key
from ._row_shards import replicated_like
from ._sharding import Spec, with_sharding
from .bag import EmbeddingBag
from .token import Embedding

Ids = Integer[Array, "*batch"] | Integer[np.ndarray, "*batch"] | list[Any] | int | Any


class CombinedRows(Module):
    """Base class of layers that combine several rows of one table for each id."""

    table: Embedding | EmbeddingBag
    combine: eqx.AbstractVar[str]
    embedding_dim: eqx.AbstractVar[int]

    def __call__(
        self, ids: Ids, *, key: Key | None = None
    ) -> Float[Array, "*batch embedding_dim"]:
        """Return the vectors of the ids.

        Args:
            ids: Ids of any shape and any integer dtype; uint32 JAX arrays are pairs of the
                low and the high 32 bits, ``(*batch, 2)``.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        rows = self._rows(ids)
        weights = self._weights(ids)
        shape = rows.shape[:-1]
        if isinstance(self.table, EmbeddingBag):
            flat = None if weights is None else weights.reshape(-1, rows.shape[-1])
            pooled = self.table(rows.reshape(-1, rows.shape[-1]), None, flat)
            return pooled.reshape(*shape, self.embedding_dim)
        vectors = self.table(rows)
        if self.combine == "multiply":
            return vectors[..., 0, :] * vectors[..., 1, :]
        if weights is not None:
            vectors = vectors * weights[..., None]
        return vectors.reshape(*shape, self.embedding_dim)

    def parameters(self) -> dict[str, Float[Array, "rows width"]]:
        parts = {"table": self.table, "importance": getattr(self, "importance", None)}
        return {
            f"{part}.weight": layer.parameters()["weight"]
            for part, layer in parts.items()
            if layer is not None
        }

    def _replace_parameters(self, parameters: dict[str, Any]) -> Any:
        layers = {}
        for name, weight in parameters.items():
            part = name.removesuffix(".weight")
            layers[part] = getattr(self, part).with_parameters({"weight": weight})
        return replace_fields(self, **layers)

    def _rows(self, ids: Ids) -> Integer[Array, "*batch columns"]:
        """Return the rows of each id."""
        raise NotImplementedError

    def _weights(self, ids: Ids) -> Array | None:
        """Return the factor of each row of each id, or None."""
        return None


def _rows_by(rows: Any, ids: Ids, *, num_rows: int, **constants: Constant) -> Any:
    """Return the rows of ids, computed with 64-bit integers, as int32."""
    if num_rows > 2**31 - 1:
        raise ValueError(f"a table must have fewer than 2**31 rows, got {num_rows}")
    if not isinstance(ids, jax.Array):
        arrays = {name: constant.array for name, constant in constants.items()}
        return rows(int64_bits(ids), **arrays).astype(np.int32)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    if ids.dtype == jnp.uint32 and ids.shape[-1:] != (2,):
        raise ValueError(
            "ids of dtype uint32 must be pairs of low and high bits, (..., 2), "
            f"got shape {ids.shape}"
        )
    is_pairs = ids.dtype == jnp.uint32

    def run(ids: Array) -> Array:
        with exact_integers(ids):
            wide = joined_pairs(ids) if is_pairs else ids.astype(jnp.int64)
            arrays = {name: jnp.asarray(value.array) for name, value in constants.items()}
            return rows(wide, **arrays).astype(jnp.int32)

    def spec() -> Spec:
        batch = ids.ndim - is_pairs
        return (*axis_specs(ids)[:batch], None)

    return with_sharding(run, ids, out_sharding=None, default=spec)


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
        init: Initial values of the table, as for :class:`Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for the table.
        sharding: Where to place the table on a mesh, as for :class:`Embedding`.

    Shape:
        - ids: any shape, any integer dtype, lists; uint32 JAX arrays are pairs
          ``(*batch, 2)``, see :func:`firstlayer.equinox.split_ids`
        - output: ``(*batch, embedding_dim)``, in the table's dtype

    Example:
        >>> from firstlayer.equinox import split_ids
        >>> embedding = HashedEmbedding(1000, 8, hashes=2, key=jax.random.key(0))
        >>> y = embedding([[3, 2**40, -1]])
        >>> pairs = jnp.asarray(split_ids([[3, 2**40, -1]]))
        >>> y.shape, bool((eqx.filter_jit(embedding)(pairs) == y).all())
        ((1, 3, 8), True)
    """

    importance: Embedding | None
    rows: HashedRows = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    combine: str = eqx.field(static=True)
    importance_rows: int = eqx.field(static=True)

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
        key: Key | None = None,
        sharding: NamedSharding | None = None,
    ) -> None:
        self.rows = HashedRows(num_rows=num_rows, hashes=hashes, seed=seed)
        self.embedding_dim, self.combine = embedding_dim, combine
        width = vector_width(
            embedding_dim, columns=hashes, combine=combine, allowed=COMBINE_HASHES
        )
        self.table = _table(
            num_rows,
            width,
            combine=combine,
            init=init,
            dtype=dtype,
            key=key,
            sharding=sharding,
        )
        self.importance_rows = not_negative("importance_rows", importance_rows)
        self.importance = None
        if importance_rows:
            ones = jnp.ones((importance_rows, hashes), self.table.weight.dtype)
            # Its width is small, so every device has it.
            replicated = replicated_like(sharding)
            self.importance = Embedding(weight=ones, sharding=replicated)

    def _rows(self, ids: Ids) -> Array:
        return _rows_by(self.rows, ids, num_rows=self.num_rows)

    def _weights(self, ids: Ids) -> Array | None:
        if self.importance is None:
            return None
        rows = self.rows.importance(self.importance_rows)
        return self.importance(_rows_by(rows, ids, num_rows=rows.num_rows)[..., 0])


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
        init: Initial values of the table, as for :class:`Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for the table.
        sharding: Where to place the table on a mesh, as for :class:`Embedding`.

    Shape:
        - ids: any shape, any integer dtype, lists; uint32 JAX arrays are pairs
          ``(*batch, 2)``, see :func:`firstlayer.equinox.split_ids`
        - output: ``(*batch, embedding_dim)``, in the table's dtype

    An id out of range is an IndexError; traced, or on an accelerator, its vector is NaN.

    Example:
        >>> embedding = QuotientRemainderEmbedding(1_000_000, 8, key=jax.random.key(0))
        >>> embedding([3, 999_999]).shape, embedding.table.num_embeddings
        ((2, 8), 2000)
    """

    rows: QuotientRemainderRows = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    combine: str = eqx.field(static=True)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        buckets: int | None = None,
        combine: str = "multiply",
        init: Init = "normal",
        dtype: Any = None,
        key: Key | None = None,
        sharding: NamedSharding | None = None,
    ) -> None:
        self.rows = QuotientRemainderRows.of(num_embeddings, buckets)
        self.embedding_dim, self.combine = embedding_dim, combine
        width = vector_width(embedding_dim, columns=2, combine=combine)
        self.table = _table(
            self.rows.num_rows,
            width,
            combine=combine,
            init=init,
            dtype=dtype,
            key=key,
            sharding=sharding,
        )

    def _rows(self, ids: Ids) -> Array:
        values = host_values(ids)
        if values is not None and not (
            isinstance(ids, jax.Array) and ids.dtype == jnp.uint32
        ):
            checked = ids_in_range(values, self.num_embeddings)
            ids = ids if isinstance(ids, jax.Array) else checked
        return _rows_by(self.rows, ids, num_rows=self.rows.num_rows)


class FrequencyEmbedding(HashedArguments, CombinedRows):
    """Rows of their own for frequent ids, sums of hashed rows for all other 64-bit ids.

    Args:
        frequent_ids: Ids with a row of their own, any 64-bit integers.
        num_rows: Number of rows that the other ids are hashed to.
        embedding_dim: Width of each vector.
        hashes: Number of rows for each of the other ids.
        seed: Seed of the hashes.
        init: Initial values of the table, as for :class:`Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.
        key: Random key for the table.
        sharding: Where to place the table on a mesh, as for :class:`Embedding`.

    Shape:
        - ids: any shape, any integer dtype, lists; uint32 JAX arrays are pairs
          ``(*batch, 2)``, see :func:`firstlayer.equinox.split_ids`
        - output: ``(*batch, embedding_dim)``, in the table's dtype

    Row ``i`` of ``table.weight`` belongs to ``frequent_ids[i]``. The last row is
    padding: a frequent id has one row instead of ``hashes`` rows.

    Example:
        >>> embedding = FrequencyEmbedding([7, 2**40], 100, 8, key=jax.random.key(0))
        >>> bool((embedding([2**40]) == embedding.table.weight[1]).all())
        True
    """

    rows: FrequencyRows = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    combine: str = eqx.field(static=True)
    _frequent: Constant = eqx.field(static=True)
    _order: Constant = eqx.field(static=True)

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
        key: Key | None = None,
        sharding: NamedSharding | None = None,
    ) -> None:
        frequent, order = sorted_frequent(frequent_ids)
        self._frequent, self._order = Constant(frequent), Constant(order)
        hashed = HashedRows(num_rows=num_rows, hashes=hashes, seed=seed)
        self.rows = FrequencyRows(num_frequent=frequent.size, hashed=hashed)
        self.embedding_dim, self.combine = embedding_dim, "sum"
        self.table = _table(
            self.rows.num_rows,
            vector_width(embedding_dim, columns=hashes, combine="sum"),
            combine="sum",
            padding_idx=-1,
            init=init,
            dtype=dtype,
            key=key,
            sharding=sharding,
        )

    @property
    def frequent_ids(self) -> Integer[np.ndarray, " frequent"]:
        """Ids with a row of their own, in the order of their rows."""
        return in_given_order(self._frequent.array, self._order.array)

    def _rows(self, ids: Ids) -> Array:
        constants = {"frequent": self._frequent, "order": self._order}
        return _rows_by(self.rows, ids, num_rows=self.rows.num_rows, **constants)


def _table(
    rows: int, width: int, *, combine: str, **options: Any
) -> Embedding | EmbeddingBag:
    if combine == "sum":
        return EmbeddingBag(rows, width, mode="sum", **options)
    return Embedding(rows, width, **options)
