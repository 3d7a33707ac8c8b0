"""Lookups of the rows of n-grams on torch."""

from typing import Any

from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from ..files.layer_configs import config_of
from ..ngram.layers import NgramArguments
from ..ngram.scheme import Scheme
from ..stores.row_store import RowStore
from ._table.module import TableModule
from ._tensors.dtypes import dtype_name
from ._tensors.errors import check_tensor, torch_errors
from .token import Embedding


class NgramEmbedding(NgramArguments, nn.Module):
    """Looks up the rows of the n-grams that end at each position.

    Args:
        scheme: Scheme of :mod:`firstlayer.ngram`.
        table: Layer with the table, a store of :mod:`firstlayer.stores`, or the width of
            the rows of a new table.
        layer: Layer of the model whose table it is; may be left out if the scheme has one.
        combine: ``"concat"``, or ``"sum"`` as in BLT.
        options: Arguments of :class:`Embedding` for a new table, such as ``sparse=True``,
            or of :meth:`Embedding.from_store` for a store.

    Shape:
        - ids: ``(..., length)``, any integer dtype
        - output: ``(..., length, columns * width)``, or ``(..., length, width)`` if summed

    Example:
        >>> import torch
        >>> from firstlayer.ngram import SaltedNgram
        >>> memory = NgramEmbedding(SaltedNgram(rows=1000), 8, sparse=True)
        >>> memory(torch.tensor([[5, 6, 7]])).shape
        torch.Size([1, 3, 32])
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
        super().__init__()
        with torch_errors():
            self._set_arguments(scheme, table, layer=layer, combine=combine, **options)

    def forward(
        self,
        ids: Integer[Tensor, "*batch length"],
        *,
        history: Integer[Tensor, "*batch before"] | None = None,
        documents: Integer[Tensor, "*batch positions"] | None = None,
        dead: Bool[Tensor, "*batch positions"] | None = None,
    ) -> Float[Tensor, "*batch length embedding_dim"]:
        """Return the vectors of the n-grams that end at each position.

        Args:
            ids: Ids.
            history: The ids before, when decoding; see ``scheme.advance``.
            documents: Document of each id of a packed sequence.
            dead: True at ids that n-grams must not read.
        """
        try:
            rows = self._rows(ids, history=history, documents=documents, dead=dead)
        except Exception as error:
            if isinstance(self.table, TableModule):
                self.table.announce(error)
            raise
        vectors = self.table(rows)
        return vectors.flatten(-2) if self.combine == "concat" else vectors.sum(-2)

    def prefetch(
        self,
        ids: Integer[Tensor, "*batch length"],
        *,
        history: Integer[Tensor, "*batch before"] | None = None,
        documents: Integer[Tensor, "*batch positions"] | None = None,
        dead: Bool[Tensor, "*batch positions"] | None = None,
    ) -> None:
        """Start to read the rows of a coming call; see :meth:`Embedding.prefetch`.

        Args:
            ids: Ids.
            history: As in a call.
            documents: As in a call.
            dead: As in a call.

        Example:
            >>> import torch
            >>> from firstlayer.ngram import SaltedNgram
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(torch.ones(1000, 8).numpy())
            >>> memory = NgramEmbedding(SaltedNgram(rows=1000), store)
            >>> memory.prefetch(torch.tensor([[5, 6, 8]]))
            >>> memory(torch.tensor([[5, 6, 8]])).shape  # reads these rows
            torch.Size([1, 3, 32])
        """
        rows = self._rows(ids, history=history, documents=documents, dead=dead)
        self.table.prefetch(rows)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild this layer, as plain values.

        Example:
            >>> from firstlayer.ngram import SaltedNgram
            >>> NgramEmbedding(SaltedNgram(rows=1000), 8).config()["combine"]
            'concat'
        """
        table = self.table
        own = config_of(table, dtype=dtype_name(table.weight.dtype))
        return self._config_with(own)

    def _rows(self, ids: Tensor, **others: Tensor | None) -> Tensor:
        check_tensor(ids, name="ids")
        with torch_errors():
            return super()._rows(ids, **others)

    def extra_repr(self) -> str:
        return f"{type(self.scheme).__name__}, combine={self.combine!r}"
