"""Bags on torch: the sum, mean or maximum of rows by id."""

from typing import Any

from jaxtyping import Float, Integer, Real
from torch import Tensor
from torch.nn import EmbeddingBag as TorchEmbeddingBag

from ._table.module import Table, check_arguments
from .functional import embedding_bag, mode_of


class EmbeddingBag(Table, TorchEmbeddingBag):
    """Looks up rows and pools them. Takes the place of ``torch.nn.EmbeddingBag``.

    Arguments, attributes, ``from_pretrained`` and the state_dict are torch's. What a bag
    gives, in every mode, with padding and weights, is said in :mod:`firstlayer.embeddings.bag`. What
    differs from torch: every mode takes ``per_sample_weights``, ``sparse`` and
    ``scale_grad_by_freq``; there are second derivatives and forward-mode ones; and what
    :class:`firstlayer.torch.Embedding` does about padding, ``max_norm``, half precision and ids.

    Args:
        num_embeddings: Rows of the table, one for each id.
        embedding_dim: Width of a row.
        max_norm: Rows longer than this are shortened to it before they are pooled; those
            stored are when a gradient has arrived. Under FSDP2 those stored are only
            if the table is split by rows and looked up eagerly.
        norm_type: The p of the p-norm that ``max_norm`` bounds.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Whether the gradient of the table is a coalesced sparse tensor.
        _weight: The table to use. A padding row in it stays.
        include_last_offset: Whether the last offset is the end of the last bag.
        padding_idx: The id that is padding and does not count; negative counts from the
            end.
        device: Where the table is.
        dtype: Of the table.

    Shape:
        - input: ``(bags, length)``, or ``(n,)`` with offsets, or a jagged nested tensor;
          any integer dtype
        - offsets: ``(bags,)``, where each bag begins: 0 first, never decreasing;
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
    ) -> None:
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
            mode_of(mode),
            sparse,
            _weight,
            include_last_offset,
            padding_idx,
            device,
            dtype,
        )
        if _weight is None:
            self._know(self.weight)
        else:
            self.keep_padding()

    def forward(
        self,
        input: Integer[Tensor, "*batch"],
        offsets: Integer[Tensor, " bags"] | None = None,
        per_sample_weights: Real[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "bags embedding_dim"]:
        """Return the pooled rows of each bag.

        Args:
            input: Ids: a row for each bag, or all of them in one line with ``offsets``.
            offsets: Where each bag begins in that line.
            per_sample_weights: What each id's row is multiplied by; None is 1.
        """
        weight = self.weight
        # Padding is in no bag, so its row is never put into an output.
        self._prepared(weight)
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
            self.padding_idx,
        )

    def __prepare_scriptable__(self) -> TorchEmbeddingBag:
        # TorchScript compiles what it can read, which is torch's own layer.
        self._catch_up_rows()
        self.repair()
        twin = TorchEmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            self.weight,
            self.include_last_offset,
            self.padding_idx,
        )
        twin.weight = self.weight
        return twin
