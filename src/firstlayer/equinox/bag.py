"""Bags for Equinox: the sum, mean or maximum of rows by id."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, Real

from .._check import one_of
from ..embeddings.bag import MODES, Mode
from ._table.bags import Ragged, checked_offsets, checked_weights, pool_matrix
from ._table.lookup import Found, both, nan_outside
from ._table.module import Ids, Table
from ._table.parameters import Init, Key


class EmbeddingBag(Table):
    """Looks up rows of a table and pools them, a row of output for each bag of ids.

    What a bag gives, in every mode, with padding and weights, is said in
    :mod:`firstlayer.embeddings.bag`. The rest is as in :class:`firstlayer.equinox.Embedding`.

    Args:
        num_embeddings: Rows of the table, one for each id.
        embedding_dim: Width of a row.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        padding_idx: The id that is padding and does not count; negative counts from the
            end.
        max_norm: Rows longer than this are shortened to it before they are pooled.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        include_last_offset: Whether the last offset is the end of the last bag.
        weight: The table to use.
        init: How a new table is drawn; as in :class:`firstlayer.equinox.Embedding`.
        dtype: float64, float32, float16 or bfloat16; None is JAX's default, or the dtype of
            ``weight``.
        key: What a new table is drawn with. Not needed with ``weight``.

    Shape:
        - ids: ``(bags, length)``, or ``(n,)`` with offsets; any integer dtype, lists too
        - offsets: ``(bags,)``, where each bag begins: 0 first, never decreasing;
          ``(bags + 1,)`` with ``include_last_offset``
        - per_sample_weights: as ``ids``
        - output: ``(bags, embedding_dim)``, in the table's dtype

    Where ids are traced and nothing can be raised, a bag with an id that is not a row is
    NaN and trains nothing. Traced offsets that are not such make every bag NaN.

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
        num_embeddings: int,
        embedding_dim: int,
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
        )
        self.mode, self.include_last_offset = mode, bool(include_last_offset)

    def __call__(
        self,
        ids: Ids,
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
        *,
        key: Key | None = None,
    ) -> Float[Array, "bags embedding_dim"]:
        """Return a row for each bag.

        Args:
            ids: Which rows.
            offsets: Where each bag begins, for ids of one axis.
            per_sample_weights: What each row is multiplied by.
            key: Ignored; for :class:`equinox.nn.Sequential`.
        """
        found = self._find(ids)
        shape = found.ids.shape
        bounds = checked_offsets(
            shape, offsets, include_last_offset=self.include_last_offset
        )
        weights = checked_weights(shape, per_sample_weights)
        return _pooled(self, found, bounds, weights)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            **super().config(),
            "mode": self.mode,
            "include_last_offset": self.include_last_offset,
        }

    def _of_matrix(
        self, found: Found, weights: Array | None
    ) -> tuple[Array, Bool[Array, " bags"] | None]:
        """Return the bags of 2-D ids, and which of them are right."""
        rows, counted = self._counted(found)
        weights = None if weights is None else weights.astype(rows.dtype)
        out = pool_matrix(rows, counted, weights=weights, mode=self.mode)
        return out, None if found.inside is None else jnp.all(found.inside, axis=1)

    def _of_ragged(
        self, found: Found, weights: Array | None, bags: Ragged
    ) -> tuple[Array, Bool[Array, " bags"]]:
        """Return the bags that offsets tell, and which of them are right."""
        in_a_bag = bags.numbers < bags.count
        right = jnp.broadcast_to(bags.valid, (bags.count,))
        if found.inside is not None:
            right = right & ~bags.anywhere(~found.inside)
        found = found._replace(inside=both(in_a_bag, found.inside))
        rows, counted = self._counted(found)
        weights = None if weights is None else weights.astype(rows.dtype)
        return bags.pooled(rows, counted, weights=weights, mode=self.mode), right

    def _counted(self, found: Found) -> tuple[Array, Bool[Array, "*batch"]]:
        rows = self._rows(found, self._how(wide=True))
        if found.trains is None:
            return rows, jnp.ones(found.ids.shape, bool)
        return rows, found.trains


# Everything that is left once the arguments have been checked, so that an eager call is one
# operation.
@eqx.filter_jit
def _pooled(
    layer: EmbeddingBag, found: Found, bounds: Array | None, weights: Array | None
) -> Float[Array, "bags embedding_dim"]:
    if bounds is None:
        out, right = layer._of_matrix(found, weights)
    else:
        out, right = layer._of_ragged(found, weights, Ragged(bounds, found.ids.size))
    return nan_outside(out.astype(layer.weight.dtype), right)
