"""Embeddings of hashed ids, of quotients and remainders, and of frequent ids on torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from .._check import not_negative
from ..embeddings.hashed import (
    COMBINE_HASHES,
    FrequencyRows,
    HashedArguments,
    HashedRows,
    QuotientRemainderArguments,
    QuotientRemainderRows,
    sorted_frequent,
    vector_width,
)
from ..files.layer_configs import config_of
from ._table.lookup import as_index
from ._tensors.buffers import PrecomputedBuffers
from ._tensors.dtypes import as_torch_dtype, dtype_name
from ._tensors.errors import check_ids, check_tensor, torch_errors
from .bag import EmbeddingBag
from .token import Embedding


class CombinedRows(nn.Module):
    """Base class of layers that combine several rows of one table for each id."""

    table: Embedding | EmbeddingBag
    combine: str
    embedding_dim: int

    def forward(
        self, ids: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the vectors of the ids.

        Args:
            ids: Ids of any shape and any integer dtype.
        """
        try:
            check_tensor(ids, name="ids")
            ids = as_index(ids).long()
            rows = self._rows(ids)
        except Exception as error:
            self.table.announce(error)
            raise
        weights = self._weights(ids)
        if isinstance(self.table, EmbeddingBag):
            flat = None if weights is None else weights.reshape(-1, rows.shape[-1])
            pooled = self.table(rows.reshape(-1, rows.shape[-1]), per_sample_weights=flat)
            return pooled.reshape(*ids.shape, self.embedding_dim)
        vectors = self.table(rows)
        if self.combine == "multiply":
            return vectors[..., 0, :] * vectors[..., 1, :]
        if weights is not None:
            vectors = vectors * weights[..., None]
        return vectors.flatten(-2)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> config = HashedEmbedding(1000, 8, hashes=3).config()
            >>> config["num_rows"], config["hashes"]
            (1000, 3)
        """
        return config_of(self, dtype=dtype_name(self.table.weight.dtype))

    def _rows(self, ids: Integer[Tensor, "*batch"]) -> Integer[Tensor, "*batch columns"]:
        """Return the rows of each id."""
        raise NotImplementedError

    def _weights(self, ids: Integer[Tensor, "*batch"]) -> Tensor | None:
        """Return the factor of each row of each id, or None."""
        return None


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
        sparse: Make the gradients of the tables coalesced sparse tensors.
        device: Device of the tables.
        dtype: Dtype of the tables.

    Shape:
        - ids: any shape, any integer dtype; negative ids too
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    Example:
        >>> embedding = HashedEmbedding(1000, 8, hashes=2, sparse=True)
        >>> embedding(torch.tensor([[3, 2**40, -1]])).shape
        torch.Size([1, 3, 8])
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
        sparse: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        with torch_errors():
            self.rows = HashedRows(num_rows=num_rows, hashes=hashes, seed=seed)
            width = vector_width(
                embedding_dim, columns=hashes, combine=combine, allowed=COMBINE_HASHES
            )
            self.importance_rows = not_negative("importance_rows", importance_rows)
        self.embedding_dim, self.combine, self.sparse = embedding_dim, combine, sparse
        options = {"sparse": sparse, "device": device, "dtype": as_torch_dtype(dtype)}
        self.table = _table(num_rows, width, combine=combine, **options)
        self.importance = None
        if importance_rows:
            self.importance = Embedding(importance_rows, hashes, **options)
            nn.init.ones_(self.importance.weight)
            self._importance = self.rows.importance(importance_rows)

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.embedding_dim}, hashes={self.hashes}"

    def _rows(self, ids: Tensor) -> Tensor:
        return self.rows(ids)

    def _weights(self, ids: Tensor) -> Tensor | None:
        if self.importance is None:
            return None
        return self.importance(self._importance(ids)[..., 0])


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
        sparse: Make the gradient of the table a coalesced sparse tensor.
        device: Device of the table.
        dtype: Dtype of the table.

    Shape:
        - ids: any shape, any integer dtype
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    Example:
        >>> embedding = QuotientRemainderEmbedding(1_000_000, 8)
        >>> embedding(torch.tensor([3, 999_999])).shape, embedding.table.num_embeddings
        (torch.Size([2, 8]), 2000)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        buckets: int | None = None,
        combine: str = "multiply",
        sparse: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        with torch_errors():
            self.rows = QuotientRemainderRows.of(num_embeddings, buckets)
            width = vector_width(embedding_dim, columns=2, combine=combine)
        self.embedding_dim, self.combine, self.sparse = embedding_dim, combine, sparse
        options = {"sparse": sparse, "device": device, "dtype": as_torch_dtype(dtype)}
        self.table = _table(self.rows.num_rows, width, combine=combine, **options)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, buckets={self.buckets}"

    def _rows(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.num_embeddings)
        return self.rows(ids)


class FrequencyEmbedding(HashedArguments, CombinedRows, PrecomputedBuffers):
    """Rows of their own for frequent ids, sums of hashed rows for all other 64-bit ids.

    Args:
        frequent_ids: Ids with a row of their own, any 64-bit integers.
        num_rows: Number of rows that the other ids are hashed to.
        embedding_dim: Width of each vector.
        hashes: Number of rows for each of the other ids.
        seed: Seed of the hashes.
        sparse: Make the gradient of the table a coalesced sparse tensor.
        device: Device of the table.
        dtype: Dtype of the table.

    Shape:
        - ids: any shape, any integer dtype; negative ids too
        - output: ``(*ids.shape, embedding_dim)``, in the table's dtype

    Row ``i`` of ``table.weight`` belongs to ``frequent_ids[i]``. The last row is
    padding: a frequent id has one row instead of ``hashes`` rows.

    Example:
        >>> embedding = FrequencyEmbedding([7, 2**40], 100, 8)
        >>> bool((embedding(torch.tensor([2**40])) == embedding.table.weight[1]).all())
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
        sparse: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        with torch_errors():
            frequent, order = sorted_frequent(frequent_ids)
            hashed = HashedRows(num_rows=num_rows, hashes=hashes, seed=seed)
            width = vector_width(embedding_dim, columns=hashes, combine="sum")
        self.rows = FrequencyRows(num_frequent=frequent.size, hashed=hashed)
        self.embedding_dim, self.combine, self.sparse = embedding_dim, "sum", sparse
        self.table = EmbeddingBag(
            self.rows.num_rows,
            width,
            mode="sum",
            padding_idx=-1,
            sparse=sparse,
            device=device,
            dtype=as_torch_dtype(dtype),
        )
        self._sorted = {"frequent": frequent, "order": order}
        self._build(None if device is None else torch.device(device))

    @property
    def frequent_ids(self) -> Integer[Tensor, " frequent"]:
        """Ids with a row of their own, in the order of their rows."""
        frequent, order = self._of_frequent(self.table.weight.device)
        return torch.empty_like(frequent).scatter_(0, order, frequent)

    def extra_repr(self) -> str:
        frequent = self.rows.num_frequent
        return f"{frequent} frequent ids, {self.num_rows}, {self.embedding_dim}"

    def _rows(self, ids: Tensor) -> Tensor:
        frequent, order = self._of_frequent(ids.device)
        return self.rows(ids, frequent=frequent, order=order)

    def _tables(self) -> dict[str, np.ndarray]:
        return self._sorted

    def _of_frequent(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the frequent ids in ascending order, and the row of each."""
        frequent, order = (
            self._integers(name, device, torch.int64) for name in self._sorted
        )
        return frequent, order


def _table(
    rows: int, width: int, *, combine: str, **options: Any
) -> Embedding | EmbeddingBag:
    if combine == "sum":
        return EmbeddingBag(rows, width, mode="sum", **options)
    return Embedding(rows, width, **options)
