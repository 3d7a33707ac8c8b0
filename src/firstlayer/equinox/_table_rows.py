"""Forms of a table that a lookup reads: an array, some of its rows, or a stored table."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Integer

from .._check import float_dtype
from ..stores.row_store import RowStore


class RowSubset(eqx.Module):
    """Some rows of a table, used in its place; see :mod:`firstlayer.equinox.rows`.

    Args:
        ids: Ids of the rows, ascending and unique. The array has a fixed length, so unused
            entries at the end are numbers beyond the table. If the layer has a padding row,
            it is the last row, under such a number: it is read but never updated.
        values: The rows.
    """

    ids: Int32[Array, " rows"]
    values: Float[Array, "rows embedding_dim"]

    @property
    def dtype(self) -> Any:
        """Dtype of the rows."""
        return self.values.dtype

    def find(
        self, ids: Int32[Array, "*batch"]
    ) -> tuple[Int32[Array, "*batch"], Bool[Array, "*batch"]]:
        """Return the index of each id's row, and whether the subset has that row."""
        index = jnp.searchsorted(self.ids, ids).astype(jnp.int32)
        index = jnp.minimum(index, self.ids.shape[0] - 1)
        return index, self.ids.at[index].get(mode="promise_in_bounds") == ids


class StoredRows(eqx.Module):
    """A table that is decoded or read by the host, used in its place.

    See :mod:`firstlayer.equinox._stored`.

    Args:
        format_name: Name of the format of the rows.
        dtype_name: Dtype of the output.
    """

    format_name: str = eqx.field(static=True)
    dtype_name: str = eqx.field(static=True)

    @property
    @abstractmethod
    def values(self) -> Array:
        """The array whose sharding the output follows."""

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the output."""
        return float_dtype(self.dtype_name)

    @abstractmethod
    def take(self, index: Integer[Array, "*batch"]) -> Float[Array, "*batch width"]:
        """Return the rows of an index in range."""

    @abstractmethod
    def store(self) -> RowStore:
        """Return the rows as a store."""


#: A complete table, some of its rows, or a stored table.
Rows = Float[Array, "num_embeddings embedding_dim"] | RowSubset | StoredRows


def array_in(weight: Rows) -> Array:
    """Return the array that holds the rows of a table, for its sharding."""
    return weight.values if isinstance(weight, RowSubset | StoredRows) else weight
