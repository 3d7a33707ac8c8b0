"""Rows of coming lookups, gathered on a worker thread.

A prefetch reads the table and never writes to it: stale rows are corrected in the copy.
Whether a batch was prefetched or not, the table therefore holds the same bits. The lookup
that takes the rows makes sure that they are what it would read itself:

- A table that was replaced, or written to by an operator of torch, is read again.
- A row optimizer that has stepped since has counted the step. If the step moved only the
  rows with a gradient, these are copied again; otherwise all rows are.
- A prefetch that has not begun is cancelled, so that no lookup waits for others.

A lookup also catches the rows up in the table. After a prefetch this is deferred to the
worker (:meth:`firstlayer.torch.optim.parameter_state.ParameterState.defer_catch_up`).
"""

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...optim.table_state import TableState
from .._tensors.memory import array_of, array_of_table, kernel_eligible, tensor_of
from .._tensors.row_parameter import without_catch_up
from .._tensors.worker import submit
from ..optim.parameter_state import ParameterState
from .lookup import LookupOptions

#: A layer keeps the rows of at most this many prefetches; the oldest are dropped.
MAX_PREFETCHES = 4


class Prefetch:
    """Rows of a table that the worker gathers.

    Args:
        ids: Flat int64 ids in range, which nothing else may change.
        weight: Table, on the CPU and contiguous.
        pinned: Whether to gather into page-locked memory, for a copy to an accelerator.
    """

    def __init__(self, ids: Tensor, weight: Tensor, *, pinned: bool) -> None:
        self.ids = ids
        state = getattr(weight, "table_state", None)
        self.state: ParameterState | None = state
        with without_catch_up():
            # Another tensor of the same memory, which lives as long as the worker reads it.
            self.table = weight.detach()
            self.version = _version(weight, state)
        # Allocated here: the C library keeps freed memory for the thread that allocates.
        # Memory new to the process costs more than the copy.
        self.buffer = new_buffer(ids, weight, pinned=pinned)
        #: Number of steps of the row optimizer that the rows are up to date with.
        self.step_count = 0
        self.rows: Future[Tensor] = submit(self._gather)

    def take(self, weight: Tensor) -> Tensor | None:
        """Return the rows as a lookup would read them now, or None if it has to.

        Waits for the worker if it is gathering the rows. Raises its error, if any.
        """
        if self.state is not None:
            self.state.finish_step()
        if not self._is_current(weight) or self.rows.cancel():
            self.rows.cancel()
            return None
        rows, state = self.rows.result(), self.state
        if state is None or state.step_count == self.step_count:
            return rows
        with state.lock:
            if state.has_stale_weights:
                return None
            # The other rows have not been written to since.
            ids = array_of(self.ids)
            changed = np.flatnonzero(state.row_steps[ids] > self.step_count)
            if changed.size:
                index = tensor_of(changed)
                rows[index] = self.table[self.ids[index]]
        return rows

    def _is_current(self, weight: Tensor) -> bool:
        """Return whether the table is the same, and no operator has written to it."""
        with without_catch_up():
            return (
                weight.data_ptr() == self.table.data_ptr()
                and weight.shape == self.table.shape
                and weight.dtype == self.table.dtype
                and getattr(weight, "table_state", None) is self.state
                and _version(weight, self.state) == self.version
            )

    def _gather(self) -> Tensor:
        state = self.state
        if state is None:
            return gather_into(self.buffer, self.ids, self.table)
        # A step waits for this lock, so it is before the whole read or after it.
        with state.lock:
            self.step_count = state.step_count
            if not state.has_stale_weights:
                return gather_into(self.buffer, self.ids, self.table)
            table, ids = array_of_table(self.table), array_of(self.ids)
            # Not the method of the subclass, which uses as many threads as torch does.
            rows = TableState.caught_up_rows(state, ids, table=table)
        return self.buffer.copy_(tensor_of(rows))


def _version(weight: Tensor, state: ParameterState | None) -> int:
    """Return the version of a table, in which exact steps of its optimizer do not count."""
    return weight._version - (0 if state is None else state.num_steps_in_version)


def can_prefetch(weight: Tensor) -> bool:
    """Return whether the worker can read a table: a contiguous one on the CPU."""
    state = getattr(weight, "table_state", None)
    if state is not None and not isinstance(state, ParameterState):
        return False
    with without_catch_up():
        return kernel_eligible(weight) and weight.is_contiguous()


def new_buffer(ids: Tensor, weight: Tensor, *, pinned: bool) -> Tensor:
    """Return memory for the rows of flat ids.

    Torch reuses page-locked memory only when copies from it to a device are done.
    """
    shape = ids.numel(), weight.shape[1]
    return torch.empty(shape, dtype=weight.dtype, device="cpu", pin_memory=pinned)


def gather_into(out: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """Write the rows of flat int64 ids to ``out`` and return it.

    Args:
        out: Contiguous tensor on the CPU.
        ids: Ids in range.
        table: Contiguous table on the CPU.
    """
    rows = kernels.gather_rows(array_of_table(table), array_of(ids), out=array_of(out))
    if rows is None:
        raise IndexError("ids were changed during a lookup and are out of range")
    return out


def lookup_gathered(
    rows: Tensor, ids: Tensor, weight: Tensor, options: LookupOptions
) -> Tensor:
    """Return rows that were gathered before, with the gradient of a lookup.

    Args:
        rows: Row of each id; becomes part of the result.
        ids: Ids of any shape, int64 or int32, on the CPU.
        weight: Table.
        options: Options of the lookup.
    """
    with without_catch_up():
        rows = rows.view(*ids.shape, weight.shape[1])
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return rows
        return _GatheredRows.apply(weight, ids, (rows,), options)  # pyright: ignore


class _GatheredRows(torch.autograd.Function):
    """Rows that were gathered before; the gradient is that of a lookup."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        rows: tuple[Tensor],
        options: LookupOptions,
    ) -> Tensor:
        # In a tuple, since autograd would return a view of an argument.
        ctx.save_for_backward(ids)
        ctx.options = options
        return rows[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,), options = ctx.saved_tensors, ctx.options
        if options.needs_own_backward:
            return options.gradient(ids, grads[0]), None, None, None
        skip = -1 if options.padding_idx is None else options.padding_idx
        gradient = torch.ops.aten.embedding_backward.default(
            grads[0], ids, options.num_embeddings, skip, False, False
        )
        return gradient, None, None, None
