"""Average of a parameter as a tensor, whose rows kernels or torch operators catch up."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...optim.missed_steps import MissedSteps
from ...optim.row_average import RowAverage
from ...optim.rule import TINY, ArrayOps
from .._tensors.dtypes import compute_dtype, dtype_name
from .._tensors.memory import array_of
from .device_steps import replayed_step


class Columns(NamedTuple):
    """Numbers of the recorded events, on the device of an average.

    Args:
        numbers: Factor of the average and averaged coefficients, a row for each event.
        is_replayed: For each event, whether rows at it replay the next; None if none does.
    """

    numbers: Tensor
    is_replayed: Tensor | None


class TensorAverage(RowAverage):
    """Average of one parameter, on its device.

    The host records the updates, as for :class:`RowAverage`. Kernels catch up rows in host
    memory, and :meth:`caught_up` those of other tables.

    Args:
        parameter: Parameter to be averaged.
    """

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(np.zeros((0, 0)))
        dtype = parameter.dtype
        #: The average.
        self.tensor = torch.zeros_like(
            parameter,
            dtype=dtype if dtype.is_complex else compute_dtype(dtype),
            memory_format=torch.contiguous_format,
            requires_grad=False,
        )
        # None if the host has changed them.
        self._columns: Columns | None = None

    @property
    def values(self) -> np.ndarray:
        """Average of each row as of the event that the row is at, in host memory."""
        return array_of(self.tensor)

    def move_to(self, device: torch.device) -> None:
        """Follow a parameter to another device."""
        if self.tensor.device != device:
            self.tensor, self._columns = self.tensor.to(device), None

    def resize_rows(self, kept: Tensor, table: Tensor) -> None:  # pyright: ignore
        """Follow a table whose rows were selected, reordered or added.

        Args:
            kept: For each of the first rows of the table, its number before.
            table: The table. Averages of the rows after ``kept`` start from their weights.
        """
        old = self.tensor.index_select(0, kept.to(self.tensor.device))
        new = table[kept.numel() :].to(self.tensor)
        self.tensor = torch.cat([old, new])

    def reset_rows(self, rows: Tensor, table: Tensor) -> None:
        """Start the averages of rows from their weights.

        Args:
            rows: Rows that belong to something else from now on.
            table: The table.
        """
        values = table.index_select(0, rows.to(table.device))
        self.tensor.index_copy_(0, rows.to(self.tensor.device), values.to(self.tensor))

    def caught_up(
        self,
        average: Tensor,
        start: Tensor,
        old: Sequence[Tensor],
        missed: MissedSteps,
    ) -> Tensor:
        """Return averages of rows after their missed updates.

        Args:
            average: Averages of the rows.
            start: Recorded event that each row is at.
            old: Weight and state of each row at that event; they are not changed.
            missed: Recorded events.
        """
        columns, is_replayed = self._on_device(missed)
        if is_replayed is not None:
            start, average, old = self._replayed_rows(
                start, average, old, missed, is_replayed
            )
        kept, *coefficients = columns.index_select(0, start)[..., None].unbind(1)
        moved = missed.kind(*coefficients).catch_up(ArrayOps(torch), *old)[0]
        # Averages that missed no update keep their bits.
        return torch.where(kept == 1, average, torch.addcmul(moved, kept, average))

    def _set_columns(self, missed: MissedSteps, columns: slice) -> None:
        super()._set_columns(missed, columns)
        self._columns = None

    def _on_device(self, missed: MissedSteps) -> Columns:
        if self._columns is None:
            kept = self._kept[: missed.count + 1]
            coefficients = self._coefficients[:, : missed.count + 1]
            host = np.vstack([kept, coefficients]).T.astype(dtype_name(self.tensor.dtype))
            # Arithmetic on denormals is slow.
            host[np.abs(host) < TINY] = 0.0
            is_replayed = None
            if missed.replays:
                mask = ~missed.kind(*coefficients).is_accurate(np) & (kept != 1)
                if mask.any():
                    is_replayed = torch.from_numpy(mask).to(self.tensor.device)
            columns = torch.from_numpy(host).to(self.tensor.device)
            self._columns = Columns(columns, is_replayed)
        return self._columns

    def _replayed_rows(
        self,
        start: Tensor,
        average: Tensor,
        old: Sequence[Tensor],
        missed: MissedSteps,
        is_replayed: Tensor,
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Replay events up to one whose coefficients are accurate; waits for the device."""
        start, average, new = start.clone(), average.clone(), [x.clone() for x in old]
        kind: Any = type(missed.step_values)
        count, device, dtype = missed.count + 1, average.device, average.dtype
        steps = torch.from_numpy(missed.all_steps[:, :count]).to(device, dtype)
        decays = torch.from_numpy(self._decays[:count]).to(device, dtype)
        while True:
            rows = is_replayed.index_select(0, start).nonzero().flatten()
            if not rows.numel():
                return start, average, new
            reached = start.index_select(0, rows) + 1
            part = [x.index_select(0, rows) for x in new]
            mean = average.index_select(0, rows)
            decay = decays.index_select(0, reached)[:, None]
            is_update = ~decay.isnan()
            updated = torch.lerp(mean, part[0], 1 - decay)
            average.index_copy_(0, rows, torch.where(is_update, updated, mean))
            values = kind(*steps.index_select(1, reached).unsqueeze(-1).unbind())
            for x, y in zip(new, replayed_step(missed.rule, values, part), strict=True):
                x.index_copy_(0, rows, y)
            start.index_copy_(0, rows, reached)
