"""Layers on NumPy whose rows are read from a store: from files, or quantized."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float, Integer, Real, UInt8

from .._array import compute_dtype
from .._check import boolean, float_dtype, host_array, one_of, padding_index
from ..embeddings.bag import MODES, Mode, mean_divisors
from ..embeddings.ragged import Bags
from ..embeddings.token import check_norm, clip_norms
from ..files.layer_files import rows_not_saved
from ..stores.quantize import (
    QuantizationReport,
    quantize_table,
    quantized_store,
    weight_error,
)
from ..stores.row_store import RowStore, check_store
from ._bias import gradient_like
from ._module import upcast
from .bag import EmbeddingBag
from .token import CHUNK, Embedding, Ids


class StoredEmbedding(Embedding):
    """Looks up rows of a store by id; see :meth:`Embedding.from_store`.

    Args:
        store: The table.
        padding_idx: Id of padding; negative counts from the end.
        max_norm: Largest norm of a row in the output.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        dtype: Dtype of the output; None is that of the store.
    """

    is_stored = True
    #: Interleaved rows of a quantized table in memory, which layer files hold.
    encoded: UInt8[np.ndarray, "rows row_bytes"] | None = None
    _width = 0
    #: Size and error, if this process quantized the table.
    quantization: QuantizationReport | None = None

    def __init__(
        self,
        store: RowStore,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        dtype: Any = None,
    ) -> None:
        self.row_store = store
        self.padding_idx = padding_index(padding_idx, store.shape[0])
        self.max_norm, self.norm_type = check_norm(max_norm, norm_type)
        self.scale_grad_by_freq = False
        self._dtype = store.dtype if dtype is None else float_dtype(dtype)

    @property
    def weight(self) -> NoReturn:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Not available: a TypeError."""
        raise weight_error(self.row_store)

    @property
    def format_name(self) -> str:
        """Name of the format of the rows."""
        return self.row_store.format.name

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return self.row_store.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Width of each row."""
        return self.row_store.shape[1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the output."""
        return self._dtype

    def __call__(self, ids: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        return self.upcast_rows(ids).astype(self.dtype, copy=False)

    def upcast_rows(self, ids: Ids) -> Float[np.ndarray, "*batch embedding_dim"]:
        """Return rows that are not yet rounded to the dtype of the layer."""
        rows = self.row_store.read(ids)
        if self.max_norm is not None:
            rows = clip_norms(
                upcast(rows), max_norm=self.max_norm, norm_type=self.norm_type
            )
        return rows

    def vjp(self, ids: Ids) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, Any]]]:
        """Return the output and a pullback that returns no gradient: rows are constants."""
        return self(ids), lambda dy: {}

    def logits_vjp(
        self, x: Float[Any, "*batch embedding_dim"]
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
        """Return the logits and their pullback, to the gradient of ``x``."""
        x = host_array(x, name="x").copy()
        logits = self.logits(x)

        def pull(dlogits: np.ndarray) -> dict[str, np.ndarray]:
            d = gradient_like(dlogits, logits, name="dlogits")
            dx = np.zeros(x.shape, compute_dtype(x.dtype))
            for lo, hi, rows in self._chunks(dx.dtype):
                dx += d[..., lo:hi] @ rows
            return {"x": dx.astype(x.dtype, copy=False)}

        return logits, pull

    def prefetch(self, ids: Ids) -> None:
        """Start to read the rows of a coming lookup; see :meth:`RowStore.prefetch`."""
        self.row_store.prefetch(ids)

    def project(self, ids: Ids | None = None) -> None:
        raise weight_error(self.row_store)

    def resize(self, num_embeddings: int, **options: Any) -> NoReturn:
        raise weight_error(self.row_store)

    def set_padding(self, value: Any) -> None:
        raise weight_error(self.row_store)

    def parameters(self) -> dict[str, np.ndarray]:
        return {}

    def buffers(self) -> dict[str, np.ndarray]:
        return {} if self.encoded is None else {"encoded": self.encoded}

    def embeddings(self) -> dict[str, Any]:
        """Return nothing: optimizers do not train the rows."""
        return {}

    def config(self) -> dict[str, Any]:
        raise rows_not_saved(self.row_store)

    def __repr__(self) -> str:
        options = {"padding_idx": self.padding_idx, "max_norm": self.max_norm}
        given = "".join(f", {k}={v!r}" for k, v in options.items() if v is not None)
        return f"{type(self).__name__}({self.row_store!r}{given})"

    def __getstate__(self) -> dict[str, Any]:
        if self.encoded is None:
            return self.__dict__
        # The parts of the store are views of the encoded rows, which are copied once.
        return {**self.__dict__, "row_store": self.row_store.format.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(name := state["row_store"], str):
            self.row_store = quantized_store(state["encoded"], state["_width"], name)

    def _chunks(self, dtype: Any) -> Iterator[tuple[int, int, np.ndarray]]:
        step = max(1, CHUNK // max(1, self.embedding_dim))
        for lo in range(0, self.num_embeddings, step):
            hi = min(lo + step, self.num_embeddings)
            yield lo, hi, self.row_store.read(np.arange(lo, hi)).astype(dtype, copy=False)


class StoredEmbeddingBag(StoredEmbedding, EmbeddingBag):
    """Pools rows of a store; see :meth:`EmbeddingBag.from_store`.

    Args:
        store: The table.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: Whether the last offset is the end of the last bag.
        options: As in :class:`StoredEmbedding`.
    """

    def __init__(
        self,
        store: RowStore,
        *,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        one_of("mode", mode, MODES)
        super().__init__(store, **options)
        self.mode, self.include_last_offset = (
            mode,
            boolean("include_last_offset", include_last_offset),
        )

    def __call__(
        self,
        ids: Integer[Any, "*batch"] | list[Any],
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
    ) -> Float[np.ndarray, "bags embedding_dim"]:
        if self.mode == "max" or self.max_norm is not None:
            return EmbeddingBag.__call__(self, ids, offsets, per_sample_weights)
        bags = self._bags(ids, offsets, per_sample_weights)
        divisors = (
            mean_divisors(bags, self.row_store.dtype) if self.mode == "mean" else None
        )
        sums = self.row_store.sum_bags(
            bags.ids, bags.bounds, weights=bags.weights, divisors=divisors
        )
        return sums.astype(self.dtype, copy=False)

    def vjp(
        self,
        ids: Integer[Any, "*batch"] | list[Any],
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
    ) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, Any]]]:
        """Return the output and its pullback, to the gradient of ``per_sample_weights``.

        The rows are constants and get none.
        """
        y, pull = EmbeddingBag.vjp(self, ids, offsets, per_sample_weights)
        return y, lambda dy: {k: v for k, v in pull(dy).items() if k != "weight"}

    def _rows_of(self, bags: Bags, *, copy: bool) -> tuple[np.ndarray, Bags]:
        unique, ids = np.unique(bags.ids, return_inverse=True)
        return self.upcast_rows(unique), replace(bags, ids=ids)


def quantized_embedding(
    encoded: UInt8[np.ndarray, "rows row_bytes"],
    width: int,
    format: str,
    *,
    padding_idx: int | None,
    dtype: Any,
) -> StoredEmbedding:
    """Return a layer over quantized rows in memory."""
    store = quantized_store(encoded, width, format)
    layer = StoredEmbedding(store, padding_idx=padding_idx, dtype=dtype)
    layer.encoded, layer._width = encoded, width
    return layer


def quantize_embedding(embedding: Embedding, format: str) -> StoredEmbedding:
    """Return a layer with the rows of another, quantized."""
    table = embedding.weight
    encoded, report = quantize_table(table, format)
    layer = quantized_embedding(
        encoded,
        table.shape[1],
        format,
        padding_idx=embedding.padding_idx,
        dtype=table.dtype,
    )
    layer.quantization = report
    return layer


def stored_layer(layer_class: Any, store: RowStore, **options: Any) -> Any:
    """Return the layer over a store that ``layer_class.from_store`` promises.

    Args:
        layer_class: :class:`Embedding` or :class:`EmbeddingBag`.
        store: The table.
        options: Arguments of the layer.
    """
    check_store(store)
    is_bag = issubclass(layer_class, EmbeddingBag)
    return (StoredEmbeddingBag if is_bag else StoredEmbedding)(store, **options)
