"""Layers on torch whose rows are read from a store: from files, or quantized.

Rows of a quantized table are a buffer of bytes, ``encoded``. Bytes are moved and saved, but
no cast of the module changes them. On the CPU the kernels decode the rows that are looked
up; other devices and compiled code use plain operators. There is never a decoded copy of
the table.
"""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Integer, Real, UInt8
from torch import Tensor, nn

from ..._check import padding_index
from ...embeddings.bag import mean_divisors
from ...embeddings.ragged import flatten_bags
from ...embeddings.token import check_norm
from ...kernels.quantized_rows import GROUP
from ...stores.quantize import (
    QuantizationReport,
    layer_format,
    quantize_table,
    quantized_store,
    weight_error,
)
from ...stores.row_store import RowStore, check_store
from .._tensors.dtypes import as_torch_dtype, compute_dtype, dtype_name
from .._tensors.errors import WrongType, WrongValue, check_tensor, torch_errors
from .._tensors.memory import (
    array_of,
    array_of_table,
    is_plain_cpu,
    tensor_of,
    threads_of_torch,
)
from .._tensors.shard import shard_of
from ..bag import EmbeddingBag
from ..functional import checked_mode, embedding_bag, flat_bags
from ..token import Embedding
from .lookup import as_index
from .max_norm import renormalized

# Number of values decoded at a time to compute logits.
CHUNK = 1 << 22


