"""Options of bags, and their ids after checking."""

from dataclasses import dataclass

from torch import Tensor

from ...embeddings.bag import Mode
from ...embeddings.ragged import Bags, flatten_bags
from ...embeddings.row_gradient import GradientMemory
from .._table.lookup import LookupOptions
from .._tensors.dtypes import compute_dtype, dtype_name
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of


@dataclass(frozen=True)
class BagOptions:
    """Options of the bags.

    ``padding_idx`` counts from the front. ``memory`` is that of the table's gradient.
    """

    mode: Mode
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    include_last_offset: bool
    padding_idx: int | None
    memory: GradientMemory | None = None

    def lookup_options(self, weight: Tensor) -> LookupOptions:
        """Return the options that the gradient of a table depends on."""
        return LookupOptions(
            len(weight),
            weight.dtype,
            self.padding_idx,
            self.scale_grad_by_freq,
            self.sparse,
        )


def checked_bags(
    ids: Tensor,
    lookup_options: LookupOptions,
    options: BagOptions,
    *,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
) -> Bags:
    with torch_errors():
        return flatten_bags(
            array_of(ids),
            None if offsets is None else array_of(offsets),
            num_embeddings=lookup_options.num_embeddings,
            weights=None if weights is None else array_of(weights),
            padding_idx=options.padding_idx,
            include_last_offset=options.include_last_offset,
            dtype=dtype_name(compute_dtype(lookup_options.dtype)),
        )
