"""Row lookup with checked ids, and its gradient.

Ids in host memory are checked there, before JAX truncates 64 bits to 32: one out of range
is an IndexError that names it. Traced ids cannot raise, and checking ids on an accelerator
would wait for it in every call: an id out of range there reads a NaN row and passes no
gradient to the table. Ids are never moved to another device.

The lookup is a ``custom_jvp`` whose tangent is computed in float32 (float64 for float64).
Its transpose, the gradient, therefore sums repeated ids in float32 and rounds once. It
passes no gradient to the padding row.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int32, Integer

from .._array import axis_specs
from .._check import float_dtype, ids_in_range
from ..embeddings.token import clip_norms, mask_out_of_range
from ..stores.row_store import RowStore
from ._module import compiled, is_on_host, upcast
from ._row_shards import RowShards
from ._sharding import OutSharding, Spec, table_spec, with_sharding, with_table_sharding

#: Largest number of rows whose numbers fit in int32.
MAX_ROWS = 2**31 - 1


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


class IdsArgument(eqx.Module):
    """The ids of a call.

    Args:
        ids: The ids, where the caller placed them.
        in_range: Whether the host has checked them.
    """

    ids: Integer[Array, "*batch"]
    in_range: bool = eqx.field(static=True)


class CheckedIds(NamedTuple):
    """Ids after checking, within a compiled function.

    Args:
        ids: The ids. Those out of range are still out of range.
        index: Row of the array to read for each id; out of range if it does not exist.
        valid: Mask of ids whose row exists; None if all do.
        is_padding: Mask of padding ids; None without ``padding_idx``.
    """

    ids: Int32[Array, "*batch"]
    index: Int32[Array, "*batch"]
    valid: Bool[Array, "*batch"] | None
    is_padding: Bool[Array, "*batch"] | None

    @property
    def has_gradient(self) -> Bool[Array, "*batch"] | None:
        """Mask of ids that pass a gradient to the table; None if all do."""
        if self.is_padding is None:
            return self.valid
        return mask_and(~self.is_padding, self.valid)

    def of_shard(
        self, shards: RowShards, rows: int
    ) -> tuple["CheckedIds", Bool[Array, "*batch"]]:
        """Return the ids with those of other shards marked as invalid, and the own ones.

        Args:
            shards: Shards of the table.
            rows: Number of rows of each shard.
        """
        index = self.index - shards.first_row(rows)
        is_here = (index >= 0) & (index < rows)
        is_own = is_here if self.valid is None else is_here & self.valid
        # Ids out of range stay out of range, for checkify; those of others do not.
        is_other = ~is_here if self.valid is None else ~is_here & self.valid
        index = jnp.where(is_other, 0, index)
        return self._replace(index=index, valid=is_own), is_own


@dataclass(frozen=True)
class LookupOptions:
    """Options of a lookup that its output and gradient depend on.

    Args:
        num_embeddings: Number of rows of the complete table.
        padding_idx: Padding id, not negative, or None.
        max_norm: Longer rows are scaled down to this norm.
        norm_type: The p of the p-norm.
        scale_grad_by_freq: Divide a row's gradient by the count of its id in the call.
        upcast: Return rows in the compute dtype.
        shards: Shards of the table; None if its rows are not sharded by the layer.
    """

    num_embeddings: int
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    upcast: bool = False
    shards: RowShards | None = None

    def shards_of(self, weight: "Rows") -> RowShards | None:
        """Return the shards of a complete table; None for a table that has none."""
        return None if isinstance(weight, RowSubset | StoredRows) else self.shards


def ids_argument(
    ids: Any, num_embeddings: int, *, name: str = "ids", bound: str = "num_embeddings"
) -> IdsArgument:
    """Return the ids of a call, checked if the host can read them.

    Args:
        ids: Integers of any dtype and shape, or nested lists of them.
        num_embeddings: Number of rows of the complete table.
        name: Name of the ids in error messages.
        bound: Name of the number of rows in error messages.
    """
    if ids is None:
        raise TypeError(f"{name} must be integers, got None")
    if num_embeddings > MAX_ROWS:
        raise ValueError(
            f"a table of {num_embeddings} rows can be read by Embedding.from_store with "
            "ids on the host only: compiled code has row numbers of 32 bits"
        )
    values = host_values(ids)
    if values is None:
        return IdsArgument(traced_integers(ids, name=name), False)
    checked = ids_in_range(values, num_embeddings, name=name, bound=bound)
    if not isinstance(ids, jax.Array):
        ids = checked.astype(np.int32)
    return IdsArgument(ids, True)


def check_ids(argument: IdsArgument, weight: Rows, options: LookupOptions) -> CheckedIds:
    """Find the row of each id and mask those out of range, within a compiled function.

    Args:
        argument: The ids.
        weight: The table.
        options: Options of the lookup.
    """
    ids, valid, padding_idx = as_int32(argument.ids), None, options.padding_idx
    if not argument.in_range:
        valid, _ = mask_out_of_range(ids, last=options.num_embeddings - 1)
    is_padding = None if padding_idx is None else ids == padding_idx
    if not isinstance(weight, RowSubset):
        return CheckedIds(ids, ids, valid, is_padding)
    index, present = weight.find(ids)
    # An id beyond the table may equal the number of an unused entry.
    valid = present if valid is None else present & valid
    end = weight.ids.shape[0]
    index = jnp.where(valid, index, end)
    if is_padding is not None:
        index, valid = jnp.where(is_padding, end - 1, index), valid | is_padding
    return CheckedIds(ids, index, valid, is_padding)


def as_int32(ids: Integer[Array, "*batch"]) -> Int32[Array, "*batch"]:
    """Return ``ids`` as int32. Larger ones become the largest int32, no other id."""
    limits = jnp.iinfo(jnp.int32)
    if ids.dtype.itemsize >= 4 and ids.dtype != jnp.int32:
        ids = jnp.minimum(ids, limits.max)
        if ids.dtype.kind == "i":
            ids = jnp.maximum(ids, limits.min)
    return ids.astype(jnp.int32)


def gather_rows(
    weight: Rows, checked: CheckedIds, options: LookupOptions
) -> Float[Array, "*batch embedding_dim"]:
    """Return the row of each id; an invalid id gives an arbitrary row without gradient.

    Args:
        weight: The table.
        checked: The ids.
        options: Options of the lookup.
    """
    if isinstance(weight, StoredRows):
        valid, index = checked.valid, checked.index
        rows = weight.take(index if valid is None else jnp.where(valid, index, 0))
        rows = limit_norm(jax.lax.stop_gradient(rows), options)
        return rows if options.upcast else rows.astype(weight.dtype)
    shards = options.shards_of(weight)
    if shards is None:
        return _lookup(options, array_in(weight), checked)
    return _sum_of_shards(shards, array_in(weight), checked, options)


def _sum_of_shards(
    shards: RowShards,
    weight: Array,
    checked: CheckedIds,
    options: LookupOptions,
    spec: Spec | None = None,
    *,
    has_nan: bool = False,
) -> Float[Array, "*batch embedding_dim"]:
    """Return the row of each id of a sharded table: the sum over the shards.

    Args:
        shards: Shards of the table.
        weight: The table.
        checked: The ids.
        options: Options of the lookup.
        spec: Specification of the result, if it is known.
        has_nan: Whether the rows of invalid ids are NaN. The first shard adds it, which
            costs no pass over the result.
    """
    shape = (*checked.index.shape, weight.shape[1])

    def own_rows(weight: Array, checked: CheckedIds) -> Array:
        rows, _ = rows_of_shard(shards, weight, checked, options)
        if not has_nan or checked.valid is None:
            return rows
        is_first = shards.first_row(len(weight)) == 0
        return nan_if_invalid(rows, checked.valid | ~is_first)

    return shards.sum_rows(own_rows, weight, checked, shape=shape, spec=spec)


def rows_of_shard(
    shards: RowShards, weight: Array, checked: CheckedIds, options: LookupOptions
) -> tuple[Float[Array, "*batch embedding_dim"], CheckedIds]:
    """Return the rows of this shard, with zeros for all other ids, and its ids.

    Args:
        shards: Shards of the table.
        weight: Rows of this shard.
        checked: Ids of the complete table.
        options: Options of the lookup.
    """
    own, is_own = checked.of_shard(shards, len(weight))
    return jnp.where(is_own[..., None], _lookup(options, weight, own), 0.0), own


def look_up(
    options: LookupOptions,
    weight: Rows,
    argument: IdsArgument,
    out_sharding: OutSharding = None,
) -> Float[Array, "*batch embedding_dim"]:
    """Return the row of each id; NaN where an id is out of range.

    Called within a compiled function.
    """

    def run(
        spec: Spec | None, weight: Rows, argument: IdsArgument
    ) -> Float[Array, "*batch embedding_dim"]:
        checked = check_ids(argument, weight, options)
        shards = options.shards_of(weight)
        if shards is not None:
            table = array_in(weight)
            return _sum_of_shards(shards, table, checked, options, spec, has_nan=True)
        rows = gather_rows(weight, checked, options)
        return rows if checked.valid is None else _nan_if_no_row(rows, checked.valid)

    def default() -> Spec:
        return table_spec(argument.ids, array_in(weight))

    return with_rows_sharding(
        options, run, weight, argument, out_sharding=out_sharding, default=default
    )


def with_rows_sharding(
    options: LookupOptions,
    function: Callable[..., Any],
    weight: Rows,
    *args: Any,
    out_sharding: OutSharding,
    default: Callable[[], Spec],
) -> Any:
    """Return ``function(spec, weight, *args)`` with the sharding of a layer's result.

    Args:
        options: Options of the lookup.
        function: Function of the specification of the result, if it is known and the table
            is sharded, of the table, and of the other arguments.
        weight: The table.
        *args: Trees of arrays.
        out_sharding: The caller's sharding of the result, or None.
        default: Returns the specification of the result if ``out_sharding`` is None.
    """
    shards = options.shards_of(weight)
    if shards is None:
        return with_sharding(
            partial(function, None),
            weight,
            *args,
            out_sharding=out_sharding,
            default=default,
        )
    return with_table_sharding(
        function,
        jnp.asarray(weight),  # raises if the weight is in the state of an optimizer
        *args,
        sharding=shards.sharding,
        out_sharding=out_sharding,
        default=default,
    )


def valid_ids(
    options: LookupOptions, weight: Rows, argument: IdsArgument
) -> Bool[Array, "*batch"] | None:
    """Return the mask of ids whose row exists; None if all do.

    Called within a compiled function.
    """
    if argument.in_range and not isinstance(weight, RowSubset):
        return None
    return with_sharding(
        lambda weight, argument: check_ids(argument, weight, options).valid,
        weight,
        argument,
        out_sharding=None,
        default=lambda: axis_specs(argument.ids),
    )


def nan_if_invalid(
    x: Float[Array, "*batch embedding_dim"], valid: Bool[Array, "*batch"] | None
) -> Float[Array, "*batch embedding_dim"]:
    """Return ``x`` with NaN rows where ``valid`` is False."""
    return x if valid is None else jnp.where(valid[..., None], x, float("nan"))


@jax.custom_jvp
def _nan_if_no_row(rows: Array, valid: Array) -> Array:
    return nan_if_invalid(rows, valid)


@_nan_if_no_row.defjvp
def _nan_if_no_row_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    # The tangent of a row that does not exist is zero. Masking it again would be a pass
    # over the gradient.
    return _nan_if_no_row(*primals), tangents[0]


def host_values(x: Any) -> np.ndarray | Any | None:
    """Return the values of ``x`` if they are in host memory, else None.

    A NumPy array inside an eager ``vmap`` is still a NumPy array with all of its bits; the
    first operation on it would truncate them.
    """
    inner = x
    while isinstance(inner, Tracer):
        inner = getattr(inner, "val", None)
    if isinstance(x, Tracer):
        return inner if isinstance(inner, np.ndarray) else None
    if not isinstance(x, jax.Array):
        return x
    return np.asarray(x) if is_on_host(x) else None


def traced_integers(ids: Any, *, name: str = "ids") -> Integer[Array, "*batch"]:
    """Return ``ids`` if their dtype is an integer dtype, else raise a TypeError."""
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {ids.dtype.name}")
    return ids


def mask_and(
    a: Bool[Array, "*batch"] | None, b: Bool[Array, "*batch"] | None
) -> Bool[Array, "*batch"] | None:
    """Return ``a & b``, where None is a mask of True."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def limit_norm(
    rows: Float[Array, "*batch embedding_dim"], options: LookupOptions
) -> Float[Array, "*batch embedding_dim"]:
    """Return rows in the compute dtype, scaled down to ``max_norm`` if there is one."""
    rows = upcast(rows)
    if options.max_norm is None:
        return rows
    return clip_norms(rows, max_norm=options.max_norm, norm_type=options.norm_type)


