"""Tables in host memory for a model on a device, and prefetched rows.

The ids are read on the host and the rows gathered there, into page-locked memory if the
output goes to an accelerator that copies from it asynchronously. The gradient of the output
is copied back, and the table gets its gradient on the host. Moving the model leaves the
table where it is.
"""

from typing import Any, Self

import torch
from jaxtyping import Integer
from torch import Tensor
from torch.compiler import is_compiling

from .._tensors.errors import WrongValue, check_ids, check_tensor
from .._tensors.memory import is_plain_cpu, threads_of_torch
from .._tensors.row_parameter import without_catch_up
from ..optim.parameter_state import ParameterState
from .lookup import as_index
from .module import TableModule
from .prefetch import (
    MAX_PREFETCHES,
    Prefetch,
    can_prefetch,
    gather_into,
    new_buffer,
    submit,
)


class HostTableModule(TableModule):
    """Base class of layers whose table may be in host memory, and may be prefetched."""

    _output_device: torch.device | None = None
    _prefetches: tuple[Prefetch, ...] = ()

    @property
    def output_device(self) -> torch.device | None:
        """Device of the output of a table that stays in host memory, or None.

        May be set, as after ``from_pretrained``.
        """
        return self._output_device

    @output_device.setter
    def output_device(self, device: Any) -> None:
        weight = self._parameters.get("weight")
        self._output_device = checked_output_device(device, None, weight)

    def prefetch(self, ids: Integer[Tensor, "*batch"]) -> None:
        """Start to gather the rows of a coming lookup on a worker thread.

        The next lookup of the same ids takes the rows. Results are the same as without, bit
        for bit: rows that an optimizer, a hook or an assignment changes in between are read
        again. Writes through ``weight.data`` or NumPy are not noticed.

        Call it after ``optimizer.step()``, when the table has the values that the lookup
        reads. A call before the step helps only if the step moves no rows but those with a
        gradient: no momentum, no weight decay.

        The four latest prefetches are kept. Does nothing if the table is on a device, and
        in compiled code.

        Args:
            ids: Ids of any shape and any integer dtype. One out of range raises an
                IndexError.

        Example:
            >>> import firstlayer.torch
            >>> table = firstlayer.torch.Embedding(1000, 16)
            >>> ids = torch.tensor([[7, 3, 7]])
            >>> table.prefetch(ids)
            >>> torch.equal(table(ids), table.weight[ids])
            True
        """
        if is_compiling() or not can_prefetch(self.weight):
            return
        check_tensor(ids, name="ids")
        ids = as_index(ids).to("cpu")
        if not is_plain_cpu(ids):
            return
        check_ids(ids, self.weight.shape[0])
        # A copy: the caller may change the ids.
        flat = ids.reshape(-1).to(torch.int64, copy=True)
        new = Prefetch(flat, self.weight, pinned=is_pinned(self._output_device))
        self._prefetches = (*self._prefetches[1 - MAX_PREFETCHES :], new)

    def _to_host(self, x: Any) -> Any:
        """Return a tensor on the host if the output goes to another device."""
        return x.to("cpu") if self._output_device is not None and x is not None else x

    def _to_output_device(self, y: Tensor) -> Tensor:
        device = self._output_device
        if device is None:
            return y
        if is_pinned(device) and not is_compiling() and not y.is_pinned():
            y = torch.empty_like(y, pin_memory=True, requires_grad=False).copy_(y)
        return y.to(device, non_blocking=True)

    def _prefetched_rows(self, ids: Any) -> Tensor | None:
        """Return the prefetched rows of ids, flat, or None."""
        weight = self.weight
        if not self._prefetches or is_compiling() or not _is_flat(ids, weight):
            return None
        flat = as_index(ids).reshape(-1).to(torch.int64)
        for prefetch in reversed(self._prefetches):
            if torch.equal(prefetch.ids, flat):
                self._prefetches = tuple(x for x in self._prefetches if x is not prefetch)
                rows = prefetch.take(weight)
                if rows is not None and not self.reads_out_of_place(ids):
                    self._catch_up_later(prefetch)
                    self._install_grad_hook(weight)
                return rows
        return None

    def _pinned_rows(self, ids: Any) -> Tensor | None:
        """Return the rows of ids, flat and in page-locked memory, or None if not needed."""
        weight = self.weight
        if not is_pinned(self._output_device) or is_compiling():
            return None
        if not _is_flat(ids, weight) or not can_prefetch(weight):
            return None
        if self.reads_out_of_place(ids):
            return None
        check_ids(ids, weight.shape[0])
        self.prepare_lookup(ids)
        flat = as_index(ids).reshape(-1).to(torch.int64)
        with threads_of_torch(), without_catch_up():
            return gather_into(new_buffer(flat, weight, pinned=True), flat, weight)

    def _catch_up_later(self, prefetch: Prefetch) -> None:
        """Catch the rows up in the table as a lookup does, on the worker."""
        state = prefetch.state
        if state is not None and state.has_stale_weights:
            state.defer_catch_up(prefetch.ids.numpy())
            submit(state.catch_up_deferred)

    def _on_grad_accumulated(self, weight: Tensor) -> None:
        state = getattr(weight, "table_state", None)
        if isinstance(state, ParameterState):
            # max_norm rescales the rows in the table.
            state.catch_up_deferred()
        super()._on_grad_accumulated(weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self._output_device is None:
            return super()._apply(fn, recurse)
        return super()._apply(lambda x: _apply_on_host(fn, x), recurse)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        device = self._output_device
        return text if device is None else f"{text}, output_device={str(device)!r}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own table.
        return {key: value for key, value in vars(self).items() if key != "_prefetches"}


def _is_flat(ids: Any, weight: Tensor) -> bool:
    """Return whether ids are an ordinary tensor whose values can be read now."""
    return isinstance(ids, Tensor) and not ids.is_nested and is_plain_cpu(ids, weight)


def is_pinned(device: torch.device | None) -> bool:
    """Return whether copies to a device are asynchronous from page-locked memory."""
    if device is None or device.type in ("cpu", "meta"):
        return False
    accelerator = torch.accelerator.current_accelerator()
    # Devices of type mps share the memory of the host.
    return accelerator is not None and accelerator.type == device.type != "mps"


def checked_output_device(
    output_device: Any, device: Any, weight: Tensor | None
) -> torch.device | None:
    """Return the output device, or raise if the table would not be in host memory."""
    if output_device is None:
        return None
    table = device if weight is None else weight.device
    if table is not None and torch.device(table).type not in ("cpu", "meta"):
        raise WrongValue(
            f"the table must be on the CPU if output_device is given, got {table}"
        )
    return torch.device(output_device)


def _apply_on_host(fn: Any, x: Tensor) -> Tensor:
    """Return ``fn(x)``, or only its dtype if ``fn`` moves tensors to a device."""
    sample = fn(torch.empty(0, dtype=x.dtype, device=x.device))
    if sample.is_cpu:
        return fn(x)
    if x.is_meta:
        # to_empty() allocates a table that has no memory yet.
        return x if sample.is_meta else torch.empty_like(x, device="cpu")
    return x.to(sample.dtype)
