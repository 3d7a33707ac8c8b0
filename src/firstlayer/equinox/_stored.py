"""Layers for Equinox whose rows are read from a store: from files, or quantized.

A quantized table in memory is an array of bytes, which is a leaf but not an inexact one:
nothing trains it. JAX operators decode the rows that are looked up, on any device and under
``jit``. Rows of any other store are read by the host, in a callback if the ids are traced.
"""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Real, UInt8

from .._array import compute_dtype
from .._check import boolean, check_real, one_of, padding_index
from ..embeddings.bag import MODES, Mode
from ..embeddings.token import check_norm
from ..files.layer_files import rows_not_saved
from ..kernels.quantized_rows import GROUP
from ..stores.quantize import (
    QuantizationReport,
    quantize_table,
    quantized_store,
    weight_error,
)
from ..stores.row_store import RowStore, check_store
from ._bags import checked_offsets, checked_weights
from ._ids import IdsArgument, call_values, host_values, ids_argument, is_token
from ._lookup import LookupOptions, compiled_look_up, limit_norm
from ._module import Module, compiled, native
from ._parameters import Key, table_dtype
from ._sharding import OutSharding
from ._table_rows import StoredRows
from .bag import BagOptions, pool

# Number of values decoded at a time to compute logits.
CHUNK = 1 << 22
Ids = Integer[Array, "*batch"] | Integer[np.ndarray, "*batch"] | list[Any] | int | Any


class EncodedRows(StoredRows):
    """Interleaved rows of a quantized table.

    Args:
        encoded: The rows.
        width: Number of values in a row.
    """

    encoded: UInt8[Array, "rows row_bytes"]
    width: int = eqx.field(static=True)

    @property
    def values(self) -> Array:
        return self.encoded

    def take(self, index: Integer[Array, "*batch"]) -> Float[Array, "*batch width"]:
        """Return the rows of an index in range, in float32."""
        if not self.encoded.shape[0]:
            return jnp.zeros((*index.shape, self.width), jnp.float32)
        rows = self.encoded.at[index].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )
        return decoded(rows, self.width, self.format_name)

    def store(self) -> RowStore:
        """Return a store over a copy of the rows in host memory."""
        encoded = np.asarray(self.encoded)
        return quantized_store(encoded, self.width, self.format_name)


class HostRows(StoredRows):
    """Rows of a store that the host reads.

    Args:
        row_store: The store.
    """

    row_store: RowStore = eqx.field(static=True)

    @property
    def values(self) -> Array:
        return jnp.zeros((1, 1))

    def take(self, index: Integer[Array, "*batch"]) -> Float[Array, "*batch width"]:
        """Return the rows of an index in range, read by a callback."""
        shape = (*index.shape, self.row_store.shape[1])
        result = jax.ShapeDtypeStruct(shape, self.row_store.dtype)
        return jax.pure_callback(
            lambda ids: self.row_store.read(np.asarray(ids)),
            result,
            jax.lax.stop_gradient(index),
            vmap_method="broadcast_all",
        )

    def store(self) -> RowStore:
        """Return the store."""
        return self.row_store


