"""Padding that stays padding: what the row shall be, where it lies, and its repair.

The table itself holds the padding row, so that a lookup is a plain lookup. Before each one
the stored row is compared with ``padding_row`` and, if anything has written to it,
repaired. Where the table cannot be written to (traced, transformed by ``torch.func``, put
together from something else) the row is put into the output instead.

The row belongs to a parameter. Writing into the parameter is undone; a *new* parameter in
its place (``load_state_dict(assign=True)``, a checkpoint loader) brings its own padding
row: what is in it at the first lookup.
"""

import weakref
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn import Parameter

from .._tensors.errors import WrongValue
from .._tensors.memory import array_of, array_of_table, eager
from ..optim.table_state import catch_up
from .lookup import as_index, padding_of


@dataclass(frozen=True, eq=False)
class Place:
    """Where a padding row lies in memory."""

    padding_idx: int
    table: int
    row: np.ndarray
    value: bytes

    def holds(self, weight: Tensor, padding_idx: int | None) -> bool:
        """Tell whether the row of that table is here and has its value."""
        return (
            padding_idx == self.padding_idx
            # The same address is the same memory: `row` keeps it from being freed.
            and weight.data_ptr() == self.table
            and self.row.tobytes() == self.value
        )


class Padded(nn.Module):
    """A layer with ``weight`` and ``padding_idx``, whose padding row is looked after."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    weight: Tensor

    #: What padding is. None without padding, or as long as nothing is known of it.
    padding_row: Tensor | None = None
    # The id that it is the row of, the parameter, and the memory.
    _row_of: int | None = None
    _owner: "weakref.ref[Tensor] | None" = None
    _place: Place | None = None

    def set_padding(self, value: Float[Tensor, " embedding_dim"] | float) -> None:
        """Make ``value`` the padding row, from now on."""
        weight = self.weight
        if self.padding_idx is None:
            raise WrongValue("set_padding needs a layer with padding_idx, got None")
        row = row_from(value, weight)
        if not weight.is_meta:
            _write(weight.data, self.padding_idx, row)
        self._keep(row)

    def mask(self, ids: Integer[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return True where ``ids`` is a token and False where it is padding."""
        return is_token(ids, self.padding_idx)

    def repair(self) -> None:
        """Undo whatever was written to the padding row. Lookups and saving do this."""
        if self.padding_idx is not None:
            self._row_to_insert(self.weight)

    def keep_padding(self) -> None:
        """Make what is in the padding row now what padding is."""
        if self.padding_idx is None or self.weight.is_meta:
            self._keep(None)
        else:
            self._keep(self.weight.detach()[self.padding_idx].clone())

    def _row_to_insert(self, weight: Tensor) -> Tensor | None:
        """Repair the stored row, or return what to put into the output in its stead."""
        if not torch.compiler.is_compiling():
            if type(weight) is Parameter:
                place = self._place
                if place is not None and place.holds(weight, self.padding_idx):
                    return None
                if eager():
                    self._mend(weight)
                    return None
            elif type(weight) is not Tensor:
                return None
        # A sharded table takes no row that is not sharded.
        return None if hasattr(weight, "__tensor_flatten__") else self.padding_row

    def _mend(self, weight: Tensor) -> None:
        idx, row = padding_of(self.padding_idx, weight.shape[0]), self.padding_row
        if idx is None or weight.is_meta:
            return
        owned = self._owner is not None and self._owner() is weight
        moved = self._row_of != self.padding_idx
        if row is None or moved or not owned or row.shape != weight.shape[1:]:
            self.keep_padding()
            return
        # Through .data: no graph has to know of a write that takes another one back.
        weight.data[idx].copy_(row)
        self._know(weight)

    def _keep(self, row: Tensor | None) -> None:
        self.padding_row, self._row_of = row, self.padding_idx
        self._know(self.weight)

    def _know(self, weight: Tensor) -> None:
        """Remember whose row ``padding_row`` is, and where it lies."""
        self._owner, self._place = weakref.ref(weight), None
        if self._row_of != self.padding_idx:
            self.padding_row = None
        if self.padding_row is None or self.padding_idx is None:
            return
        self.padding_row = self.padding_row.to(_real(weight), weight.dtype)
        row = weight.detach()[self.padding_idx]
        if row.is_cpu and type(weight) is Parameter and row.is_contiguous():
            value = array_of(self.padding_row.view(torch.uint8)).tobytes()
            row = array_of_table(row.view(torch.uint8))
            self._place = Place(self.padding_idx, weight.data_ptr(), row, value)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        # `layer.weight += 1` assigns the parameter to itself: the same one, written to. So
        # is one that comes back when it is no longer parametrized or pruned.
        mine = self._parameters.get(name), self._owner and self._owner()
        same = param is not None and any(param is known for known in mine)
        super().register_parameter(name, param)
        if name == "weight" and not same:
            self.padding_row = self._owner = self._place = None

    def _fill_padding_idx_with_zero(self) -> None:
        # What torch's constructors and reset_parameters call. Torch's own writes to a copy
        # of the row if the table is spread over several machines.
        if self.padding_idx is None:
            self._keep(None)
        else:
            self.set_padding(0.0)

    def train(self, mode: bool = True) -> Self:
        if not mode:
            self._catch_up_rows()
        return super().train(mode)

    def _catch_up_rows(self) -> None:
        """Bring every row up to date, if a row optimizer has left some behind."""
        weight = self._parameters.get("weight")
        if weight is not None:
            catch_up(weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._catch_up_rows()
        self._let_go()
        super()._apply(fn, recurse)
        # The padding row is not given to fn: to_empty() would leave nothing of it.
        weight = self._parameters.get("weight")
        if weight is not None:
            self._know(weight)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._catch_up_rows()
        self.repair()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: Any, unexpected_keys: Any, error_msgs: list[str],
    ) -> None:  # fmt: skip
        self._catch_up_rows()
        before, owner = len(error_msgs), self._let_go()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict,
            missing_keys, unexpected_keys, error_msgs,
        )  # fmt: skip
        if prefix + "weight" in state_dict and len(error_msgs) == before:
            self.keep_padding()
        elif owner is not None and self._parameters.get("weight") is owner:
            self._know(owner)

    def _let_go(self) -> Tensor | None:
        """Refer to no parameter any more, and return the one that was referred to.

        Torch exchanges tensors, as it does to convert sharded ones, only if nothing refers
        to them weakly or shares their memory.
        """
        owner = None if self._owner is None else self._owner()
        self._owner = self._place = None
        return owner

    def __getstate__(self) -> dict[str, Any]:
        if self._parameters.get("weight") is not None:
            self.repair()
        return {**self.__dict__, "_owner": None, "_place": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weight = self._parameters.get("weight")
        if weight is not None:
            self._know(weight)


def row_from(
    value: Float[Tensor, " embedding_dim"] | float, weight: Tensor
) -> Float[Tensor, " embedding_dim"]:
    """Return a number or a vector as a row of that table, with memory of its own."""
    row = torch.as_tensor(value, dtype=weight.dtype, device=_real(weight)).detach()
    if row.shape not in ((), weight.shape[1:]):
        raise WrongValue(
            f"value must be a number or have shape {tuple(weight.shape[1:])}, "
            f"got {tuple(row.shape)}"
        )
    # Of one number clone would keep the stride of 0 that expanding gave it.
    return row.expand(weight.shape[1]).clone(memory_format=torch.contiguous_format)


def is_token(
    ids: Integer[Tensor, "*batch"], padding_idx: int | None
) -> Bool[Tensor, "*batch"]:
    """Return True where an id is not padding."""
    ids = as_index(ids)
    if padding_idx is None:
        return torch.ones_like(ids, dtype=torch.bool)
    return ids != padding_idx


def _write(weight: Any, idx: int, row: Tensor) -> None:
    """Write a row into a table, also into one that is spread over several machines."""
    if not hasattr(weight, "device_mesh"):
        weight[idx] = row
        return
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * weight.device_mesh.ndim
    here = torch.arange(weight.shape[0], device=row.device)[:, None] == idx
    at, value = (
        DTensor.from_local(x, weight.device_mesh, everywhere, run_check=False)
        for x in (here, row)
    )
    weight.copy_(torch.where(at, value, weight))


def _real(weight: Tensor) -> torch.device:
    # A padding row has its value even while the table has none.
    return torch.device("cpu") if weight.is_meta else weight.device