class StoredEmbedding(Embedding):
    """Looks up rows of a store by id; see :meth:`Embedding.from_store`.

    Args:
        store: The table; None if ``encoded`` is given.
        padding_idx: Id of padding; negative counts from the end.
        max_norm: Longer rows are scaled down to this norm in the output.
        norm_type: The p of the p-norm for ``max_norm``.
        dtype: Dtype of the output; None is that of the store.
    """

    is_stored = True
    #: Size and error, if this process quantized the table.
    quantization: QuantizationReport | None = None
    #: Interleaved rows of a quantized table in memory, or None.
    encoded: UInt8[Tensor, "rows row_bytes"] | None

    def __init__(
        self,
        store: RowStore,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Not the constructor of a layer with a parameter.
        nn.Module.__init__(self)
        with torch_errors():
            self.padding_idx = padding_index(padding_idx, store.shape[0])
            self.max_norm, self.norm_type = check_norm(max_norm, norm_type)
        self.num_embeddings, self.embedding_dim = store.shape
        self.scale_grad_by_freq = self.sparse = False
        self.format_name = store.format.name
        self._store: RowStore | None = store
        # The buffer that a store of a quantized table reads: its address and shape.
        self._store_key: Any = None
        self.register_buffer("encoded", None)
        # An empty tensor: casts of the module change its dtype, which is the output's.
        like = torch.empty(0, dtype=dtype or as_torch_dtype(store.dtype.name))
        self.register_buffer("_output", like, persistent=False)

    @property
    def weight(self) -> NoReturn:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Not available: a TypeError."""
        raise weight_error(self.row_store)

    @property
    def row_store(self) -> RowStore:
        """The table. That of a quantized table reads the buffer ``encoded``."""
        encoded, store = self.encoded, self._store
        if encoded is not None:
            key = encoded.data_ptr(), tuple(encoded.shape)
            if store is None or self._store_key != key:
                rows = array_of(encoded.cpu().contiguous())
                store = quantized_store(rows, self.embedding_dim, self.format_name)
                # Rows on another device are copied, and may change there.
                is_shared = encoded.is_cpu and encoded.is_contiguous()
                self._store, self._store_key = store, key if is_shared else None
        if store is None:
            raise TypeError("a quantized layer without its buffer has no rows")
        return store

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of the output."""
        output: Any = self._output
        return output.dtype

    @property
    def device(self) -> torch.device:
        """Device of a quantized table; the CPU for other stores."""
        table: Any = self._output if self.encoded is None else self.encoded
        return table.device

    def prepare_lookup(self, ids: Integer[Tensor, "*batch"]) -> None:
        """Do nothing: rows of a store are not trained."""

    def prefetch(self, ids: Integer[Tensor, "*batch"]) -> None:
        """Start to read the rows of a coming lookup; see :meth:`RowStore.prefetch`.

        Does nothing in compiled code, and for a quantized table in memory.

        Args:
            ids: Ids of any shape and any integer dtype.
        """
        check_tensor(ids, name="ids")
        if self.encoded is None and not torch.compiler.is_compiling():
            with torch_errors():
                self.row_store.prefetch(array_of(as_index(ids).cpu()))

    def forward(
        self, input: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the rows of the ids.

        Args:
            input: Ids of any shape and any integer dtype.
        """
        return self.upcast_rows(input).to(self.output_dtype)

    def upcast_rows(
        self, ids: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return rows that are not yet rounded to the dtype of the layer."""
        check_tensor(ids, name="ids")
        encoded = self.encoded
        if encoded is None or is_plain_cpu(ids, encoded):
            rows: Tensor = read_on_host(self, as_index(ids))
        else:
            # Torch counts negative ids from the end; the new id is out of range.
            index = as_index(ids)
            index = torch.where(index < 0, self.num_embeddings, index)
            rows = decoded(encoded[index], self.embedding_dim, self.format_name)
        if self.max_norm is None:
            return rows
        rows = rows.to(compute_dtype(rows.dtype))
        return renormalized(rows, self.max_norm, norm_type=self.norm_type)

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row, decoding some rows at a time.

        ``x`` gets a gradient, for which the rows are decoded again.
        """
        check_tensor(x, name="x")
        if not x.is_floating_point():
            raise WrongType(f"x must be real, got {dtype_name(x.dtype)}")
        if x.shape[-1:] != (self.embedding_dim,):
            raise WrongValue(
                f"x must end in embedding_dim {self.embedding_dim}, "
                f"got shape {tuple(x.shape)}"
            )
        return _Logits.apply(x, self._row_chunks)  # pyright: ignore

    def _row_chunks(self, like: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the bounds and rows of some rows after the others, for products."""
        step = max(1, CHUNK // max(1, self.embedding_dim))
        for lo in range(0, self.num_embeddings, step):
            hi = min(lo + step, self.num_embeddings)
            rows = self.upcast_rows(torch.arange(lo, hi, device=self.device))
            yield lo, hi, rows.to(like.device, compute_dtype(like.dtype))

    def reset_parameters(self) -> None:
        raise weight_error(self.row_store)

    def set_padding(self, value: Any) -> None:
        raise weight_error(self.row_store)

    def project(self, ids: Tensor | None = None) -> None:
        raise weight_error(self.row_store)

    def resize(self, num_embeddings: int, **options: Any) -> NoReturn:
        raise weight_error(self.row_store)

    def extra_repr(self) -> str:
        shown = f"{self.num_embeddings}, {self.embedding_dim}, format={self.format_name!r}"
        for name in ("padding_idx", "max_norm"):
            if getattr(self, name) is not None:
                shown += f", {name}={getattr(self, name)}"
        return shown

    def __prepare_scriptable__(self) -> NoReturn:
        raise weight_error(self.row_store)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.encoded is not None:
            # A view of the buffer, which a copy would have of its own.
            state["_store"] = state["_store_key"] = None
        return state


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
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(store, **options)
        self.mode, self.include_last_offset = checked_mode(mode), bool(include_last_offset)

    def forward(
        self,
        input: Integer[Tensor, "*batch"],
        offsets: Integer[Tensor, " bags"] | None = None,
        per_sample_weights: Real[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "bags embedding_dim"]:
        """Return the pooled rows of each bag.

        Args:
            input: Ids: one row for each bag, or 1-D with ``offsets``.
            offsets: Start of each bag in 1-D ids.
            per_sample_weights: Factor for the row of each id; None is 1.
        """
        check_tensor(input, name="ids")
        weights, encoded = per_sample_weights, self.encoded
        if (
            self.mode != "max"
            and self.max_norm is None
            and not input.is_nested
            and is_plain_cpu(input, offsets, weights, encoded)
            and not (weights is not None and weights.requires_grad)
        ):
            return _sum_bags(self, input, offsets, weights).to(self.output_dtype)
        return self._pool_rows(input, offsets, weights).to(self.output_dtype)

    def _pool_rows(
        self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """Pool the rows of all ids, read as a table of their own."""
        include_last_offset = self.include_last_offset
        if ids.is_nested:
            ids, offsets, weights = flat_bags(ids, weights)
            include_last_offset = True
        ids = as_index(ids)
        rows = self.upcast_rows(ids).reshape(-1, self.embedding_dim)
        index = torch.arange(ids.numel(), device=ids.device).reshape(ids.shape)
        padding_idx = None
        if self.padding_idx is not None:
            padding_idx = ids.numel()
            index = torch.where(ids == self.padding_idx, padding_idx, index)
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return embedding_bag(
            index,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )


def read_on_host(layer: StoredEmbedding, ids: Tensor) -> Tensor:
    """Return the rows that the store reads, on the device of the ids."""
    if torch.compiler.is_dynamo_compiling():
        # Here: the module imports the compiler, which takes as long as importing torch.
        from .graph_break import read_between_graphs

        return read_between_graphs(layer, ids)
    with torch_errors(), threads_of_torch():
        rows = layer.row_store.read(array_of(ids.cpu()))
    return tensor_of(rows).to(ids.device)


def _sum_bags(
    layer: StoredEmbeddingBag, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> Tensor:
    """Return sums or means of rows, which the kernels add up as they decode them."""
    store = layer.row_store
    with torch_errors(), threads_of_torch():
        bags = flatten_bags(
            array_of(ids),
            None if offsets is None else array_of(offsets),
            num_embeddings=layer.num_embeddings,
            weights=None if weights is None else array_of(weights),
            padding_idx=layer.padding_idx,
            include_last_offset=layer.include_last_offset,
            dtype=store.dtype,
        )
        divisors = mean_divisors(bags, store.dtype) if layer.mode == "mean" else None
        sums = store.sum_bags(
            bags.ids, bags.bounds, weights=bags.weights, divisors=divisors
        )
    return tensor_of(sums)


class _Logits(torch.autograd.Function):
    """Products with rows that are decoded some at a time, in the backward again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, chunks: Callable[[Tensor], Iterator[tuple[int, int, Tensor]]]
    ) -> Tensor:
        ctx.chunks, ctx.dtype = chunks, x.dtype
        upcast = x.to(compute_dtype(x.dtype))
        parts = [(upcast @ rows.mT).to(x.dtype) for _, _, rows in chunks(x)]
        return torch.cat(parts, dim=-1) if parts else x.new_empty(*x.shape[:-1], 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (d,) = grads
        dx: Any = 0
        for lo, hi, rows in ctx.chunks(d):
            dx = dx + d[..., lo:hi].to(rows.dtype) @ rows
        return None if isinstance(dx, int) else dx.to(ctx.dtype), None


def decoded(
    rows: UInt8[Tensor, "*batch row_bytes"], width: int, format: str
) -> Float[Tensor, "*batch width"]:
    """Return interleaved rows of a quantized table as float32, with plain operators.

    Args:
        rows: Bytes of the rows.
        width: Number of values in a row.
        format: ``"int8"`` or ``"int4"``.
    """
    if layer_format(format).name == "int8":
        scale, bias = (_float32(rows[..., at : at + 4]) for at in (width, width + 4))
        values = rows[..., :width]
        if rows.device.type == "mps":
            return scale[..., None] * values + bias[..., None]
        # In float64, which is rounded once, as by the kernels.
        product = scale.double()[..., None] * values
        return (product + bias.double()[..., None]).float()
    groups = -(-width // GROUP)
    values, scales, biases = rows.split([groups * 16, groups * 2, groups * 2], dim=-1)
    halves = torch.stack([values & 15, values >> 4], dim=-1)
    values = halves.reshape(*rows.shape[:-1], groups, GROUP).float()
    scale, bias = (
        _float32(torch.nn.functional.pad(x.unflatten(-1, (groups, 2)), (2, 0)))
        for x in (scales, biases)
    )
    result = scale[..., None] * values + bias[..., None]
    return result.flatten(-2)[..., :width]


def _float32(rows: UInt8[Tensor, "*batch 4"]) -> Float[Tensor, "*batch"]:
    """Return four little-endian bytes as a float32."""
    numbers = rows.to(torch.int32)
    bits = numbers[..., 0] | numbers[..., 1] << 8
    return (bits | numbers[..., 2] << 16 | numbers[..., 3] << 24).view(torch.float32)


def stored_layer(layer_class: Any, store: RowStore, **options: Any) -> Any:
    """Return the layer over a store that ``layer_class.from_store`` promises.

    Args:
        layer_class: :class:`Embedding` or :class:`EmbeddingBag`.
        store: The table.
        options: Arguments of the layer.
    """
    with torch_errors():
        check_store(store)
    is_bag = issubclass(layer_class, EmbeddingBag)
    return (StoredEmbeddingBag if is_bag else StoredEmbedding)(store, **options)


def quantized_embedding(
    encoded: UInt8[Tensor, "rows row_bytes"],
    width: int,
    format: str,
    *,
    padding_idx: int | None,
    dtype: torch.dtype,
) -> StoredEmbedding:
    """Return a layer over quantized rows in memory."""
    store = quantized_store(array_of(encoded.cpu()), width, format)
    layer = StoredEmbedding(store, padding_idx=padding_idx, dtype=dtype)
    layer.encoded, layer._store = encoded, None
    return layer


def quantize_embedding(embedding: Embedding, format: str) -> StoredEmbedding:
    """Return a layer with the rows of another, quantized, on the same device."""
    if shard_of(embedding.weight) is not None:
        raise TypeError("a sharded table cannot be quantized; quantize the whole table")
    weight = embedding.weight.detach()
    with torch_errors():
        encoded, report = quantize_table(array_of_table(weight.cpu()), format)
    layer = quantized_embedding(
        tensor_of(encoded),
        weight.shape[1],
        format,
        padding_idx=embedding.padding_idx,
        dtype=weight.dtype,
    )
    layer.quantization = report
    return layer.to(weight.device).train(embedding.training)
