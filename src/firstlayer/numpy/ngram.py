"""Lookups of the rows of n-grams on NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer

from ..ngram.layers import NgramArguments
from ..ngram.scheme import Scheme
from ..stores.row_store import RowStore
from ._bias import gradient_like
from ._module import Module, upcast
from .token import Embedding

Pullback = Callable[[np.ndarray], dict[str, Any]]


class NgramEmbedding(NgramArguments, Module):
    """Looks up the rows of the n-grams that end at each position.

    Args:
        scheme: Scheme of :mod:`firstlayer.ngram`.
        table: Layer with the table, a store of :mod:`firstlayer.stores`, or the width of
            the rows of a new table.
        layer: Layer of the model whose table it is; may be left out if the scheme has one.
        combine: ``"concat"``, or ``"sum"`` as in BLT.
        options: Arguments of :class:`Embedding` for a new table, such as ``rng``, or of
            :meth:`Embedding.from_store` for a store.

    Shape:
        - ids: ``(..., length)``, any integer dtype, or lists
        - output: ``(..., length, columns * width)``, or ``(..., length, width)`` if summed

    Example:
        >>> from firstlayer.ngram import SaltedNgram
        >>> memory = NgramEmbedding(SaltedNgram(rows=1000), 8, rng=0)
        >>> memory([[5, 6, 7]]).shape
        (1, 3, 32)
        >>> vectors, pull = memory.vjp([[5, 6, 7]])
        >>> pull(np.ones_like(vectors))["table.weight"].values.shape
        (8, 8)
    """

    _embedding_class = Embedding

    def __init__(
        self,
        scheme: Scheme,
        table: Embedding | RowStore | int,
        *,
        layer: int | None = None,
        combine: str = "concat",
        **options: Any,
    ) -> None:
        self._set_arguments(scheme, table, layer=layer, combine=combine, **options)

    def __call__(
        self,
        ids: Integer[Any, "*batch length"] | list[Any],
        *,
        history: Integer[Any, "*batch before"] | list[Any] | None = None,
        documents: Integer[Any, "*batch positions"] | list[Any] | None = None,
        dead: Bool[Any, "*batch positions"] | list[Any] | None = None,
    ) -> Float[np.ndarray, "*batch length embedding_dim"]:
        """Return the vectors of the n-grams that end at each position.

        Args:
            ids: Ids.
            history: The ids before, when decoding; see ``scheme.advance``.
            documents: Document of each id of a packed sequence.
            dead: True at ids that n-grams must not read.
        """
        rows = self._rows(ids, history=history, documents=documents, dead=dead)
        return self._combined(self.table(rows))

    def vjp(
        self,
        ids: Integer[Any, "*batch length"] | list[Any],
        *,
        history: Integer[Any, "*batch before"] | list[Any] | None = None,
        documents: Integer[Any, "*batch positions"] | list[Any] | None = None,
        dead: Bool[Any, "*batch positions"] | list[Any] | None = None,
    ) -> tuple[np.ndarray, Pullback]:
        """Return the output and its pullback, to the row gradient of the table.

        Rows of a store that is not trained get no gradient.
        """
        rows = self._rows(ids, history=history, documents=documents, dead=dead)
        vectors, pull_rows = self.table.vjp(rows)
        y = self._combined(vectors)

        def pull(dy: np.ndarray) -> dict[str, Any]:
            d = gradient_like(dy, y, name="dy")
            if self.combine == "sum":
                d = np.broadcast_to(d[..., None, :], vectors.shape)
            gradients = pull_rows(d.reshape(vectors.shape)).items()
            return {f"table.{name}": gradient for name, gradient in gradients}

        return y, pull

    def prefetch(
        self,
        ids: Integer[Any, "*batch length"] | list[Any],
        *,
        history: Integer[Any, "*batch before"] | list[Any] | None = None,
        documents: Integer[Any, "*batch positions"] | list[Any] | None = None,
        dead: Bool[Any, "*batch positions"] | list[Any] | None = None,
    ) -> None:
        """Start to read the rows of a coming call, if the table is on disk.

        Args:
            ids: Ids.
            history: As in a call.
            documents: As in a call.
            dead: As in a call.

        Example:
            >>> from firstlayer.ngram import SaltedNgram
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(np.ones((1000, 8), np.float32))
            >>> memory = NgramEmbedding(SaltedNgram(rows=1000), store)
            >>> memory.prefetch([[5, 6, 8]])
            >>> memory([[5, 6, 8]]).shape  # reads these rows
            (1, 3, 32)
        """
        self.table.prefetch(
            self.scheme(
                ids, layer=self.layer, history=history, documents=documents, dead=dead
            )
        )

    def parameters(self) -> dict[str, np.ndarray]:
        return {f"table.{name}": x for name, x in self.table.parameters().items()}

    def config(self) -> dict[str, Any]:
        return self._config_with(self.table.config())

    def __repr__(self) -> str:
        return f"NgramEmbedding({self.scheme!r}, {self.table!r}, combine={self.combine!r})"

    def _combined(self, vectors: np.ndarray) -> np.ndarray:
        if self.combine == "sum":
            return upcast(vectors).sum(-2).astype(vectors.dtype, copy=False)
        return vectors.reshape(*vectors.shape[:-2], self.embedding_dim)
