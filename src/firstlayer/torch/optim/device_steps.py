"""Missed steps of a table on its device, applied by torch operators."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...optim.missed_steps import MissedSteps
from ...optim.rule import TINY, ArrayOps, Rule, update_rows
from .._tensors.dtypes import dtype_name


class DeviceSteps:
    """Coefficients of missed steps on the device of a table.

    The host records steps and computes the coefficients in float64
    (:class:`firstlayer.optim.missed_steps.MissedSteps`).

    Args:
        missed: Recorded steps.
        dtype: Compute dtype of the table.
        device: Device of the table.
    """

    def __init__(
        self, missed: MissedSteps, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.missed, self.dtype, self.device = missed, dtype, device
        #: Coefficients in the compute dtype, a row for each recorded step. Those of a
        #: table's row are adjacent in memory.
        self.coefficients = torch.empty(
            missed.all_coefficients.shape[::-1], dtype=dtype, device=device
        )
        #: Whether the device has the coefficients of the host.
        self.is_current = False
        # For each recorded step, whether rows at it replay a step; None if none does.
        self._is_replayed: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the rule has no coefficients: missed steps change nothing."""
        return not self.coefficients.numel()

    @property
    def replays(self) -> bool:
        """Whether rows at some recorded step replay steps, as of :meth:`update`."""
        return self._is_replayed is not None

    def update(self) -> None:
        """Copy the coefficients to the device, if they have changed."""
        if self.is_current or self.is_empty:
            return
        recorded = self.missed.coefficients
        host = recorded.T.astype(dtype_name(self.dtype))
        # Arithmetic on denormals is slow.
        host[np.abs(host) < TINY] = 0.0
        self.send(torch.from_numpy(host), self.coefficients[: len(host)])
        self._is_replayed = None
        if self.missed.replays:
            is_replayed = np.logical_not(self.missed.kind(*recorded).is_accurate(np))
            if is_replayed.any():
                self._is_replayed = torch.from_numpy(is_replayed).to(self.device)
        self.is_current = True

    def send(self, host: Tensor, to: Tensor) -> None:
        """Copy a tensor from the host without waiting for the device."""
        if self.device.type != "cpu" and torch.accelerator.is_available():
            host = host.pin_memory()
        to.copy_(host, non_blocking=True)

    def catch_up(self, ops: Any, start: Tensor, old: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return weight and state of rows after the missed steps.

        Args:
            ops: Array namespace, which may overwrite ``old``.
            start: Recorded step that each row is at.
            old: Weight and state of each row.
        """
        if self._is_replayed is not None:
            start, old = self._replayed(start, old, self._is_replayed)
        return self.apply(ops, self.coefficients, start, old)

    def apply(
        self, ops: Any, coefficients: Tensor, start: Tensor, old: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return weight and state of rows after missed steps that are not replayed.

        Args:
            ops: As in :meth:`catch_up`.
            coefficients: Coefficients, a row for each recorded step.
            start: As in :meth:`catch_up`.
            old: As in :meth:`catch_up`.
        """
        columns = coefficients.index_select(0, start)[..., None].unbind(1)
        return self.missed.kind(*columns).catch_up(ops, *old)

    def _replayed(
        self, start: Tensor, old: Sequence[Tensor], is_replayed: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Replay missed steps up to a recorded step whose coefficients are accurate.

        Waits for the device.
        """
        start, new = start.clone(), [x.clone() for x in old]
        kind: Any = type(self.missed.step_values)
        steps = torch.from_numpy(self.missed.all_steps).to(self.device, self.dtype)
        while True:
            rows = is_replayed.index_select(0, start).nonzero().flatten()
            if not rows.numel():
                return start, new
            reached = start.index_select(0, rows) + 1
            values = kind(*steps.index_select(1, reached).unsqueeze(-1).unbind())
            part = [x.index_select(0, rows) for x in new]
            moved = replayed_step(self.missed.rule, values, part)
            for x, y in zip(new, moved, strict=True):
                x.index_copy_(0, rows, y)
            start.index_copy_(0, rows, reached)


def replayed_step(rule: Rule, values: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return weight and state of rows after a recorded event that they missed.

    Args:
        rule: Update rule.
        values: Numbers of the event of each row; zeros if it changes nothing.
        rows: Weight and state.
    """
    zero = torch.zeros_like(rows[0])
    moved = update_rows(ArrayOps(torch), rule, values, rows[0], zero, rows[1:])
    is_step = values.sign != 0
    return [torch.where(is_step, x, y) for x, y in zip(moved, rows, strict=True)]
