"""Row lookup with checked ids, and its gradient.

Concrete ids are checked on the host, before JAX truncates 64 bits to 32: one out of range
is an IndexError that names it. Traced ids cannot raise: an id out of range reads a NaN row
and passes no gradient to the table.

The lookup is a ``custom_jvp`` whose tangent is computed in float32 (float64 for float64).
Its transpose, the gradient, therefore sums repeated ids in float32 and rounds once. It
passes no gradient to the padding row.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int32, Integer

from .._check import ids_in_range
from ..embeddings.token import clip_norms, mask_out_of_range
from ._module import is_concrete, upcast


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


#: A complete table, or some of its rows.
Rows = Float[Array, "num_embeddings embedding_dim"] | RowSubset


class CheckedIds(NamedTuple):
    """Ids after checking.

    Args:
        ids: The ids, 0 where an id is out of range.
        index: Row of the array to read for each id.
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


@dataclass(frozen=True)
class LookupOptions:
    """Options of a lookup that its output and gradient depend on.

    Args:
        max_norm: Longer rows are scaled down to this norm.
        norm_type: The p of the p-norm.
        scale_grad_by_freq: Divide a row's gradient by the count of its id in the call.
        upcast: Return rows in the compute dtype.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    upcast: bool = False


def check_ids(
    ids: Any,
    weight: Rows,
    *,
    num_embeddings: int,
    padding_idx: int | None = None,
    name: str = "ids",
    bound: str = "num_embeddings",
) -> CheckedIds:
    """Check ids against a table.

    Args:
        ids: Integers of any dtype and shape, or nested lists of them.
        weight: The table.
        num_embeddings: Number of rows of the complete table.
        padding_idx: Padding id, not negative, or None.
        name: Name of the ids in error messages.
        bound: Name of the number of rows in error messages.
    """
    values, valid = host_values(ids), None
    if values is None:
        valid, ids = mask_out_of_range(
            traced_integers(ids, name=name), last=num_embeddings - 1
        )
    else:
        checked = ids_in_range(values, num_embeddings, name=name, bound=bound)
        ids = (ids if isinstance(ids, Tracer) else checked).astype(np.int32)
    is_padding = None
    if padding_idx is not None:
        is_padding = ids == padding_idx
        is_padding = is_padding if valid is None else is_padding & valid
        is_padding = jnp.asarray(is_padding)
    ids = index = jnp.asarray(ids)
    if isinstance(weight, RowSubset):
        index, present = weight.find(ids)
        if is_padding is not None:
            index = jnp.where(is_padding, weight.ids.shape[0] - 1, index)
            present = present | is_padding
        valid = mask_and(present, valid)
    return CheckedIds(ids, index, valid, is_padding)


def gather_rows(
    weight: Rows, checked: CheckedIds, options: LookupOptions
) -> Float[Array, "*batch embedding_dim"]:
    """Return the row of each id; an invalid id gives an arbitrary row without gradient."""
    values = weight.values if isinstance(weight, RowSubset) else weight
    return _compiled_lookup(options, values, checked)


def nan_if_invalid(
    x: Float[Array, "*batch embedding_dim"], valid: Bool[Array, "*batch"] | None
) -> Float[Array, "*batch embedding_dim"]:
    """Return ``x`` with NaN rows where ``valid`` is False."""
    return x if valid is None else jnp.where(valid[..., None], x, float("nan"))


def host_values(x: Any) -> np.ndarray | Any | None:
    """Return the values of ``x`` if the host can read them, else None.

    A NumPy array inside an eager ``vmap`` is still a NumPy array with all of its bits; the
    first operation on it would truncate them.
    """
    inner = x
    while isinstance(inner, Tracer):
        inner = getattr(inner, "val", None)
    if isinstance(inner, np.ndarray) or not is_concrete(x):
        return inner if isinstance(inner, np.ndarray) else None
    return np.asarray(x) if isinstance(x, jax.Array) else x


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


def _take(weight: Array, index: Array) -> Array:
    if weight.shape[0] == 0:
        return jnp.zeros((*index.shape, weight.shape[1]), weight.dtype)
    # asarray: a tangent may be a NumPy array.
    return jnp.asarray(weight).at[index].get(mode="promise_in_bounds")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _lookup(options: LookupOptions, weight: Array, checked: CheckedIds) -> Array:
    rows = _take(weight, checked.index)
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
    tangent = _take(upcast(tangents[0]), checked.index)
    if options.scale_grad_by_freq:
        counts = _counts(checked, len(weight)).astype(tangent.dtype)
        tangent = tangent / counts[..., None]
    if checked.has_gradient is not None:
        tangent = jnp.where(checked.has_gradient[..., None], tangent, 0.0)
    return rows, tangent.astype(rows.dtype)


# Compiled, so that an eager lookup is one operation.
_compiled_lookup = jax.jit(_lookup, static_argnums=0, inline=True)


def _counts(checked: CheckedIds, rows: int) -> Array:
    """Return how often each id occurs among the ids with a gradient, at least 1."""
    ones = jnp.ones(checked.index.shape, jnp.int32)
    if checked.has_gradient is not None:
        ones = checked.has_gradient.astype(jnp.int32)
    counts = jnp.zeros(max(rows, 1), jnp.int32).at[checked.index].add(ones)
    return jnp.maximum(counts[checked.index], 1)