class StoredEmbedding(Module):
    """Looks up rows of a store by id; see :meth:`Embedding.from_store`.

    Args:
        rows: The table.
        num_embeddings: Number of rows.
        embedding_dim: Width of each row.
        padding_idx: Padding id; negative counts from the end.
        max_norm: Longer rows are scaled down to this norm in the output.
        norm_type: The p of the p-norm for ``max_norm``.
        quantization: Size and error, if this process quantized the table.
    """

    rows: StoredRows
    num_embeddings: int = eqx.field(static=True)
    embedding_dim: int = eqx.field(static=True)
    padding_idx: int | None = eqx.field(static=True)
    max_norm: float | None = eqx.field(static=True)
    norm_type: float = eqx.field(static=True)
    quantization: QuantizationReport | None = eqx.field(static=True)

    def __init__(
        self,
        rows: StoredRows,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        quantization: QuantizationReport | None = None,
    ) -> None:
        self.rows = rows
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_index(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = check_norm(max_norm, norm_type)
        self.quantization = quantization

    @property
    def weight(self) -> Any:
        """Not available: a TypeError."""
        raise weight_error(self.row_store)

    @property
    def row_store(self) -> RowStore:
        """The table; a copy in host memory if it is quantized in memory."""
        return self.rows.store()

    @property
    def encoded(self) -> UInt8[Array, "rows row_bytes"] | None:
        """Interleaved rows of a quantized table in memory, which layer files hold."""
        return self.rows.encoded if isinstance(self.rows, EncodedRows) else None

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the output."""
        return self.rows.dtype

    @property
    def format_name(self) -> str:
        """Name of the format of the rows."""
        return self.rows.format_name

    def __call__(
        self, ids: Ids, *, out_sharding: OutSharding = None, key: Key | None = None
    ) -> Float[Array, "*batch embedding_dim"]:
        """Return the rows of ``ids``.

        Args:
            ids: Ids of the rows.
            out_sharding: Sharding of the result on a mesh with explicit axes.
            key: Ignored; accepted for :class:`equinox.nn.Sequential`.
        """
        values = call_values(ids)
        if isinstance(self.rows, HostRows) and values is not None:
            # Without a callback, whose rows no accelerator could receive faster.
            rows = jnp.asarray(self.rows.row_store.read(values))
            return _limited(self._options(), rows).astype(self.dtype)
        argument = self._check_ids(ids)
        return compiled_look_up(self._options(), self.rows, argument, out_sharding)

    def logits(
        self,
        x: Float[Array, "*batch embedding_dim"] | Float[np.ndarray, "..."],
        *,
        out_sharding: OutSharding = None,
    ) -> Float[Array, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row, decoding some rows at a time.

        Args:
            x: The vectors.
            out_sharding: Sharding of the result on a mesh with explicit axes.
        """
        check_real(x, name="x", whole=False)
        x = x if isinstance(x, jax.Array) else jnp.asarray(native(np.asarray(x)))
        if x.shape[-1:] != (self.embedding_dim,):
            raise ValueError(
                f"x must end in embedding_dim {self.embedding_dim}, got shape {x.shape}"
            )
        out = _products(self.num_embeddings, self.rows, x)
        return (
            out
            if out_sharding is None
            else jax.lax.with_sharding_constraint(out, out_sharding)
        )

    def prefetch(self, ids: Ids) -> None:
        """Start to read the rows of a coming lookup; see :meth:`RowStore.prefetch`.

        Args:
            ids: Ids of the rows, not traced.
        """
        values = host_values(ids)
        if isinstance(self.rows, HostRows) and values is not None:
            self.rows.row_store.prefetch(values)

    def mask(self, ids: Ids) -> Bool[Array, "*batch"]:
        """Return True where ``ids`` is a token and False where it is padding."""
        return is_token(ids, self.padding_idx)

    def config(self) -> dict[str, Any]:
        raise rows_not_saved(self.row_store)

    @property
    def _rows(self) -> StoredRows:
        return self.rows

    def _check_ids(
        self, ids: Ids, *, name: str = "ids", bound: str = "num_embeddings"
    ) -> IdsArgument:
        return ids_argument(ids, self.num_embeddings, name=name, bound=bound)

    def _options(self, *, upcast: bool = False) -> LookupOptions:
        return LookupOptions(
            self.num_embeddings,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            upcast=upcast,
        )


class StoredEmbeddingBag(StoredEmbedding):
    """Pools rows of a store; see :meth:`EmbeddingBag.from_store`.

    Args:
        rows: The table.
        num_embeddings: Number of rows.
        embedding_dim: Width of each row.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: Whether the last offset is the end of the last bag.
        options: As in :class:`StoredEmbedding`.
    """

    mode: Mode = eqx.field(static=True)
    include_last_offset: bool = eqx.field(static=True)

    def __init__(
        self,
        rows: StoredRows,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(rows, num_embeddings, embedding_dim, **options)
        one_of("mode", mode, MODES)
        self.mode = mode
        self.include_last_offset = boolean("include_last_offset", include_last_offset)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        ids: Ids,
        offsets: Integer[Any, " offsets"] | list[Any] | None = None,
        per_sample_weights: Real[Any, "*batch"] | list[Any] | None = None,
        *,
        out_sharding: OutSharding = None,
        key: Key | None = None,
    ) -> Float[Array, "bags embedding_dim"]:
        """Return one row for each bag; see :class:`EmbeddingBag`."""
        argument = self._check_ids(ids)
        shape, include_last = argument.ids.shape, self.include_last_offset
        offsets = checked_offsets(shape, offsets, include_last_offset=include_last)
        weights = checked_weights(shape, per_sample_weights)
        options = BagOptions(self._options(upcast=True), self.mode, include_last)
        return pool(options, self.rows, argument, offsets, weights, out_sharding)


def decoded(
    rows: UInt8[Array, "*batch row_bytes"], width: int, format_name: str
) -> Float[Array, "*batch width"]:
    """Return interleaved rows of a quantized table in float32.

    Args:
        rows: Bytes of the rows.
        width: Number of values in a row.
        format_name: ``"int8"`` or ``"int4"``.
    """
    if format_name == "int8":
        scale, bias = (
            jax.lax.bitcast_convert_type(rows[..., at : at + 4], jnp.float32)[..., None]
            for at in (width, width + 4)
        )
        # XLA fuses this on the CPU, so that it is rounded once, as by the kernels.
        return scale * rows[..., :width].astype(jnp.float32) + bias
    groups = -(-width // GROUP)
    ends = groups * 16, groups * 18, groups * 20
    pairs = rows[..., : ends[0]]
    values = jnp.stack([pairs & 15, pairs >> 4], axis=-1)
    values = values.reshape(*rows.shape[:-1], groups, GROUP).astype(jnp.float32)
    scale, bias = (
        jax.lax.bitcast_convert_type(
            rows[..., start:end].reshape(*rows.shape[:-1], groups, 2), jnp.bfloat16
        ).astype(jnp.float32)[..., None]
        for start, end in zip(ends[:-1], ends[1:], strict=True)
    )
    # The product is exact, so that a fused multiply-add gives the same.
    result = scale * values + bias
    return result.reshape(*rows.shape[:-1], groups * GROUP)[..., :width]


@partial(compiled, static_argnums=0)
def _limited(options: LookupOptions, rows: Array) -> Array:
    return limit_norm(rows, options)


@partial(compiled, static_argnums=0)
def _products(num_embeddings: int, table: StoredRows, x: Array) -> Array:
    dtype = jnp.dtype(compute_dtype(x.dtype))
    step = max(1, min(num_embeddings, CHUNK // max(1, x.shape[-1])))
    upcast_x = x.astype(dtype)

    # The backward decodes again: saved rows would be the decoded table.
    @jax.checkpoint
    def product(start: Array, upcast_x: Array) -> Array:
        rows = jax.lax.stop_gradient(table.take(start + jnp.arange(step))).astype(dtype)
        return jnp.einsum("...d,rd->r...", upcast_x, rows)

    whole = num_embeddings // step
    starts = jnp.arange(whole, dtype=jnp.int32) * step
    parts = jax.lax.map(lambda start: product(start, upcast_x), starts)
    out = parts.reshape(whole * step, *x.shape[:-1])
    if whole * step < num_embeddings:
        # The last chunk overlaps the one before it.
        last = product(jnp.int32(num_embeddings - step), upcast_x)
        out = jnp.concatenate([out, last[whole * step - num_embeddings :]])
    return jnp.moveaxis(out, 0, -1).astype(x.dtype)


def stored_layer(layer_class: Any, store: RowStore, **options: Any) -> Any:
    """Return the layer over a store that ``layer_class.from_store`` promises.

    Args:
        layer_class: :class:`StoredEmbedding` or :class:`StoredEmbeddingBag`.
        store: The table.
        options: Arguments of the layer, and the ``dtype`` of its output.
    """
    check_store(store)
    dtype = options.pop("dtype", None)
    name = store.dtype.name if dtype is None else table_dtype(dtype).name
    rows = HostRows(store.format.name, name, store)
    return layer_class(rows, *store.shape, **options)


def quantized_embedding(
    encoded: UInt8[Any, "rows row_bytes"],
    width: int,
    format: str,
    *,
    padding_idx: int | None,
    dtype: str,
    quantization: QuantizationReport | None = None,
) -> StoredEmbedding:
    """Return a layer over quantized rows in memory."""
    # Checks the bytes against the format.
    quantized_store(np.asarray(encoded), width, format)
    rows = EncodedRows(format, dtype, jnp.asarray(encoded), width)
    return StoredEmbedding(
        rows, len(encoded), width, padding_idx=padding_idx, quantization=quantization
    )


def quantize_embedding(embedding: Any, format: str) -> StoredEmbedding:
    """Return a layer with the rows of another, quantized."""
    # Without the rows of zeros at the end of a sharded table.
    table = np.asarray(embedding.weight)[: embedding.num_embeddings]
    encoded, report = quantize_table(table, format)
    return quantized_embedding(
        encoded,
        table.shape[1],
        format,
        padding_idx=embedding.padding_idx,
        dtype=table.dtype.name,
        quantization=report,
    )
