"""Bags on NumPy: the sum, mean or maximum of rows by id."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, Integer, Real

from .._array import compute_dtype
from .._check import is_float, one_of
from ..embeddings.bag import MODES, Mode, pooled, table_gradient, weights_gradient
from ..embeddings.ragged import Bags, bags_of
from ..embeddings.token import Init, Seed, within_norm
from ._module import upcast
from .token import Embedding


class EmbeddingBag(Embedding):
    """Looks up rows of a table and pools them, a row of output for each bag of ids.

    What a bag gives, in every mode, with padding and weights, is said in
    :mod:`firstlayer.embeddings.bag`. The rest is as in :class:`Embedding`.

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
        weight: The table to use, not copied if it fits.
        init: How a new table is drawn; see :func:`firstlayer.embeddings.token.initial`.
        dtype: float64, float32 (the default), float16 or bfloat16.
        rng: A seed or a generator for ``init``.

    Shape:
        - ids: ``(bags, length)``, or ``(n,)`` with offsets; any integer dtype, lists too
        - offsets: ``(bags,)``, where each bag begins: 0 first, never decreasing;
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
        num_embeddings: int,
        embedding_dim: int,
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
        self.include_last_offset = bool(include_last_offset)

    def __call__(
        self,
        ids: Integer[Any, "*batch"] | list[Any],
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
    ) -> Float[np.ndarray, "bags embedding_dim"]:
        bags = self._bags(ids, offsets, per_sample_weights)
        table, used = self._rows_of(bags, copied=False)
        y, _ = pooled(table, used, mode=self.mode)
        return y.astype(self.weight.dtype, copy=False)

    def vjp(
        self,
        ids: Integer[Any, "*batch"] | list[Any],
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, Any]]]:
        """Return the output and the function from its gradient to all others.

        These are ``"weight"``, as row gradients, and ``"per_sample_weights"`` if they were
        given. Padding gets no gradient.

        Example:
            >>> y, pull = EmbeddingBag(5, 2, mode="sum").vjp([[3, 1, 3]])
            >>> grad = pull(np.ones_like(y))["weight"]
            >>> grad.ids.tolist(), grad.values[:, 0].tolist()
            ([1, 3], [1.0, 2.0])
        """
        bags = self._bags(ids, offsets, per_sample_weights)
        # What the caller does to ids or table between here and the pull changes nothing.
        bags = replace(bags, ids=bags.ids.copy())
        table, used = self._rows_of(bags, copied=per_sample_weights is not None)
        y, winners = pooled(table, used, mode=self.mode)
        given = None if per_sample_weights is None else np.asarray(per_sample_weights)

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = self._checked(dy, y.shape)
            weight = table_gradient(
                bags,
                d,
                mode=self.mode,
                winners=winners,
                scale_grad_by_freq=self.scale_grad_by_freq,
            )
            if given is None:
                return {"weight": weight}
            flat = weights_gradient(table, used, dy=d, mode=self.mode, winners=winners)
            return {"weight": weight, "per_sample_weights": _like(given, flat, bags)}

        return y.astype(self.weight.dtype, copy=False), pull

    def config(self) -> dict[str, Any]:
        """Return the arguments that build a layer like this one."""
        return {
            **super().config(),
            "mode": self.mode,
            "include_last_offset": self.include_last_offset,
        }

    def _bags(self, ids: Any, offsets: Any, weights: Any) -> Bags:
        bags = bags_of(
            ids,
            offsets,
            num_embeddings=self.num_embeddings,
            weights=weights,
            padding_idx=self.padding_idx,
            include_last_offset=self.include_last_offset,
            dtype=self.weight.dtype,
        )
        self.make_ready(bags.ids)
        return bags

    def _rows_of(self, bags: Bags, *, copied: bool) -> tuple[np.ndarray, Bags]:
        """Return the rows as they are used, and the bags with ids into those."""
        if self.max_norm is None and not copied:
            return self.weight, bags
        unique, ids = np.unique(bags.ids, return_inverse=True)
        rows = self.weight[unique]
        if self.max_norm is not None:
            # Not rounded to the table's dtype: that happens once, after pooling.
            rows = within_norm(
                upcast(rows), max_norm=self.max_norm, norm_type=self.norm_type
            )
        return rows, replace(bags, ids=ids)

    def _checked(self, dy: Any, shape: tuple[int, ...]) -> np.ndarray:
        d = np.asarray(dy)
        if d.shape != shape:
            raise ValueError(f"dy must have shape {shape}, got {d.shape}")
        return np.ascontiguousarray(d, dtype=compute_dtype(self.weight.dtype))


def _like(given: np.ndarray, gradient: np.ndarray, bags: Bags) -> np.ndarray:
    """Return the gradient in the shape and, if it is a float, the dtype of ``given``."""
    dtype = given.dtype if is_float(given.dtype) else gradient.dtype
    out = np.zeros(given.size, dtype)
    out[slice(None) if bags.places is None else bags.places] = gradient
    return out.reshape(given.shape)
