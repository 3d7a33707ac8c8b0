"""Token embeddings on torch: rows of a table by id."""

import os
from typing import Any, Self

from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn import Embedding as TorchEmbedding

from ..stores.row_store import RowStore
from ..stores.training import TrainingStore
from ._table.disk import layer_on_disk
from ._table.host import HostTableModule, checked_output_device
from ._table.lookup import LookupOptions, as_index, checked_padding_idx, lookup
from ._table.max_norm import renormalized
from ._table.module import check_arguments
from ._table.prefetch import lookup_gathered
from ._table.pretrained import table_tensor


class Embedding(HostTableModule, TorchEmbedding):
    """Looks up rows of a table by id. Drop-in replacement for ``torch.nn.Embedding``.

    Arguments, attributes, ``from_pretrained`` and the state dict are torch's. Differences:
    ``max_norm`` does not write to the table in the forward, gradients of repeated ids are
    summed in float32 even in half precision, sparse gradients are coalesced, and ids may
    have any integer dtype.

    Args:
        num_embeddings: Number of rows, one for each id.
        embedding_dim: Width of each vector.
        padding_idx: Id of padding; negative counts from the end. Its row starts at zero and
            gets no gradient from lookups; :meth:`set_padding` writes another value.
        max_norm: Maximum norm of rows. Longer rows are scaled down in the output, and in
            the table once their gradient is accumulated. Under FSDP2 the table is scaled
            only if it is sharded by rows and looked up eagerly.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs in
            the call.
        sparse: Make the gradient of the table a coalesced sparse tensor.
        _weight: Table to use; its padding row is not changed.
        _freeze: Do not train the table.
        device: Device of the table.
        dtype: Dtype of the table.
        output_device: Device of the output of a table that stays in host memory, whatever
            device the model is moved to: rows are gathered on the host and copied, and the
            gradient is copied back. None returns rows on the device of the table.

    Shape:
        - input: any shape, any integer dtype
        - output: ``(*input.shape, embedding_dim)``, in the table's dtype

    An id out of range raises an IndexError that names it, and so does a negative id; under
    ``torch.compile`` and on other devices the error is torch's, and in an ONNX graph that
    of the runtime. Autocast does not change lookups; :meth:`logits` multiplies in the
    autocast dtype.

    Example:
        >>> import torch
        >>> embedding = Embedding(10, 4, padding_idx=-1)
        >>> embedding(torch.tensor([[1, 2, 9]], dtype=torch.uint8)).shape
        torch.Size([1, 3, 4])
        >>> embedding(torch.tensor([3, 10]))
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.OutOfRange: ids[1] is 10, but num_embeddings is 10
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
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
            max_norm=max_norm,
            norm_type=norm_type,
            weight=_weight,
        )
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            # torch.nn.Parameter refuses a parameter that a row optimizer trains.
            None if _weight is None else _weight.detach(),
            _freeze,
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
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Self:
        """Return a layer with this table, as torch's ``from_pretrained`` does.

        Args:
            embeddings: The table, or the path of a file or folder with one: whatever
                :func:`firstlayer.open_vectors` opens, with or without words. A table from a
                file is float32.
            freeze: Whether the table gets no gradient.
            padding_idx: As in the constructor.
            max_norm: As in the constructor.
            norm_type: As in the constructor.
            scale_grad_by_freq: As in the constructor.
            sparse: As in the constructor.

        Example:
            >>> import tempfile, torch
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with open(folder + "/glove.txt", "w") as file:
            ...         count = file.write("king 1 0.5\\nqueen 0 2\\n")
            ...     embedding = Embedding.from_pretrained(folder + "/glove.txt")
            >>> embedding(torch.tensor([1])).tolist()
            [[0.0, 2.0]]
        """
        return super().from_pretrained(
            table_tensor(embeddings),
            freeze=freeze,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
        )

    @classmethod
    def from_store(cls, store: RowStore, **options: Any) -> Self:
        """Return a layer over the table of a store.

        A :class:`~firstlayer.stores.TrainingStore` is trained on disk. ``weight`` is a
        Parameter over the mapped file, with sparse gradients. The row optimizers of
        :mod:`firstlayer.torch.optim` put their state into the store, and journal rows
        before they change. ``store.commit()`` makes a step permanent. ``state_dict`` makes
        a commit and has its name instead of the values, and ``load_state_dict`` returns to
        it. Copies, casts and moves to another device are errors.

        Rows of any other store are read on the CPU, copied to the device of the ids, and
        not trained. There is no parameter: reading ``weight`` is a TypeError.

        Args:
            store: The table.
            options: Further arguments of the layer.

        Example:
            >>> import tempfile, torch
            >>> from firstlayer.stores import create_store
            >>> from firstlayer.torch.optim import RowAdamW
            >>> folder = tempfile.mkdtemp()
            >>> with create_store(folder + "/table", (1000, 4)) as store:
            ...     embedding = Embedding.from_store(store, padding_idx=0)
            ...     optimizer = RowAdamW(embedding.parameters(), lr=0.1)
            ...     embedding(torch.tensor([3, 5])).sum().backward()
            ...     optimizer.step()
            ...     store.commit("step-1")
            2
        """
        if isinstance(store, TrainingStore):
            return layer_on_disk(cls, store, **options)
        from ._table.stored import stored_layer

        return stored_layer(cls, store, **options)

    def forward(
        self, input: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the rows of the ids.

        Args:
            input: Ids of any shape and any integer dtype.
        """
        if self._prefetches or self._output_device is not None:
            return self._lookup_on_host(input)
        return self._lookup(input)

    def _lookup(self, input: Tensor) -> Tensor:
        if not self.training and self.reads_out_of_place(input):
            return self.caught_up_rows(input)
        self.prepare_lookup(input)
        weight = self._parameters.get("weight")
        return lookup(
            input,
            self.weight if weight is None else weight,
            padding_idx=self.padding_idx,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )

    def _lookup_on_host(self, input: Tensor) -> Tensor:
        """Return prefetched rows if there are any, on the output device if there is one."""
        ids = self._to_host(input)
        rows = self._prefetched_rows(ids)
        if rows is None:
            rows = self._pinned_rows(ids)
        if rows is None:
            return self._to_output_device(self._lookup(ids))
        weight = self.weight
        options = LookupOptions(
            weight.shape[0],
            weight.dtype,
            checked_padding_idx(self.padding_idx, weight.shape[0]),
            self.scale_grad_by_freq,
            self.sparse,
        )
        rows = lookup_gathered(rows, as_index(ids), weight, options)
        if self.max_norm is not None:
            rows = renormalized(rows, self.max_norm, norm_type=self.norm_type)
        return self._to_output_device(rows)

    def __prepare_scriptable__(self) -> TorchEmbedding:
        # TorchScript cannot compile this forward, so it gets torch's layer.
        return self._twin(TorchEmbedding)
