"""Bags on torch: the sum, mean or maximum of rows by id."""

import os
from typing import Any, Self

import torch
from jaxtyping import Float, Integer, Real
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import EmbeddingBag as TorchEmbeddingBag

from ..stores.row_store import RowStore
from ..stores.training import TrainingStore
from ._bags.options import BagOptions
from ._bags.plan import BagPlan, bag_plan
from ._bags.pooling import pool_bags
from ._table.disk import layer_on_disk
from ._table.host import HostTableModule, checked_output_device
from ._table.lookup import as_index, checked_padding_idx
from ._table.module import check_arguments
from ._table.pretrained import table_tensor
from ._tensors.memory import is_plain_cpu
from .functional import checked_mode, embedding_bag
from .optim.table_state import caught_up_rows


class EmbeddingBag(HostTableModule, TorchEmbeddingBag):
    """Looks up rows and pools them. Drop-in replacement for ``torch.nn.EmbeddingBag``.

    Arguments, attributes, ``from_pretrained`` and the state dict are torch's.
    :mod:`firstlayer.embeddings.bag` defines the result of every mode. Differences from
    torch: every mode supports ``per_sample_weights``, ``sparse`` and
    ``scale_grad_by_freq``; second and forward-mode derivatives exist; ``max_norm``, half
    precision and ids as in :class:`firstlayer.torch.Embedding`.

    Args:
        num_embeddings: Number of rows, one for each id.
        embedding_dim: Width of each vector.
        max_norm: Maximum norm of rows. Longer rows are scaled down before pooling, and in
            the table once their gradient is accumulated. Under FSDP2 the table is scaled
            only if it is sharded by rows and looked up eagerly.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs in
            the call.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Make the gradient of the table a coalesced sparse tensor.
        _weight: Table to use; its padding row is not changed.
        include_last_offset: Whether the last offset is the end of the last bag.
        padding_idx: Id of padding, which is left out of every bag; negative counts from the
            end.
        device: Device of the table.
        dtype: Dtype of the table.
        output_device: Device of the output of a table that stays in host memory; see
            :class:`firstlayer.torch.Embedding`. Rows are pooled on the host.

    Shape:
        - input: ``(bags, length)``, or ``(n,)`` with offsets, or a jagged nested tensor;
          any integer dtype
        - offsets: ``(bags,)``, the start of each bag: 0 first, never decreasing;
          ``(bags + 1,)`` with ``include_last_offset``
        - per_sample_weights: as ``input``
        - output: ``(bags, embedding_dim)``, in the table's dtype

    Example:
        >>> import torch
        >>> table = torch.tensor([[1.0], [2.0], [4.0]])
        >>> bag = EmbeddingBag.from_pretrained(table, mode="mean")
        >>> ids, weights = torch.tensor([[0, 2]]), torch.tensor([[3.0, 1.0]])
        >>> bag(ids).tolist(), bag(ids, per_sample_weights=weights).tolist()
        ([[2.5]], [[1.75]])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        output_device: Any = None,
    ) -> None:
        if checked_output_device(output_device, device, _weight) is not None:
            device = "cpu" if device is None else device
        check_arguments(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            weight=_weight,
            max_norm=max_norm,
            norm_type=norm_type,
        )
        super().__init__(
            num_embeddings,
            embedding_dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            checked_mode(mode),
            sparse,
            # torch.nn.Parameter refuses a parameter that a row optimizer trains.
            None if _weight is None else _weight.detach(),
            include_last_offset,
            padding_idx,
            device,
            dtype,
        )
        self.output_device = output_device
        self._bind()

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor | str | os.PathLike[str],
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Self:
        """Return a layer with this table, as torch's ``from_pretrained`` does.

        Args:
            embeddings: The table, or the path of a file or folder with one: whatever
                :func:`firstlayer.open_vectors` opens, with or without words. A table from a
                file is float32.
            freeze: Whether the table gets no gradient.
            max_norm: As in the constructor.
            norm_type: As in the constructor.
            scale_grad_by_freq: As in the constructor.
            mode: As in the constructor.
            sparse: As in the constructor.
            include_last_offset: As in the constructor.
            padding_idx: As in the constructor.
        """
        layer: Any = super().from_pretrained(
            table_tensor(embeddings),
            freeze=freeze,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
        return layer

    @classmethod
    def from_store(cls, store: RowStore, **options: Any) -> Self:
        """Return a layer over the table of a store.

        See :meth:`firstlayer.torch.Embedding.from_store`.

        Args:
            store: The table.
            options: Further arguments of the layer.

        Example:
            >>> from firstlayer.stores import MemoryStore
            >>> store = MemoryStore(torch.eye(4, 2).numpy(), format="float16")
            >>> bag = EmbeddingBag.from_store(store, mode="sum")
            >>> bag(torch.tensor([[0, 1], [0, 0]])).tolist()
            [[1.0, 1.0], [2.0, 0.0]]
        """
        if isinstance(store, TrainingStore):
            return layer_on_disk(cls, store, **options)
        from ._table.stored import stored_layer

        return stored_layer(cls, store, **options)

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
        if self._prefetches or self._output_device is not None:
            return self._pool_on_host(input, offsets, per_sample_weights)
        if offsets is None or per_sample_weights is not None or is_compiling():
            return self._pool(input, offsets, per_sample_weights)
        plan: BagPlan | None = self.__dict__.get("_plan")
        y = None if plan is None else plan.run(self, input, offsets)
        if y is None:
            y = self._pool(input, offsets, None)
            if plan is None or plan.current_table(self) is None:
                self.__dict__["_plan"] = bag_plan(self, input, offsets)
        return y

    def _pool(self, input: Any, offsets: Any, per_sample_weights: Any) -> Tensor:
        weight, padding_idx = self.weight, self.padding_idx
        if not self.training and self.reads_out_of_place(input):
            input, weight, padding_idx = self._caught_up_table(input)
        else:
            # embedding_bag catches up the rows.
            self._install_grad_hook(weight)
        return embedding_bag(
            input,
            weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            padding_idx,
        )

    def _pool_on_host(self, input: Any, offsets: Any, per_sample_weights: Any) -> Tensor:
        """Pool prefetched rows if there are any, on the output device if there is one."""
        ids, offsets, weights = map(self._to_host, (input, offsets, per_sample_weights))
        rows = None
        if self.max_norm is None and is_plain_cpu(ids, offsets, weights):
            rows = self._prefetched_rows(ids)
        if rows is None:
            return self._to_output_device(self._pool(ids, offsets, weights))
        options = BagOptions(
            checked_mode(self.mode),
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            self.include_last_offset,
            checked_padding_idx(self.padding_idx, self.weight.shape[0]),
        )
        y = pool_bags(
            ids,
            self.weight,
            offsets=offsets,
            weights=weights,
            options=options,
            gathered=rows,
        )
        return self._to_output_device(y)

    def _caught_up_table(
        self, ids: Integer[Tensor, "*batch"]
    ) -> tuple[Tensor, Tensor, int | None]:
        """Return ids into a table with a row for each id, the table, and padding's id."""
        ids = as_index(ids)
        rows = caught_up_rows(self.weight, ids).reshape(-1, self.embedding_dim)
        index = torch.arange(ids.numel(), device=ids.device).reshape(ids.shape)
        if self.padding_idx is None:
            return index, rows, None
        index = torch.where(ids == self.padding_idx, ids.numel(), index)
        return index, torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), ids.numel()

    def __getstate__(self) -> dict[str, Any]:
        # A plan has addresses of this process.
        return {key: x for key, x in super().__getstate__().items() if key != "_plan"}

    def __prepare_scriptable__(self) -> TorchEmbeddingBag:
        # TorchScript cannot compile this forward, so it gets torch's layer.
        return self._twin(TorchEmbeddingBag)
