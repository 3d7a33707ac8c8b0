"""A table with trained rows and frozen rows.

Zeroing the gradient of a row does not freeze it: weight decay and Adam's momentum move rows
without a gradient. Here frozen rows are not parameters. They are a buffer next to the
parameter with the trained rows, so no optimizer updates them or keeps a state for them. The
state dict does not show this: it has one ``weight``, in the order of the ids.
"""

import os
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn import Parameter

from .._check import ids_in_range
from ..embeddings.init import Init, Seed
from ..embeddings.resize import Resized
from ._table.grad_hook import coalesce_gradient, install_grad_hook
from ._table.lookup import (
    as_index,
    checked_padding_idx,
    divide_gradient,
    frequencies,
    lookup,
)
from ._table.module import (
    check_arguments,
    is_token,
    resized_tensor,
    tied_logits,
    write_padding_row,
)
from ._table.pretrained import table_tensor
from ._tensors.dtypes import upcast
from ._tensors.errors import torch_errors
from ._tensors.memory import is_eager
from .optim.table_state import catch_up, caught_up_rows, reads_out_of_place


class PartlyFrozenEmbedding(nn.Module):
    """Embedding in which some rows are never trained.

    ``trained_rows`` is the only parameter; ``frozen_rows`` is a buffer. Note that
    DistributedDataParallel broadcasts buffers in every forward unless it gets
    ``broadcast_buffers=False``. Use :class:`FrozenRowsEmbedding` where a single ``weight``
    is needed: with a tied head, and in models of Hugging Face and PEFT.

    Args:
        num_embeddings: Number of rows, one for each id.
        embedding_dim: Width of each vector.
        frozen: Ids that are not trained: a range, a list or a tensor.
        padding_idx: Id of padding; negative counts from the end. It is frozen.
        scale_grad_by_freq: Divide a row's gradient by the number of times its id occurs.
        sparse: Make the gradient of ``trained_rows`` a coalesced sparse tensor.
        _weight: Initial table, copied; its padding row is not changed.
        device: Device of the table; None is that of ``_weight``, if given.
        dtype: Dtype of the table; None is that of ``_weight``, if given.

    Shape:
        - input: any shape, any integer dtype
        - output: ``(*input.shape, embedding_dim)``, in the table's dtype

    Example:
        >>> layer = PartlyFrozenEmbedding(10, 4, frozen=range(8))
        >>> [name for name, _ in layer.named_parameters()], layer.trained_rows.shape
        (['trained_rows'], torch.Size([2, 4]))
        >>> list(layer.state_dict())
        ['weight']
    """

    trained_rows: Parameter
    frozen_rows: Tensor
    #: For each id, its row in ``trained_rows``, or ``~row`` in ``frozen_rows``.
    place: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        frozen: Iterable[int] | Integer[Tensor, " ids"],
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_arguments(
            num_embeddings, embedding_dim, padding_idx=padding_idx, weight=_weight
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = checked_padding_idx(padding_idx, num_embeddings)
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.is_frozen = bool_mask(frozen, num_embeddings)
        if self.padding_idx is not None:
            self.is_frozen[self.padding_idx] = True
        if _weight is None:
            shape = num_embeddings, embedding_dim
            weight = torch.empty(shape, device=device, dtype=dtype)
        else:
            weight = _weight.to(device=device, dtype=dtype)
        trained, frozen_rows = self._split(weight)
        self.trained_rows = Parameter(trained)
        self.register_buffer("frozen_rows", frozen_rows)
        self._build(frozen_rows.device)
        if _weight is None:
            self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Float[Tensor, "num_embeddings embedding_dim"] | str | os.PathLike[str],
        *,
        frozen: Iterable[int] | Integer[Tensor, " ids"],
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Self:
        """Return a layer with these initial rows, including the padding row.

        Args:
            embeddings: The table, copied, or the path of a file with vectors.
            frozen: Ids that are not trained.
            padding_idx: Id of padding; negative counts from the end.
            scale_grad_by_freq: As in the constructor.
            sparse: As in the constructor.

        Example:
            >>> layer = PartlyFrozenEmbedding.from_pretrained(torch.eye(3), frozen=[0, 1])
            >>> layer(torch.tensor([2])).tolist()
            [[0.0, 0.0, 1.0]]
        """
        table = table_tensor(embeddings)
        return cls(
            *table.shape,
            frozen=frozen,
            padding_idx=padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            _weight=table,
        )

    @property
    def weight(self) -> Float[Tensor, "num_embeddings embedding_dim"]:
        """The whole table; only trained rows get a gradient."""
        index = torch.where(self.place < 0, ~self.place, self.place + len(self.frozen_rows))
        trained: Any = self.trained_rows
        if hasattr(trained, "device_mesh"):
            trained = trained.full_tensor()  # a sharded DTensor
        return torch.cat([self.frozen_rows, trained])[index]

    def forward(
        self, input: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the rows of the ids.

        Args:
            input: Ids of any shape and any integer dtype.
        """
        place = lookup(input, self.place[:, None])[..., 0]
        if not len(self.trained_rows):
            return lookup(-1 - place, self.frozen_rows)
        if not reads_out_of_place(self.trained_rows, place, training=self.training):
            self._prepare_lookup(place)
        if not self.scale_grad_by_freq:
            return self._rows(place)
        rows = self._rows(place, upcast_output=True)
        counts = frequencies(as_index(input), self.num_embeddings, like=rows)
        return divide_gradient(rows, counts).to(self.frozen_rows.dtype)

    def _prepare_lookup(self, place: Tensor) -> None:
        """Catch up trained rows and install the gradient hook if one is needed."""
        catch_up(self.trained_rows, place)
        if self.sparse and is_eager():
            install_grad_hook(self, self.trained_rows)

    def _rows(self, place: Tensor, *, upcast_output: bool = False) -> Tensor:
        if not len(self.frozen_rows):
            return self._trained(place, upcast_output=upcast_output)
        frozen = lookup(
            (-1 - place).clamp(min=0), self.frozen_rows, upcast_output=upcast_output
        )
        if self.sparse and is_eager():
            # A sparse gradient must not contain rows that were not looked up.
            is_trained = place >= 0
            rows = self._trained(place[is_trained], upcast_output=upcast_output)
            return frozen.index_put((is_trained,), rows)
        rows = self._trained(place.clamp(min=0), upcast_output=upcast_output)
        return torch.where((place < 0)[..., None], frozen, rows)

    def _trained(self, index: Tensor, *, upcast_output: bool) -> Tensor:
        trained = self.trained_rows
        if reads_out_of_place(trained, index, training=self.training):
            rows = caught_up_rows(trained, index)
            return upcast(rows) if upcast_output else rows
        return lookup(index, trained, sparse=self.sparse, upcast_output=upcast_output)

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the tied output head.

        Example:
            >>> layer = PartlyFrozenEmbedding.from_pretrained(torch.eye(3), frozen=[0, 1])
            >>> layer.logits(torch.tensor([1.0, 2.0, 3.0])).tolist()
            [1.0, 2.0, 3.0]
        """
        return tied_logits(x, self.weight)

    def set_padding(self, value: Float[Tensor, " embedding_dim"] | float) -> None:
        """Write a vector or a number to the padding row.

        Example:
            >>> layer = PartlyFrozenEmbedding(3, 2, frozen=[1], padding_idx=0)
            >>> layer.set_padding(0.5)
            >>> layer(torch.tensor([0])).tolist()
            [[0.5, 0.5]]
        """
        row = None
        if self.padding_idx is not None:
            row = int(np.sum(self.is_frozen[: self.padding_idx]))
        write_padding_row(self.frozen_rows, row, value)

    def mask(self, ids: Integer[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return True where ``ids`` is a token and False where it is padding.

        Example:
            >>> layer = PartlyFrozenEmbedding(3, 2, frozen=[1], padding_idx=0)
            >>> layer.mask(torch.tensor([[2, 1, 0]])).tolist()
            [[True, True, False]]
        """
        return is_token(ids, self.padding_idx)

    def resize(
        self,
        num_embeddings: int,
        *,
        init: Init | np.ndarray | Tensor = "mean",
        rng: Seed = None,
    ) -> Resized:
        """Change the number of rows, and return which were kept, added, dropped.

        New rows are trained.

        Args:
            num_embeddings: New number of rows.
            init: Initial values of new rows; see
                :func:`firstlayer.embeddings.resize.resize_table`.
            rng: Seed or generator for random values; None follows torch's seed.

        Example:
            >>> layer = PartlyFrozenEmbedding(3, 2, frozen=range(3))
            >>> layer.resize(5).added, layer.trained_rows.shape
            (range(3, 5), torch.Size([2, 2]))
        """
        table, changes = resized_tensor(
            self.weight, num_embeddings, init=init, rng=rng, padding_idx=self.padding_idx
        )
        new = np.zeros(len(changes.added), bool)
        self.is_frozen = np.concatenate([self.is_frozen[: len(changes.kept)], new])
        self.num_embeddings, self.trained_rows.grad = num_embeddings, None
        self.trained_rows.data, self.frozen_rows = self._split(table)
        self._build(table.device)
        return changes

    def reset_parameters(self) -> None:
        """Draw all rows, including the frozen ones; the padding row becomes zero."""
        nn.init.normal_(self.trained_rows)
        nn.init.normal_(self.frozen_rows)
        if self.padding_idx is not None:
            self.set_padding(0.0)

    def extra_repr(self) -> str:
        words = f"{self.num_embeddings}, {self.embedding_dim}"
        words += f", frozen={len(self.frozen_rows)} rows"
        if self.padding_idx is not None:
            words += f", padding_idx={self.padding_idx}"
        return words

    def _split(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        is_frozen = torch.from_numpy(self.is_frozen)
        ids = (~is_frozen).nonzero()[:, 0], is_frozen.nonzero()[:, 0]
        trained, frozen = (weight.detach()[i.to(weight.device)] for i in ids)
        return trained, frozen

    def _build(self, device: torch.device) -> None:
        frozen = self.is_frozen
        place = np.where(frozen, ~(np.cumsum(frozen) - 1), np.cumsum(~frozen) - 1)
        self.register_buffer("place", torch.from_numpy(place).to(device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # to_empty() leaves buffers uninitialized.
        self._build(self.frozen_rows.device)
        return self

    def _on_grad_accumulated(self, parameter: Tensor) -> None:
        coalesce_gradient(parameter)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: Any, unexpected_keys: Any, error_msgs: list[str],
    ) -> None:  # fmt: skip
        state, name = dict(state_dict), prefix + "weight"
        whole = state.pop(name, None)
        if whole is None:
            if strict:
                missing_keys.append(name)
            return
        if whole.shape != (self.num_embeddings, self.embedding_dim):
            want = (self.num_embeddings, self.embedding_dim)
            error_msgs.append(f"{name} must have shape {want}, got {tuple(whole.shape)}")
            return
        trained, frozen = self._split(whole)
        current: Any = self.trained_rows
        if hasattr(current, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            trained = distribute_tensor(trained, current.device_mesh, current.placements)
        state |= {prefix + "trained_rows": trained, prefix + "frozen_rows": frozen}
        super()._load_from_state_dict(
            state, prefix, local_metadata, strict,
            missing_keys, unexpected_keys, error_msgs,
        )  # fmt: skip
        # assign=True may have moved the layer off the meta device.
        if self.place.device != self.frozen_rows.device:
            self._build(self.frozen_rows.device)


def bool_mask(ids: Iterable[int] | Tensor, num_embeddings: int) -> np.ndarray:
    """Return for each row whether it is among the frozen ``ids``."""
    given = ids.cpu().numpy() if isinstance(ids, Tensor) else list(ids)
    mask = np.zeros(num_embeddings, bool)
    with torch_errors():
        mask[ids_in_range(given, num_embeddings, name="frozen")] = True
    return mask
