"""Tensors of a table that torch operators update, and those of one of its steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._tensors.dtypes import compute_dtype, dtype_name
from .row_operators import Rows, read_rows, write_rows


@dataclass(frozen=True, eq=False)
class RowTensors:
    """Tensors with a row for each row of the table, which change together.

    Args:
        table: Table.
        row_steps: For each row, the step it is at.
        state: Tensors of the optimizer state, in the order of the rule.
    """

    table: Tensor
    row_steps: Tensor
    state: tuple[Tensor, ...]

    def as_list(self) -> list[Tensor]:
        """Return all tensors, as the constructor takes them."""
        return [self.table, self.row_steps, *self.state]

    def write_state(self, rows: Rows, state: Sequence[Tensor]) -> None:
        """Write rows of the optimizer state, in place."""
        for x, y in zip(self.state, state, strict=True):
            write_rows(x, rows, y)


@dataclass(frozen=True, eq=False)
class StepTensors:
    """Numbers of a step on the device of the table, for compiled code.

    Args:
        coefficients: Coefficients of missed steps, a row for each recorded step.
        values: Numbers of the step, in the order of the rule.
        steps: ``base_step``, ``event_count`` and ``last_step_event``.
    """

    coefficients: Tensor
    values: Tensor
    steps: Tensor

    def as_list(self) -> list[Tensor]:
        """Return all tensors, as the constructor takes them."""
        return [self.coefficients, self.values, self.steps]


@dataclass(eq=False)
class DeferredState:
    """State of rows whose weights have caught up, written together with the next step.

    A lookup reads rows of the state to correct weights, and the step after it reads and
    writes the same rows. Writing them once saves half of the memory traffic of the state.

    Args:
        rows: Rows of the lookup, ascending and each once.
        is_stale: Which of them have caught up: those that were stale, or all.
        versions: Versions of the tensors of the state at the lookup.
        parts: Consecutive rows of these, and their state in the compute dtype.
    """

    rows: Tensor
    is_stale: Tensor
    versions: tuple[int, ...]
    parts: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    def current_parts(self, tensors: RowTensors) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield the parts. Tensors that were written to since then are read again.

        Args:
            tensors: Table and state.
        """
        # Compared at once: the loop over the parts writes to the tensors.
        is_changed = [
            x._version != version
            for x, version in zip(tensors.state, self.versions, strict=True)
        ]
        for rows, state in self.parts:
            choices = zip(tensors.state, state, is_changed, strict=True)
            yield rows, [read_rows(x, rows, y.dtype) if new else y for x, y, new in choices]


def check_row_tensors(
    table: Tensor,
    state: dict[str, Tensor],
    *,
    shape: tuple[int, ...],
    state_shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ValueError unless a table and its state fit together.

    Args:
        table: Table.
        state: Tensors of the optimizer state, by name.
        shape: Shape that the table had when the state was made.
        state_shape: Shape of each tensor of the state.
        dtype: Compute dtype.
        device: Device of the state.
    """
    if tuple(table.shape) != shape:
        raise ValueError(
            f"the table must stay {shape} as its state is, got {tuple(table.shape)}; call "
            "resize_rows or make a new optimizer"
        )
    if compute_dtype(table.dtype) != dtype:
        raise ValueError(
            f"the table must stay in {dtype_name(dtype)} as its state is, got "
            f"{dtype_name(table.dtype)}; load its state dict into a new "
            "optimizer"
        )
    for name, x in state.items():
        if tuple(x.shape) != state_shape or x.dtype != dtype:
            raise ValueError(
                f"{name} must be {state_shape} in {dtype_name(dtype)} as the table is, "
                f"got {tuple(x.shape)} in {dtype_name(x.dtype)}"
            )
    strides = list(zip(shape, table.stride(), strict=True))
    if any(n > 1 and not stride for n, stride in strides):
        raise ValueError(
            f"a table must have its memory for each of {table.shape[0]} rows, "
            f"got strides {table.stride()}"
        )
    # The memory can be freed, as FSDP does.
    extent = sum((n - 1) * stride for n, stride in strides)
    needed = (table.storage_offset() + extent + 1) * table.itemsize
    if table.numel() and table.untyped_storage().nbytes() < needed:
        raise ValueError(
            f"a table must have its memory to be trained, which takes {needed} bytes, "
            f"got {table.untyped_storage().nbytes()}"
        )
    if table.device != device:
        raise ValueError(
            f"the table must stay on {device} as its state is, got it on {table.device}"
        )


def resized_rows(x: Tensor, kept: Tensor, num_rows: int, value: float) -> Tensor:
    """Return the kept rows of ``x``, followed by rows of ``value``."""
    out = x.new_full((num_rows, *x.shape[1:]), value)
    out[: kept.numel()] = x.index_select(0, kept)
    return out
