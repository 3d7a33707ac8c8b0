"""Lookups of the rows of n-grams in JAX."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Integer

from .._array import axis_specs
from ..ngram.layers import NgramArguments
from ..ngram.scheme import Scheme
from ..stores.row_store import RowStore
from ._module import Module, replace_fields
from ._sharding import with_sharding
from ._stored import StoredEmbedding
from .token import Embedding


class NgramEmbedding(NgramArguments, Module):
    """Looks up the rows of the n-grams that end at each position.

    Args:
        scheme: Scheme of :mod:`firstlayer.ngram`.
        table: Layer with the table, a store of :mod:`firstlayer.stores`, or the width of
            the rows of a new table.
        layer: Layer of the model whose table it is; may be left out if the scheme has one.
        combine: ``"concat"``, or ``"sum"`` as in BLT.
        options: Arguments of :class:`Embedding` for a new table, such as ``key`` and
            ``sharding``, or of :meth:`Embedding.from_store` for a store.

    Shape:
        - ids: ``(..., length)``, any integer dtype, or lists
        - output: ``(..., length, columns * width)``, or ``(..., length, width)`` if summed

    Example:
        >>> import jax
        >>> from firstlayer.ngram import SaltedNgram
        >>> memory = NgramEmbedding(SaltedNgram(rows=1000), 8, key=jax.random.key(0))
        >>> memory([[5, 6, 7]]).shape
        (1, 3, 32)
    """

    table: Embedding | StoredEmbedding
    scheme: Scheme = eqx.field(static=True)
    layer: int | None = eqx.field(static=True)
    combine: str = eqx.field(static=True)

    _embedding_class = Embedding

    def __init__(
        self,
        scheme: Scheme,
        table: Embedding | StoredEmbedding | RowStore | int,
        *,
        layer: int | None = None,
        combine: str = "concat",
        **options: Any,
    ) -> None:
        self._set_arguments(scheme, table, layer=layer, combine=combine, **options)

    def __call__(
        self,
        ids: Integer[Array, "*batch length"] | list[Any] | Any,
        *,
        history: Integer[Array, "*batch before"] | Any = None,
        documents: Integer[Array, "*batch positions"] | Any = None,
        dead: Bool[Array, "*batch positions"] | Any = None,
    ) -> Float[Array, "*batch length embedding_dim"]:
        """Return the vectors of the n-grams that end at each position.

        Args:
            ids: Ids.
            history: The ids before, when decoding; see ``scheme.advance``.
            documents: Document of each id of a packed sequence.
            dead: True at ids that n-grams must not read.
        """
        rows = self._rows(ids, history=history, documents=documents, dead=dead)
        vectors = self.table(rows)
        if self.combine == "sum":
            return vectors.sum(-2)
        return vectors.reshape(*vectors.shape[:-2], self.embedding_dim)

    def prefetch(
        self,
        ids: Integer[Array, "*batch length"] | list[Any] | Any,
        *,
        history: Integer[Array, "*batch before"] | Any = None,
        documents: Integer[Array, "*batch positions"] | Any = None,
        dead: Bool[Array, "*batch positions"] | Any = None,
    ) -> None:
        """Start to read the rows of a coming call, if the table is on disk.

        Args:
            ids: Ids, not traced.
            history: As in a call.
            documents: As in a call.
            dead: As in a call.

        Example:
            >>> import numpy as np
            >>> from firstlayer.ngram import SaltedNgram
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(np.ones((1000, 8), np.float32))
            >>> memory = NgramEmbedding(SaltedNgram(rows=1000), store)
            >>> memory.prefetch([[5, 6, 8]])
            >>> memory([[5, 6, 8]]).shape  # reads these rows
            (1, 3, 32)
        """
        rows = self._rows(ids, history=history, documents=documents, dead=dead)
        if isinstance(self.table, StoredEmbedding):
            self.table.prefetch(rows)

    def _rows(self, ids: Any, **others: Any) -> Any:
        if not isinstance(ids, jax.Array):
            return super()._rows(ids, **others)
        scheme_rows = super()._rows
        arrays = {name: x for name, x in others.items() if isinstance(x, jax.Array)}
        rest = {name: x for name, x in others.items() if name not in arrays}
        return with_sharding(
            lambda ids, arrays: scheme_rows(ids, **rest, **arrays),
            ids,
            arrays,
            out_sharding=None,
            default=lambda: (*axis_specs(ids), None),
        )

    def parameters(self) -> dict[str, Float[Array, "rows width"]]:
        return {f"table.{name}": x for name, x in self.table.parameters().items()}

    def config(self) -> dict[str, Any]:
        return self._config_with(self.table.config())

    def _replace_parameters(self, parameters: dict[str, Any]) -> Any:
        own = {name.removeprefix("table."): x for name, x in parameters.items()}
        return replace_fields(self, table=self.table.with_parameters(own))
