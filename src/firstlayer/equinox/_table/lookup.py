"""Rows by id, and the gradient that goes back to their table.

Ids whose values are on the host are checked before JAX makes 32 bits of 64: one out of
range is an IndexError that names it. Traced ids cannot be refused; there the row is NaN,
whatever is made of it trains nothing, and no neighbour is ever taken in its place.

The lookup is a ``custom_jvp`` whose tangent is worked on in float32 (float64 for float64),
so that its transpose, the gradient, sums repeated ids in float32 and rounds once.
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

from ..._check import ids_in_range
from ...embeddings.token import clip_norms, mask_out_of_range
from .._module import concrete, upcast


class SomeRows(eqx.Module):
    """Some rows of a table in its place; see :mod:`firstlayer.equinox.rows`.

    Args:
        ids: Which rows, ascending, each once. Beyond the last id come numbers that are no
            ids, for an array has one length whatever the batch.
        values: The rows.
    """

    ids: Int32[Array, " rows"]
    values: Float[Array, "rows embedding_dim"]

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self.values.dtype

    def place(
        self, ids: Int32[Array, "*batch"]
    ) -> tuple[Int32[Array, "*batch"], Bool[Array, "*batch"]]:
        """Return where the row of each id is, and whether it is here at all."""
        place = jnp.searchsorted(self.ids, ids).astype(jnp.int32)
        place = jnp.minimum(place, self.ids.shape[0] - 1)
        return place, self.ids.at[place].get(mode="promise_in_bounds") == ids


#: What lookups take for a table.
Rows = Float[Array, "num_embeddings embedding_dim"] | SomeRows


class Found(NamedTuple):
    """Ids that were looked at.

    Args:
        ids: The ids, 0 where there is no such row.
        place: Which row of the array each is.
        inside: Which of them are rows; None if all are.
        is_padding: Which of them are padding; None if none can be.
    """

    ids: Int32[Array, "*batch"]
    place: Int32[Array, "*batch"]
    inside: Bool[Array, "*batch"] | None
    is_padding: Bool[Array, "*batch"] | None

    @property
    def trains(self) -> Bool[Array, "*batch"] | None:
        """Which of them send a gradient to the table; None if all do."""
        if self.is_padding is None:
            return self.inside
        return both(~self.is_padding, self.inside)


@dataclass(frozen=True)
class How:
    """What is asked of a lookup beside the ids.

    Args:
        max_norm: Rows longer than this are returned shortened to it.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        wide: Return rows in the dtype of the work, float32 or float64.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    wide: bool = False


def find(
    ids: Any,
    weight: Rows,
    *,
    num_embeddings: int,
    padding_idx: int | None = None,
    name: str = "ids",
    bound: str = "num_embeddings",
) -> Found:
    """Check ids and find their rows.

    Args:
        ids: Integers of any dtype and shape, lists too.
        weight: The table.
        num_embeddings: How many rows there are.
        padding_idx: The id that is padding, from the front.
        name: What the ids are called in the sentence.
        bound: What the number of rows is called in the sentence.
    """
    values, inside = on_host(ids), None
    if values is None:
        inside, near = mask_out_of_range(whole(ids, name=name), last=num_embeddings - 1)
    else:
        kept = ids_in_range(values, num_embeddings, name=name, bound=bound)
        near = (ids if isinstance(ids, Tracer) else kept).astype(np.int32)
    is_padding = None
    if padding_idx is not None:
        is_padding = near == padding_idx
        is_padding = is_padding if inside is None else is_padding & inside
        is_padding = jnp.asarray(is_padding)
    near = jnp.asarray(near)
    if not isinstance(weight, SomeRows):
        return Found(near, near, inside, is_padding)
    place, there = weight.place(near)
    there = there if is_padding is None else there | is_padding
    return Found(near, place, both(there, inside), is_padding)


