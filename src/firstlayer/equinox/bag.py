"""Embedding bag for Equinox: the sum, mean or maximum of rows."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Integer, Real

from .._array import axis_specs
from .._check import boolean, one_of
from ..embeddings.bag import MODES, Mode, divide_or_zero
from ..stores.row_store import RowStore
from ._bags import (
    MatrixBags,
    RaggedBags,
    bag_bounds,
    checked_offsets,
    checked_weights,
)
from ._ids import IdsArgument, mask_and
from ._lookup import (
    CheckedIds,
    LookupOptions,
    check_ids,
    gather_rows,
    nan_if_invalid,
    rows_of_shard,
    with_rows_sharding,
)
from ._module import compiled
from ._parameters import Init, Key
from ._row_shards import RowShards
from ._sharding import OutSharding, Spec
from ._table import Ids, TableModule
from ._table_rows import Rows, array_in


class EmbeddingBag(TableModule):
    """Looks up rows of a table and pools them, one output row for each bag of ids.

    :mod:`firstlayer.embeddings.bag` defines the result for each mode, for padding and for
    weights. Everything else is as in :class:`firstlayer.equinox.Embedding`.

    Args:
        num_embeddings: Number of rows; None is that of ``weight``.
        embedding_dim: Width of each row; None is that of ``weight``.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        padding_idx: Id of padding, which is left out of every bag; negative counts from the
            end.
        max_norm: Longer rows are scaled down to this norm before pooling.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs in
            the call.
        include_last_offset: Whether the last offset is the end of the last bag.
        weight: The table to use, as it is.
        init: Distribution of a new table; as in :class:`firstlayer.equinox.Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default, or the dtype of
            ``weight``.
        key: Random key for a new table.
        sharding: Where to place the table on a mesh, as in
            :class:`firstlayer.equinox.Embedding`. Shards pool the rows that they have, so
            that bags are sent and not rows; maxima need the rows themselves.

    Shape:
        - ids: ``(bags, length)``, or ``(n,)`` with offsets; any integer dtype, nested lists
          too
        - offsets: ``(bags,)``, the start of each bag: 0 first, never decreasing;
          ``(bags + 1,)`` with ``include_last_offset``
        - per_sample_weights: as ``ids``
        - output: ``(bags, embedding_dim)``, in the table's dtype

    A bag with an id out of range that is traced, or on an accelerator, is NaN and passes no
    gradient. Invalid offsets that are traced or on an accelerator make every bag NaN.

    Example:
        >>> table = [[1.0], [2.0], [4.0], [8.0]]
        >>> bag = EmbeddingBag(4, 1, mode="sum", weight=table)
        >>> bag([[0, 1], [3, 3]]).tolist()
        [[3.0], [16.0]]
        >>> bag([0, 1, 2], offsets=[0, 0, 1]).tolist()
        [[0.0], [1.0], [6.0]]
    """

    mode: Mode = eqx.field(static=True)
    include_last_offset: bool = eqx.field(static=True)

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
        *,
        mode: Mode = "mean",
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        include_last_offset: bool = False,
        weight: Float[Any, "num_embeddings embedding_dim"] | list[Any] | None = None,
        init: Init = "normal",
        dtype: Any = None,
        key: Key | None = None,
        sharding: NamedSharding | None = None,
    ) -> None:
        one_of("mode", mode, MODES)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            weight=weight,
            init=init,
            dtype=dtype,
            key=key,
            sharding=sharding,
        )
        self.mode = mode
        self.include_last_offset = boolean("include_last_offset", include_last_offset)

    @classmethod
    def from_store(cls, store: RowStore, **options: Any) -> Any:
        """Return a layer that pools rows of a store.

        See :meth:`firstlayer.equinox.Embedding.from_store`.

        Args:
            store: The table.
            options: ``mode``, ``include_last_offset`` and the options of an embedding.

        Example:
            >>> import numpy as np
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(np.eye(4, 2, dtype=np.float32), format="float16")
            >>> EmbeddingBag.from_store(store, mode="sum")([[0, 1], [0, 0]]).tolist()
            [[1.0, 1.0], [2.0, 0.0]]
        """
        from ._stored import StoredEmbeddingBag, stored_layer

        return stored_layer(StoredEmbeddingBag, store, **options)

    def __call__(
        self,
        ids: Ids,
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
        *,
        out_sharding: OutSharding = None,
        key: Key | None = None,
    ) -> Float[Array, "bags embedding_dim"]:
        """Return the pooled rows of each bag.

        Args:
            ids: Ids of the rows.
            offsets: Start of each bag, for ids of one axis.
            per_sample_weights: Factor of each row.
            out_sharding: Sharding of the result on a mesh with explicit axes, or for a
                layer with a ``sharding``. By default, bags are sharded as 2-D ids or
                offsets are, and columns as in the table.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        argument = self._check_ids(ids)
        shape = argument.ids.shape
        offsets = checked_offsets(
            shape, offsets, include_last_offset=self.include_last_offset
        )
        weights = checked_weights(shape, per_sample_weights)
        options = BagOptions(
            self._options(upcast=True), self.mode, self.include_last_offset
        )
        return pool(options, self.weight, argument, offsets, weights, out_sharding)


@dataclass(frozen=True)
class BagOptions:
    """Options of a bag that its output and gradient depend on.

    Args:
        lookup: Options of the lookup.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: Whether the last offset is the end of the last bag.
    """

    lookup: LookupOptions
    mode: Mode
    include_last_offset: bool

    def pool(
        self,
        spec: Spec | None,
        weight: Rows,
        argument: IdsArgument,
        offsets: Integer[Array, " offsets"] | None,
        weights: Array | None,
    ) -> Float[Array, "bags embedding_dim"]:
        """Return one row for each bag, within a compiled function."""
        checked = check_ids(argument, weight, self.lookup)
        if offsets is None:
            valid = None if checked.valid is None else jnp.all(checked.valid, axis=1)
            bags = MatrixBags(argument.ids.shape[0])
        else:
            size = argument.ids.size
            bounds = bag_bounds(offsets, size, include_last=self.include_last_offset)
            bags = RaggedBags(bounds, size)
            valid = jnp.broadcast_to(bags.valid, (bags.count,))
            if checked.valid is not None:
                valid = valid & ~bags.any(~checked.valid)
            in_a_bag = bags.numbers < bags.count
            checked = checked._replace(valid=mask_and(in_a_bag, checked.valid))
        shards = self.lookup.shards_of(weight)
        if shards is None or self.mode == "max":
            rows = gather_rows(weight, checked, self.lookup)
            out = _pool(bags, rows, checked, weights, self.mode)
        else:
            out = self._pool_shards(shards, bags, array_in(weight), checked, weights, spec)
        return nan_if_invalid(out.astype(weight.dtype), valid)

    def _pool_shards(
        self,
        shards: RowShards,
        bags: MatrixBags | RaggedBags,
        weight: Float[Array, "rows embedding_dim"],
        checked: CheckedIds,
        weights: Array | None,
        spec: Spec | None,
    ) -> Float[Array, "bags embedding_dim"]:
        """Return sums or means of bags; each shard sums the rows that it has."""

        def sum_own(weight: Array, checked: CheckedIds, weights: Array | None) -> Array:
            rows, own = rows_of_shard(shards, weight, checked, self.lookup)
            return _pool(bags, rows, own, weights, "sum")

        shape = bags.count, weight.shape[1]
        sums = shards.sum_rows(sum_own, weight, checked, weights, shape=shape, spec=spec)
        if self.mode == "sum":
            return sums
        ones = jnp.ones((*checked.ids.shape, 1), sums.dtype)
        return divide_or_zero(sums, _pool(bags, ones, checked, weights, "sum"))


def _pool(
    bags: MatrixBags | RaggedBags,
    rows: Float[Array, "*batch embedding_dim"],
    checked: CheckedIds,
    weights: Array | None,
    mode: Mode,
) -> Float[Array, "bags embedding_dim"]:
    """Pool the rows of ids that are valid and not padding."""
    counted = checked.has_gradient
    counted = jnp.ones(checked.ids.shape, bool) if counted is None else counted
    weights = None if weights is None else weights.astype(rows.dtype)
    return bags.pool(rows, counted, weights=weights, mode=mode)


@partial(compiled, static_argnums=(0, 5))
def pool(
    options: BagOptions,
    weight: Rows,
    argument: IdsArgument,
    offsets: Integer[Array, " offsets"] | None,
    weights: Array | None,
    out_sharding: OutSharding,
) -> Float[Array, "bags embedding_dim"]:
    """Return one row for each bag; as one operation of an eager call."""
    starts = argument.ids if offsets is None else offsets

    def default() -> Spec:
        # The last offset may start no bag, so that bags and offsets differ in number.
        whole = offsets is None or not options.include_last_offset
        return (axis_specs(starts)[0] if whole else None, axis_specs(array_in(weight))[1])

    return with_rows_sharding(
        options.lookup,
        options.pool,
        weight,
        argument,
        offsets,
        weights,
        out_sharding=out_sharding,
        default=default,
    )
