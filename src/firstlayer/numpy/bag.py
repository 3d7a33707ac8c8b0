"""Bags on NumPy: the sum, mean or maximum of rows by id."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, Integer, Real

from .. import kernels
from .._array import compute_dtype
from .._check import boolean, changed_ids, check_table, host_array, is_float, one_of
from ..embeddings.bag import MODES, Mode, pool_ragged, table_gradient, weights_gradient
from ..embeddings.init import Init, Seed
from ..embeddings.ragged import Bags, flatten_bags
from ..embeddings.token import clip_norms
from ._module import checked_gradient, upcast
from .token import Embedding


class EmbeddingBag(Embedding):
    """Looks up rows of a table and pools them, one output row per bag of ids.

    :mod:`firstlayer.embeddings.bag` defines the modes, padding and weights.

    Args:
        num_embeddings: Number of rows; None is that of ``weight``.
        embedding_dim: Width of each row; None is that of ``weight``.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        padding_idx: Id of padding, which is left out of every bag; negative counts from the
            end.
        max_norm: Largest norm of a row before pooling.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs in
            the call.
        include_last_offset: Whether the last offset is the end of the last bag.
        weight: Table to use, not copied if possible. Its padding row is kept.
        init: Initial values; see :func:`firstlayer.embeddings.init.initial_table`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: Seed or generator for ``init``.

    Shape:
        - ids: ``(bags, length)``, or ``(n,)`` with offsets; any integer dtype, or lists
        - offsets: ``(bags,)`` starts of the bags, 0 first and never decreasing;
          ``(bags + 1,)`` with ``include_last_offset``
        - per_sample_weights: as ``ids``
        - output: ``(bags, embedding_dim)``, in the table's dtype

    Example:
        >>> bag = EmbeddingBag(4, 1, mode="sum", weight=np.array([[1.0], [2], [4], [8]]))
        >>> bag([[0, 1], [3, 3]]).tolist()
        [[3.0], [16.0]]
        >>> bag([0, 1, 2], offsets=[0, 0, 1]).tolist()
        [[0.0], [1.0], [6.0]]
    """

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
        weight: np.ndarray | None = None,
        init: Init = "normal",
        dtype: Any = None,
        rng: Seed = None,
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
            rng=rng,
        )
        self.mode: Mode = mode
        self.include_last_offset = boolean("include_last_offset", include_last_offset)

    def __call__(
        self,
        ids: Integer[Any, "*batch"] | list[Any],
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
    ) -> Float[np.ndarray, "bags embedding_dim"]:
        """Return the pooled rows of each bag.

        Args:
            ids: Ids, as ``(bags, length)``, or as ``(n,)`` with ``offsets``.
            offsets: Start of each bag in ids of one axis.
            per_sample_weights: Factor for the row of each id; None is 1.
        """
        bags = self._bags(ids, offsets, per_sample_weights)
        table, pooled = self._rows_of(bags, copy=False)
        y, _ = pool_ragged(table, pooled, mode=self.mode)
        return y.astype(self.dtype, copy=False)

    def vjp(
        self,
        ids: Integer[Any, "*batch"] | list[Any],
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, Any]]]:
        """Return the output and its pullback.

        The pullback returns the gradients of ``"weight"``, by row, and of
        ``"per_sample_weights"`` if they were given. Padding gets none.

        Example:
            >>> y, pull = EmbeddingBag(5, 2, mode="sum").vjp([[3, 1, 3]])
            >>> grad = pull(np.ones_like(y))["weight"]
            >>> grad.ids.tolist(), grad.values[:, 0].tolist()
            ([1, 3], [1.0, 2.0])
        """
        bags = self._bags(ids, offsets, per_sample_weights)
        # Copies: the caller may change the ids or the table before calling the pullback.
        bags = replace(bags, ids=bags.ids.copy())
        table, pooled = self._rows_of(bags, copy=per_sample_weights is not None)
        y, winners = pool_ragged(table, pooled, mode=self.mode)
        weights = (
            None
            if per_sample_weights is None
            else host_array(per_sample_weights, name="per_sample_weights")
        )

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = self._checked_gradient(dy, y.shape)
            dtable = table_gradient(
                bags,
                d,
                mode=self.mode,
                winners=winners,
                scale_grad_by_freq=self.scale_grad_by_freq,
            )
            if weights is None:
                return {"weight": dtable}
            flat = weights_gradient(table, pooled, dy=d, mode=self.mode, winners=winners)
            dweights = _expand_gradient(flat, bags, like=weights)
            return {"weight": dtable, "per_sample_weights": dweights}

        return y.astype(self.dtype, copy=False), pull

    def _bags(self, ids: Any, offsets: Any, weights: Any) -> Bags:
        bags = flatten_bags(
            ids,
            offsets,
            num_embeddings=self.num_embeddings,
            weights=weights,
            padding_idx=self.padding_idx,
            include_last_offset=self.include_last_offset,
            dtype=self.dtype,
        )
        self.catch_up(bags.ids)
        return bags

    def _rows_of(self, bags: Bags, *, copy: bool) -> tuple[np.ndarray, Bags]:
        """Return a table of the rows to pool, and the bags with ids into it."""
        table = check_table(self.stored_weight)
        if self.max_norm is None and not copy:
            return table, bags
        unique, ids = np.unique(bags.ids, return_inverse=True)
        rows = kernels.gather_rows(table, unique)
        if rows is None:
            raise changed_ids(len(table))
        if self.max_norm is not None:
            # Not rounded to the table's dtype, which happens once, after pooling.
            rows = clip_norms(
                upcast(rows), max_norm=self.max_norm, norm_type=self.norm_type
            )
        return rows, replace(bags, ids=ids)

    def _checked_gradient(self, dy: Any, shape: tuple[int, ...]) -> np.ndarray:
        return np.ascontiguousarray(
            checked_gradient(dy, shape), dtype=compute_dtype(self.dtype)
        )


def _expand_gradient(gradient: np.ndarray, bags: Bags, *, like: np.ndarray) -> np.ndarray:
    """Return the gradient of the pooled ids in the shape of ``like``, zero at other ids.

    In the dtype of ``like`` if that is a float.
    """
    out = np.zeros(like.size, like.dtype if is_float(like.dtype) else gradient.dtype)
    out[slice(None) if bags.kept is None else bags.kept] = gradient
    return out.reshape(like.shape)