def _take(weight: Array, checked: CheckedIds, *, mode: str = "clip") -> Array:
    """Return the row of each id; ``mode`` applies to ids whose row does not exist."""
    if weight.shape[0] == 0:
        return jnp.zeros((*checked.index.shape, *weight.shape[1:]), weight.dtype)
    # Ids out of range are still out of range here, where checkify reports them.
    mode = "promise_in_bounds" if checked.valid is None else mode
    # asarray: a tangent may be a NumPy array.
    rows = jnp.asarray(weight).at[checked.index]
    fill = 0 if mode == "fill" else None
    return rows.get(mode=mode, fill_value=fill, wrap_negative_indices=False)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _lookup(options: LookupOptions, weight: Array, checked: CheckedIds) -> Array:
    rows = _take(weight, checked)
    if options.max_norm is None and not options.upcast:
        return rows
    rows, dtype = limit_norm(rows, options), rows.dtype
    return rows if options.upcast else rows.astype(dtype)


@_lookup.defjvp
def _lookup_jvp(
    options: LookupOptions, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    weight, checked = primals
    rows = _lookup(options, *primals)
    # The norm itself has no tangent, as in torch, which rescales the table before the
    # lookup.
    # Tangents of rows that do not exist are zero, and the transpose skips them: no mask
    # has the size of the gradient.
    tangent = _take(upcast(tangents[0]), checked, mode="fill")
    if options.scale_grad_by_freq:
        counts = _counts(checked, len(weight)).astype(tangent.dtype)
        tangent = tangent / counts[..., None]
    if checked.is_padding is not None:
        tangent = jnp.where(checked.is_padding[..., None], 0.0, tangent)
    return rows, tangent.astype(rows.dtype)


#: :func:`look_up` as one operation of an eager call.
compiled_look_up = compiled(look_up, static_argnums=(0, 3), inline=True)


def _counts(checked: CheckedIds, rows: int) -> Array:
    """Return how often each id occurs among the ids with a gradient, at least 1."""
    ones = jnp.ones(checked.index.shape, jnp.int32)
    if checked.has_gradient is not None:
        ones = checked.has_gradient.astype(jnp.int32)
    counts = jnp.zeros(max(rows, 1), jnp.int32)
    counts = counts.at[checked.index].add(ones, wrap_negative_indices=False)
    return jnp.maximum(_take(counts, checked), 1)
