"""What the layers with one table share: padding, norms, the tied head, its length.

Layers are immutable, so padding is not repaired but never read from the table: what it is
takes the place of whatever ``weight`` has there in every lookup, in :meth:`Table.logits`
and in files. A new table put in by ``eqx.tree_at``, as an optimizer's step is one,
therefore changes no padding; :meth:`Table.set_padding` and :meth:`Table.with_parameters`
do.

Zero, which it is unless something else was asked for, needs no place in the tree. Anything
else is a leaf of integers, the bit patterns, that ``eqx.tree_serialise_leaves`` stores and
no optimizer moves. Give optax ``eqx.filter(model, eqx.is_inexact_array)`` then: its Adam
cannot begin with ``eqx.is_array`` where a model has an array of integers.

``max_norm``: lookups return shortened rows and leave the table alone, so that a head that
shares it sees one weight. :meth:`Table.projected` shortens the stored rows, after a step.
"""

from functools import partial
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Integer

from ..._array import compute_dtype
from ..._check import check_real, integers, not_negative, padding_index
from ...embeddings.resize import Resized, resize_table
from ...embeddings.token import check_norm
from .._module import Module, bits_of, concrete, floats_of, replaced
from .lookup import Found, How, SomeRows, find, rows_at, shortened, whole
from .parameters import INITS, Init, Key, drawn, given

Ids = Integer[Array, "*batch"] | Integer[np.ndarray, "*batch"] | list[Any] | int | Any