def rows_at(
    found: Found,
    weight: Rows,
    *,
    how: How,
    padding: Float[Array, " embedding_dim"] | None = None,
) -> Float[Array, "*batch embedding_dim"]:
    """Return the rows that were found; where there is none, one that trains nothing.

    Args:
        found: From :func:`find`.
        weight: The table.
        how: What else is asked.
        padding: What to return for padding, whatever the table has there.
    """
    values = weight.values if isinstance(weight, SomeRows) else weight
    return _compiled_rows(how, values, found, padding)


def nan_outside(
    x: Float[Array, "*batch embedding_dim"], inside: Bool[Array, "*batch"] | None
) -> Float[Array, "*batch embedding_dim"]:
    """Return ``x``, and NaN where there is no such row."""
    return x if inside is None else jnp.where(inside[..., None], x, float("nan"))


def on_host(ids: Any) -> np.ndarray | Any | None:
    """Return the values of ids if they can be looked at, else None.

    NumPy's arrays stay what they are inside an eager ``vmap``, with all of their bits, and
    would lose them in the first operation on them.
    """
    inner = ids
    while isinstance(inner, Tracer):
        inner = getattr(inner, "val", None)
    if isinstance(inner, np.ndarray) or not concrete(ids):
        return inner if isinstance(inner, np.ndarray) else None
    return np.asarray(ids) if isinstance(ids, jax.Array) else ids


def whole(ids: Any, *, name: str = "ids") -> Integer[Array, "*batch"]:
    """Return traced ids if they are integers; anything else is a TypeError."""
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {ids.dtype.name}")
    return ids


def both(
    a: Bool[Array, "*batch"] | None, b: Bool[Array, "*batch"] | None
) -> Bool[Array, "*batch"] | None:
    """Return where both are True, None standing for everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def shortened(
    rows: Float[Array, "*batch embedding_dim"], how: How
) -> Float[Array, "*batch embedding_dim"]:
    """Return rows in the dtype of the work, within ``max_norm`` if there is one."""
    rows = upcast(rows)
    if how.max_norm is None:
        return rows
    return clip_norms(rows, max_norm=how.max_norm, norm_type=how.norm_type)


def _take(weight: Array, place: Array) -> Array:
    if weight.shape[0] == 0:
        return jnp.zeros((*place.shape, weight.shape[1]), weight.dtype)
    # A tangent may be NumPy's.
    return jnp.asarray(weight).at[place].get(mode="promise_in_bounds")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rows(how: How, weight: Array, found: Found, padding: Array | None) -> Array:
    rows = _take(weight, found.place)
    if padding is not None and found.is_padding is not None:
        at = found.is_padding[..., None]
        rows = jnp.where(at, jnp.broadcast_to(padding.astype(rows.dtype), rows.shape), rows)
    if how.max_norm is None and not how.wide:
        return rows
    rows, dtype = shortened(rows, how), rows.dtype
    return rows if how.wide else rows.astype(dtype)


@_rows.defjvp
def _rows_jvp(how: How, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    weight, found, _ = primals
    rows = _rows(how, *primals)
    # With max_norm too: torch shortens the table first, and what it looks up is then the
    # row itself.
    tangent = _take(upcast(tangents[0]), found.place)
    if how.scale_grad_by_freq:
        tangent = tangent / _often(found, len(weight)).astype(tangent.dtype)[..., None]
    if found.trains is not None:
        tangent = jnp.where(found.trains[..., None], tangent, 0.0)
    return rows, tangent.astype(rows.dtype)


# So that an eager lookup is one operation, and not one for each line above.
_compiled_rows = jax.jit(_rows, static_argnums=0, inline=True)


def _often(found: Found, rows: int) -> Array:
    """Return how often each id is among those that train, at least once."""
    ones = jnp.ones(found.place.shape, jnp.int32)
    if found.trains is not None:
        ones = found.trains.astype(jnp.int32)
    counts = jnp.zeros(max(rows, 1), jnp.int32).at[found.place].add(ones)
    return jnp.maximum(counts[found.place], 1)
