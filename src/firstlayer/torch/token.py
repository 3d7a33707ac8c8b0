"""Token embeddings on torch: rows of a table by id."""

from typing import Any

from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn import Embedding as TorchEmbedding

from ._table.lookup import lookup
from ._table.module import Table, check_arguments
from .optim.table_state import catch_up


class Embedding(Table, TorchEmbedding):
    """Looks up rows of a table by id. Takes the place of ``torch.nn.Embedding``.

    Arguments, attributes, ``from_pretrained`` and the state_dict are torch's. What differs:
    padding stays padding (see ``padding_idx``), ``max_norm`` does not write to the table in
    the forward, gradients of repeated ids are summed in float32 also for half precision, a
    row gradient is summed by id, and ids may have any integer dtype.

    Args:
        num_embeddings: Rows of the table, one for each id.
        embedding_dim: Width of a row.
        padding_idx: The id that is padding; negative counts from the end. Its row gets no
            gradient, and whatever else writes to it is undone before the next lookup and
            before it is saved. :meth:`set_padding` changes it; so does loading.
        max_norm: Rows longer than this are shortened to it in the output; those stored are
            when a gradient has arrived. Under FSDP2 those stored are only if the
            table is split by rows and looked up eagerly.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        sparse: Whether the gradient of the table is a coalesced sparse tensor.
        _weight: The table to use. A padding row in it stays.
        _freeze: Whether the table is not trained.
        device: Where the table is.
        dtype: Of the table.

    Shape:
        - input: any shape, any integer dtype
        - output: ``(*input.shape, embedding_dim)``, in the table's dtype

    An id that is not a row, a negative one included, is an IndexError that names it; under
    ``torch.compile`` and on other devices it is torch's own error. Autocast leaves lookups
    in the table's dtype; :meth:`logits` multiplies in the dtype that autocast asks for.

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
    ) -> None:
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
            _weight,
            _freeze,
            device,
            dtype,
        )
        if _weight is None:
            self._know(self.weight)
        else:
            self.keep_padding()

    def forward(
        self, input: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the rows of the ids.

        Args:
            input: Ids, of any shape and any integer dtype.
        """
        weight = self.weight
        catch_up(weight, input)
        return lookup(
            input,
            weight,
            padding_idx=self.padding_idx,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
            padding_row=self._prepared(weight),
        )

    def __prepare_scriptable__(self) -> TorchEmbedding:
        # TorchScript compiles what it can read, which is torch's own layer.
        self._catch_up_rows()
        self.repair()
        twin = TorchEmbedding(
            self.num_embeddings,
            self.embedding_dim,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            _weight=self.weight,
        )
        twin.weight = self.weight
        return twin
