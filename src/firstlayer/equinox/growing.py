"""Embedding of ids that get a row when they are first seen, for Equinox.

Ids are mapped to rows on the host, before compiled code: compiled functions take rows. The
map is one object that all copies of a layer share and that ``assign`` changes in place, so
that a new id neither compiles anything again nor copies the map.
"""

from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Int64

from ..embeddings.growing import GrowingArguments, InitialRows
from ..embeddings.hashed import int64_bits
from ..embeddings.id_map import Assigned, IdMap
from ..files.layer_configs import ID_MAP
from ._module import Module, is_concrete, replace_fields
from ._parameters import Key, table_dtype
from ._table import Ids
from .token import Embedding


class GrowingEmbedding(GrowingArguments, Module):
    """Vectors of any 64-bit ids: an id gets a row when training first sees it.

    When all rows are taken, the id that was used least recently or least frequently
    loses its row, and its optimizer state with it: an id that comes back starts again. Ids
    without a row read the unknown row, row 0 of ``table.weight``, which starts at zero and
    is trained like any other.

    Rows are assigned on the host: ``rows, layer = layer.assign(ids)``, or, if a row
    optimizer trains the table, ``rows, state = optimizer.assign(model, state, ids)``. Pass
    the rows into the compiled step and look them up there with ``layer.table(rows)``. A
    call of the layer itself looks up ids on the host and changes nothing.

    Args:
        capacity: Number of rows, without the unknown row.
        embedding_dim: Width of each vector.
        evict: Which id loses its row to a new one: ``"lru"`` (least recently used),
            ``"lfu"`` (least frequently used), or None: once all rows are taken, new
            ids read the unknown row.
        min_count: Number of times that an id must have been seen to get a row. The counts
            of the last ``capacity`` ids without a row are kept.
        init: Distribution of new rows: ``"normal"`` (standard deviation 1), ``"uniform"``
            (within 0.05), ``"xavier"``, ``"truncated_normal"`` (standard deviation 0.02) or
            ``"zeros"``.
        seed: Seed of the initial values. The initial row of an id follows from the seed
            and the id alone; see :mod:`firstlayer.embeddings.growing`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default.

    Shape:
        - ids: any shape, any integer dtype, lists; uint32 JAX arrays are pairs
          ``(*batch, 2)``, see :func:`firstlayer.equinox.split_ids`
        - output: ``(*batch, embedding_dim)``, in the table's dtype

    The row optimizers of :mod:`firstlayer.equinox.optim` give a new row the state of a new
    table's rows. Other optimizers do not know of it: there the next id inherits the state.

    A batch with more different ids than ``capacity`` is a ValueError. Rows are those of the
    last ``assign``, which may have given earlier ones to other ids: assign all ids of one
    step in one call, and use the layer that ``assign`` returns. All copies of a layer share
    its ids; ``copy.deepcopy`` copies them. ``firstlayer.equinox.save`` and ``state`` have
    the ids, ``eqx.tree_serialise_leaves`` does not.

    Example:
        >>> embedding = GrowingEmbedding(2, 4, evict="lru")
        >>> rows, embedding = embedding.assign([2**40, -1, 2**40])
        >>> rows.tolist(), embedding.rows([2**40, -1, 5]).tolist()
        ([1, 2, 1], [1, 2, 0])
        >>> eqx.filter_jit(lambda layer, rows: layer.table(rows))(embedding, rows).shape
        (3, 4)
    """

    table: Embedding
    id_map: IdMap = eqx.field(static=True)
    initial: InitialRows = eqx.field(static=True)

    def __init__(
        self,
        capacity: int,
        embedding_dim: int,
        *,
        evict: str | None = "lru",
        min_count: int = 1,
        init: str = "normal",
        seed: int = 0,
        dtype: Any = None,
    ) -> None:
        self.id_map = IdMap(capacity, evict=evict, min_count=min_count)
        self.initial = InitialRows(
            width=embedding_dim, init=init, seed=seed, capacity=capacity
        )
        shape = capacity + 1, embedding_dim
        self.table = Embedding(weight=jnp.zeros(shape, table_dtype(dtype)))

    @property
    def ids(self) -> Int64[np.ndarray, " ids"]:
        """Ids that have a row, in the order of their rows, from row 1 on."""
        return self.id_map.ids

    def rows(self, ids: Ids) -> Int32[np.ndarray, "*batch"]:
        """Return the row of each id, 0 for ids without one; change nothing."""
        return self.id_map.find(host_bits(ids)).astype(np.int32)

    def assign(self, ids: Ids) -> tuple[Int32[np.ndarray, "*batch"], Self]:
        """Give rows to new ids; return the row of each id, and a layer with these rows.

        The table is copied if an id is new. The row optimizers' ``assign`` writes to it in
        place instead.

        Args:
            ids: All ids of a step.
        """
        weight = self.table.weight
        if not isinstance(weight, jax.Array):
            raise TypeError(
                "the table is in the state of an optimizer: call "
                "optimizer.assign(model, state, ids)"
            )
        assigned = self.id_map.assign(host_bits(ids))
        if assigned.new_rows.size:
            new_rows, values = self.new_rows(assigned, weight.dtype)
            weight = weight.at[new_rows].set(values, mode="drop")
        table = replace_fields(self.table, weight=weight)
        return assigned.rows.astype(np.int32), replace_fields(self, table=table)

    def new_rows(
        self, assigned: Assigned, dtype: Any
    ) -> tuple[Int32[np.ndarray, " n"], Float[np.ndarray, "n embedding_dim"]]:
        """Return the new rows of a batch, ascending, and their initial values.

        Padded to a power of two with row numbers beyond the table, because each size is
        compiled separately.

        Args:
            assigned: Rows of the batch.
            dtype: Dtype of the values.
        """
        rows, end = assigned.new_rows, self.capacity + 1
        order = np.argsort(rows)
        more = (1 << (rows.size - 1).bit_length()) - rows.size
        rows = np.append(rows[order], np.arange(end, end + more)).astype(np.int32)
        values = self.initial(assigned.new_ids[order]).astype(np.dtype(dtype))
        return rows, np.pad(values, ((0, more), (0, 0)))

    def __call__(
        self, ids: Ids, *, key: Key | None = None
    ) -> Float[Array, "*batch embedding_dim"]:
        """Return the vectors of ids that are on the host.

        Args:
            ids: Ids of any shape and any integer dtype.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        return self.table(self.rows(ids))

    def parameters(self) -> dict[str, Float[Array, "rows embedding_dim"]]:
        return {"table.weight": self.table.weight}

    def state(self) -> dict[str, np.ndarray]:
        """Return the table and the ids of its rows, by name, as NumPy arrays.

        If the table is in the state of an optimizer, only the ids: save them with that
        state, and restore them by :meth:`with_state`.

        Example:
            >>> rows, layer = GrowingEmbedding(4, 2).assign([2**40, 7])
            >>> GrowingEmbedding(4, 2).with_state(layer.state()).rows([7, 8]).tolist()
            [2, 0]
        """
        arrays = {ID_MAP + name: array for name, array in self.id_map.state().items()}
        if not isinstance(self.table.weight, jax.Array):
            return arrays
        return {"table.weight": np.asarray(self.table.weight), **arrays}

    def with_state(self, state: dict[str, Any]) -> Self:
        """Return a layer with the arrays of :meth:`state`, and a map of its own.

        If the table is in the state of an optimizer, leave ``"table.weight"`` out.

        Args:
            state: Arrays by name.
        """
        parts = {name: state[name] for name in state if name.startswith(ID_MAP)}
        rest = {name: state[name] for name in state if name not in parts}
        ids = {name.removeprefix(ID_MAP): np.asarray(x) for name, x in parts.items()}
        unknown = sorted(ids.keys() - set(self.id_map.state_names))
        if unknown:
            raise ValueError(f"a state of ids has no arrays {unknown}")
        new = replace_fields(self, id_map=self.id_map.restored(ids))
        is_detached = not isinstance(self.table.weight, jax.Array)
        return new if is_detached and not rest else new.with_parameters(rest)

    def _replace_parameters(self, parameters: dict[str, Any]) -> Self:
        table = replace_fields(self.table, weight=parameters["table.weight"])
        return replace_fields(self, table=table)


def host_bits(ids: Ids) -> Int64[np.ndarray, "*batch"]:
    """Return ids as int64 on the host; pairs of 32 bits are joined."""
    if not is_concrete(ids):
        raise TypeError(
            "ids must have values on the host, got traced ones; pass layer.rows(ids) or "
            "the rows of assign into the compiled function, and call layer.table(rows)"
        )
    if not isinstance(ids, jax.Array):
        return int64_bits(ids)
    array = np.asarray(ids)
    if array.dtype != np.uint32:
        return int64_bits(array)
    if array.shape[-1:] != (2,):
        raise ValueError(
            "ids of dtype uint32 must be pairs of low and high bits, (..., 2), "
            f"got shape {array.shape}"
        )
    return np.ascontiguousarray(array).view(np.int64)[..., 0]
