"""A table of which some rows are trained and the others cannot be.

Freezing rows by zeroing their gradient does not hold: weight decay and the momentum of
Adam move a row whose gradient is zero. Here frozen rows are no parameter at all: they are
a buffer beside the parameter that holds the trained rows, so that no optimizer knows of
them and none keeps a state for them. Files do not see this: the state_dict has one
``weight``, in the order of the ids.
"""

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
from ._table.grad_hooks import coalesce_gradient, install_grad_hook
from ._table.lookup import as_index, frequencies, lookup, padding_of, with_gradient_divided
from ._table.module import check_arguments, products, resized_tensor
from ._table.padding import is_token, row_from
from ._tensors.errors import WrongValue, torch_classes
from ._tensors.memory import eager
from .optim.table_state import catch_up


class PartlyFrozenEmbedding(nn.Module):
    """Looks up rows by id, of which some are never trained.

    ``trained_rows`` is the only parameter; ``frozen_rows`` is a buffer. Note that
    DistributedDataParallel sends buffers around in every forward unless it is told
    ``broadcast_buffers=False``.

    Args:
        num_embeddings: Rows of the table, one for each id.
        embedding_dim: Width of a row.
        frozen: The ids that are not trained: a range, a list or a tensor.
        padding_idx: The id that is padding; negative counts from the end. It is frozen.
        scale_grad_by_freq: Divide a row's gradient by how often its id was in the call.
        sparse: Whether the gradient of ``trained_rows`` is a coalesced sparse tensor.
        _weight: The table to begin with, copied. A padding row in it stays.
        device: Where the table is.
        dtype: Of the table.

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
    #: For each id its row among the trained ones, or ``~row`` among the frozen ones.
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
        self.padding_idx = padding_of(padding_idx, num_embeddings)
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.is_frozen = _chosen(frozen, num_embeddings)
        if self.padding_idx is not None:
            self.is_frozen[self.padding_idx] = True
        weight = torch.empty((num_embeddings, embedding_dim), device=device, dtype=dtype)
        trained, kept = self._parts(weight if _weight is None else _weight.to(weight))
        self.trained_rows = Parameter(trained)
        self.register_buffer("frozen_rows", kept)
        self._build(kept.device)
        if _weight is None:
            self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Float[Tensor, "num_embeddings embedding_dim"],
        *,
        frozen: Iterable[int] | Integer[Tensor, " ids"],
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Self:
        """Make a layer that begins with these rows; a padding row stays as it is.

        Args:
            embeddings: The table, copied.
            frozen: The ids that are not trained.
            padding_idx: The id that is padding; negative counts from the end.
            scale_grad_by_freq: As for the layer.
            sparse: As for the layer.
        """
        return cls(
            *embeddings.shape,
            frozen=frozen,
            padding_idx=padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            _weight=embeddings,
            device=embeddings.device,
            dtype=embeddings.dtype,
        )

    @property
    def weight(self) -> Float[Tensor, "num_embeddings embedding_dim"]:
        """The whole table, put together; gradients reach the trained rows."""
        catch_up(self.trained_rows)
        place = torch.where(self.place < 0, ~self.place, self.place + len(self.frozen_rows))
        trained: Any = self.trained_rows
        if hasattr(trained, "device_mesh"):
            trained = trained.full_tensor()  # spread over several machines
        return torch.cat([self.frozen_rows, trained])[place]

    def forward(
        self, input: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch embedding_dim"]:
        """Return the rows of the ids.

        Args:
            input: Ids, of any shape and any integer dtype.
        """
        place = lookup(input, self.place[:, None])[..., 0]
        if not len(self.trained_rows):
            return lookup(~place, self.frozen_rows)
        if not self.scale_grad_by_freq:
            return self._rows(place)
        rows = self._rows(place, wide=True)
        by = frequencies(as_index(input), self.num_embeddings, like=rows)
        return with_gradient_divided(rows, by).to(self.frozen_rows.dtype)

    def _rows(self, place: Tensor, *, wide: bool = False) -> Tensor:
        trained, sparse, now = self.trained_rows, self.sparse, eager()
        catch_up(trained, place)
        if sparse and now:
            install_grad_hook(self, trained)
        if not len(self.frozen_rows):
            return lookup(place, trained, sparse=sparse, wide=wide)
        kept = lookup((~place).clamp(min=0), self.frozen_rows, wide=wide)
        if sparse and now:
            # A row gradient must not know of rows that were not looked up.
            chosen = place >= 0
            rows = lookup(place[chosen], trained, sparse=True, wide=wide)
            return kept.index_put((chosen,), rows)
        rows = lookup(place.clamp(min=0), trained, sparse=sparse, wide=wide)
        return torch.where((place < 0)[..., None], kept, rows)

    def logits(
        self, x: Float[Tensor, "*batch embedding_dim"]
    ) -> Float[Tensor, "*batch num_embeddings"]:
        """Return the product of ``x`` with every row: the tied output head."""
        return products(x, self.weight)

    def set_padding(self, value: Float[Tensor, " embedding_dim"] | float) -> None:
        """Make ``value`` the padding row, from now on."""
        if self.padding_idx is None:
            raise WrongValue("set_padding needs a layer with padding_idx, got None")
        place = int(np.sum(self.is_frozen[: self.padding_idx]))
        self.frozen_rows[place] = row_from(value, self.frozen_rows)

    def mask(self, ids: Integer[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return True where ``ids`` is a token and False where it is padding."""
        return is_token(ids, self.padding_idx)

    def resize(
        self,
        num_embeddings: int,
        *,
        init: Init | np.ndarray | Tensor = "mean",
        rng: Seed = None,
    ) -> Resized:
        """Change the number of rows and return what became of which; new ones are trained.

        Args:
            num_embeddings: How many rows there shall be.
            init: What new rows are; see :func:`firstlayer.embeddings.resize.resize_table`.
            rng: A seed or a generator for what is drawn; None follows torch's seed.
        """
        table, what = resized_tensor(
            self.weight, num_embeddings, init=init, rng=rng, padding_idx=self.padding_idx
        )
        new = np.zeros(len(what.added), bool)
        self.is_frozen = np.concatenate([self.is_frozen[: len(what.kept)], new])
        self.num_embeddings, self.trained_rows.grad = num_embeddings, None
        self.trained_rows.data, self.frozen_rows = self._parts(table)
        self._build(table.device)
        return what

    def reset_parameters(self) -> None:
        """Draw all rows anew, the frozen ones too; padding becomes zero."""
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

    def _parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        is_frozen = torch.from_numpy(self.is_frozen)
        ids = (~is_frozen).nonzero()[:, 0], is_frozen.nonzero()[:, 0]
        trained, kept = (weight.detach()[i.to(weight.device)] for i in ids)
        return trained, kept

    def _build(self, device: torch.device) -> None:
        frozen = self.is_frozen
        place = np.where(frozen, ~(np.cumsum(frozen) - 1), np.cumsum(~frozen) - 1)
        self.register_buffer("place", torch.from_numpy(place).to(device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # to_empty() leaves a buffer without its contents.
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
        trained, kept = self._parts(whole)
        mine: Any = self.trained_rows
        if hasattr(mine, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            trained = distribute_tensor(trained, mine.device_mesh, mine.placements)
        state |= {prefix + "trained_rows": trained, prefix + "frozen_rows": kept}
        super()._load_from_state_dict(
            state, prefix, local_metadata, strict,
            missing_keys, unexpected_keys, error_msgs,
        )  # fmt: skip
        # assign=True may have brought a layer from the meta device.
        if self.place.device != self.frozen_rows.device:
            self._build(self.frozen_rows.device)


def _chosen(ids: Iterable[int] | Tensor, num_embeddings: int) -> np.ndarray:
    given = ids.cpu().numpy() if isinstance(ids, Tensor) else list(ids)
    chosen = np.zeros(num_embeddings, bool)
    with torch_classes():
        chosen[ids_in_range(given, num_embeddings, name="frozen")] = True
    return chosen