class Table(Module):
    """A layer with a table of rows; see the module."""

    prefix: ClassVar[str] = "token."

    #: A padding row other than zero as bit patterns, two to an entry for float64, or None.
    #: Before the table, so that leaves of a layer with another padding do not fit.
    padding_bits: Int32[Array, "..."] | None
    weight: Float[Array, "num_embeddings embedding_dim"]
    num_embeddings: int = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    padding_idx: int | None = eqx.field(static=True)
    max_norm: float | None = eqx.field(static=True)
    norm_type: float = eqx.field(static=True)
    scale_grad_by_freq: bool = eqx.field(static=True)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        weight: Any,
        init: Init,
        dtype: Any,
        key: Key | None,
    ) -> None:
        self.num_embeddings = not_negative("num_embeddings", num_embeddings)
        self.embedding_dim = not_negative("embedding_dim", embedding_dim)
        self.padding_idx = padding_index(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = check_norm(max_norm, norm_type)
        self.scale_grad_by_freq = bool(scale_grad_by_freq)
        shape = (self.num_embeddings, self.embedding_dim)
        if weight is not None:
            self.weight = given(weight, shape, dtype=dtype)
            self.padding_bits = self._padding_in(self.weight)
        else:
            self.weight = drawn(shape, init=init, key=key, dtype=dtype)
            self.padding_bits = None
            if self.padding_idx is not None:
                self.weight = _with_row(self.weight, self.padding_idx, 0.0)

    @property
    def padding_row(self) -> Float[Any, " embedding_dim"] | None:
        """What padding is, in the dtype of the work; None without padding."""
        if self.padding_idx is None:
            return None
        if self.padding_bits is None:
            return np.zeros(self.embedding_dim, np.float32)
        kept = "float64" if self.padding_bits.ndim > 1 else "float32"
        return floats_of(self.padding_bits, kept, kept=kept)

    def logits(
        self, x: Float[Array, "*batch embedding_dim"] | Float[np.ndarray, "..."]
    ) -> Float[Array, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the output head tied to this table.

        Sums are float32 (float64 for float64); the result has the dtype of ``x``. The
        padding row gets no gradient.
        """
        check_real(x, name="x", whole=False)
        x = jnp.asarray(x)
        if isinstance(self.weight, SomeRows):
            raise TypeError("logits needs every row of the table, got those of a batch")
        if x.shape[-1:] != (self.embedding_dim,):
            raise ValueError(
                f"x must end in embedding_dim {self.embedding_dim}, got shape {x.shape}"
            )
        out = products(x, self.weight)
        if self.padding_row is not None:
            own = products(x, self.padding_row[None])[..., 0]
            out = out.at[..., self.padding_idx].set(own)
        return out

    def projected(self, ids: Ids | None = None) -> Self:
        """Return a layer whose stored rows are shortened to ``max_norm``.

        To be called after an optimizer's step. Between two steps every use of the table
        then sees the same weight. Traced ids that are not rows change nothing.

        Args:
            ids: Whose rows; None is all. The cost is that of these rows alone if the
                buffers are donated to the ``jit`` this is in.
        """
        if self.max_norm is None:
            return self
        to = inside = None
        if ids is not None:
            _, to, inside, _ = self._find(ids)
        weight = _projected(self._how(), self.weight, to, inside)
        return replaced(self, weight=weight)

    def resize(
        self,
        num_embeddings: int,
        *,
        init: Init | Float[np.ndarray, "new embedding_dim"] | Array = "mean",
        key: Key | None = None,
    ) -> tuple[Self, Resized]:
        """Return a layer with that many rows, and what became of which row.

        Ids keep their rows and padding stays padding. Happens on the host, not in ``jit``.

        Args:
            num_embeddings: How many rows there shall be.
            init: What new rows are: ``"mean"`` gives each the mean of the old,
                ``"gaussian"`` draws them with the mean and covariance of the old; an array
                holds them; otherwise as for a new table.
            key: What is drawn with.
        """
        old = self.num_embeddings
        added = not_negative("num_embeddings", num_embeddings) - old
        rng = None
        if callable(init) or (isinstance(init, str) and init in INITS):
            shape = (max(added, 0), self.embedding_dim)
            init = drawn(shape, init=init, key=key, dtype=self.weight.dtype)
        elif isinstance(init, str) and init == "gaussian":
            if key is None:
                raise ValueError("key must be given to draw parameters, got None")
            rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        table, what = resize_table(
            np.asarray(self.parameters()["weight"]),
            num_embeddings,
            init=np.asarray(init) if isinstance(init, jax.Array) else init,
            rng=rng,
            padding_idx=self.padding_idx,
        )
        new = replaced(self, weight=jnp.asarray(table), num_embeddings=len(table))
        return new, what

    def set_padding(
        self, value: Float[Any, " embedding_dim"] | list[float] | float
    ) -> Self:
        """Return a layer whose padding row is ``value``."""
        if self.padding_idx is None:
            raise ValueError("set_padding needs a layer with padding_idx, got None")
        row = np.asarray(value) if isinstance(value, list) else value
        return self._filled({"weight": _with_row(self.weight, self.padding_idx, row)})

    def mask(self, ids: Ids) -> Bool[Array, "*batch"]:
        """Return True where ``ids`` is a token and False where it is padding."""
        found = whole(ids) if isinstance(ids, jax.Array) else integers(ids)
        if self.padding_idx is None:
            return jnp.ones(found.shape, bool)
        if found.dtype.itemsize < 4:
            found = found.astype(np.int32)  # int8 cannot be compared with 1024
        return jnp.asarray(found != self.padding_idx)

    def parameters(self) -> dict[str, Float[Array, "num_embeddings embedding_dim"]]:
        """Return the table under the name ``weight``, its padding row as it is read."""
        if self.padding_row is None or self.padding_idx is None:
            return {"weight": self.weight}
        return {"weight": _with_row(self.weight, self.padding_idx, self.padding_row)}

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "padding_idx": self.padding_idx,
            "max_norm": self.max_norm,
            "norm_type": self.norm_type,
            "scale_grad_by_freq": self.scale_grad_by_freq,
            "dtype": self.weight.dtype.name,
        }

    def _filled(self, parameters: dict[str, Float[Array, "..."]]) -> Self:
        weight = parameters["weight"]
        return replaced(self, weight=weight, padding_bits=self._padding_in(weight))

    def _padding_in(self, weight: Array) -> Int32[Array, "..."] | None:
        if self.padding_idx is None:
            return None
        bits = _row_bits(weight, self.padding_idx)
        return None if concrete(bits) and not np.asarray(bits).any() else bits

    def _how(self, *, wide: bool = False) -> How:
        return How(self.max_norm, self.norm_type, self.scale_grad_by_freq, wide)

    def _find(self, ids: Ids, *, name: str = "ids", bound: str = "num_embeddings") -> Found:
        return find(
            ids,
            self.weight,
            num_embeddings=self.num_embeddings,
            padding_idx=self.padding_idx,
            name=name,
            bound=bound,
        )

    def _rows(self, found: Found, how: How) -> Float[Array, "*batch embedding_dim"]:
        """Return the rows that were found; those that were not train nothing."""
        return rows_at(found, self.weight, how=how, padding=self.padding_row)


@partial(jax.jit, static_argnums=0, inline=True)
def _projected(how: How, weight: Array, to: Array | None, inside: Array | None) -> Array:
    if to is None:
        return shortened(weight, how).astype(weight.dtype)
    rows = shortened(weight[to], how).astype(weight.dtype)
    if inside is not None:
        to = jnp.where(inside, to, weight.shape[0])
    return weight.at[to].set(rows, mode="drop")


@jax.jit
def _with_row(weight: Array, place: int, row: Any) -> Array:
    return weight.at[place].set(jnp.asarray(row, weight.dtype))


@jax.jit
def _row_bits(weight: Array, row: int) -> Int32[Array, "..."]:
    return bits_of(weight[row])


@jax.jit
def products(
    x: Float[Array, "*batch width"], weight: Float[Array, "rows width"]
) -> Float[Array, "*batch rows"]:
    """Return the product of ``x`` with every row, summed wide, in the dtype of ``x``."""
    kept, work = x.dtype, jnp.dtype(compute_dtype(x.dtype))
    if weight.dtype != kept:
        x, weight = x.astype(work), weight.astype(work)
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(x, weight, axes, preferred_element_type=work)
    return out.astype(kept)
