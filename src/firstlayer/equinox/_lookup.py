"""Row lookup with checked ids, and its gradient.

Ids that the host has not checked (:mod:`firstlayer.equinox._ids`) are masked: one out of
range reads a NaN row and passes no gradient to the table. Ids are never moved to another
device.

The lookup is a ``custom_jvp`` whose tangent is computed in float32 (float64 for float64).
Its transpose, the gradient, therefore sums repeated ids in float32 and rounds once. It
passes no gradient to the padding row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from .._array import axis_specs
from ..embeddings.token import clip_norms, mask_out_of_range
from ._ids import IdsArgument, as_int32, mask_and
from ._module import compiled, upcast
from ._row_shards import RowShards
from ._sharding import OutSharding, Spec, table_spec, with_sharding, with_table_sharding
from ._table_rows import Rows, RowSubset, StoredRows, array_in
from ._take_rows import take_rows


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
        is_subset: Whether the table is replaced by some of its rows, for training.
    """

    num_embeddings: int
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    upcast: bool = False
    shards: RowShards | None = None
    is_subset: bool = False

    def shards_of(self, weight: Rows) -> RowShards | None:
        """Return the shards of a complete table; None for a table that has none."""
        return None if isinstance(weight, RowSubset | StoredRows) else self.shards


def check_ids(argument: IdsArgument, weight: Rows, options: LookupOptions) -> CheckedIds:
    """Find the row of each id and mask those out of range, within a compiled function.

    Args:
        argument: The ids.
        weight: The table.
        options: Options of the lookup.
    """
    _check_rows(weight, options)
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


def _check_rows(weight: Rows, options: LookupOptions) -> None:
    """Raise ValueError unless a complete table has the rows that ids were checked for."""
    if isinstance(weight, RowSubset | StoredRows):
        return
    rows, shape = options.num_embeddings, tuple(weight.shape)
    # A sharded table may end in rows of zeros.
    is_complete = shape[0] == rows or (options.shards is not None and shape[0] > rows)
    if len(shape) != 2 or not is_complete:
        raise ValueError(
            f"weight must have 2 axes and num_embeddings {rows} rows, got shape {shape}"
        )


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
    if isinstance(weight, RowSubset):
        return _lookup(replace(options, is_subset=True), weight.values, checked)
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


def _take_of_subset(values: Array, checked: CheckedIds) -> Array:
    """Return the row of each id of some rows, and zeros where it does not exist."""
    return take_rows(jnp.asarray(values), checked.index)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _lookup(options: LookupOptions, weight: Array, checked: CheckedIds) -> Array:
    rows = (_take_of_subset if options.is_subset else _take)(weight, checked)
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
    take = _take_of_subset if options.is_subset else partial(_take, mode="fill")
    tangent = take(upcast(tangents[0]), checked)
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
