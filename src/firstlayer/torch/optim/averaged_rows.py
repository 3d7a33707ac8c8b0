"""Exponential moving averages of the parameters that a row optimizer trains."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._interrupts import held_interrupts
from ...optim.averaged_rows import check_decay, refuse_swapped
from ...optim.row_average import RowAverage
from ...optim.table_state import checked_step
from .._tensors.dtypes import compute_dtype
from .._tensors.errors import torch_errors
from .._tensors.memory import array_of, tensor_of
from .._tensors.shard_tensor import check_whole_table
from .row_optimizer import RowOptimizer
from .table_state import ParameterState, catch_up


class AveragedRows:
    """Exponential moving average (EMA) of weights, at the cost of the rows of a batch.

    Equals ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``,
    which updates every row of a table in every step. Rows without a gradient are averaged
    with the weights that the optimizer gives them, and apply missed updates when they are
    next read or written. The first update copies the weights. Averages take the memory of
    the parameters, in float32 for half precision. Tables must be on the CPU.

    Args:
        optimizer: Optimizer whose parameters are averaged, tables and others.
        decay: Decay of the averages, from 0 to 1. The attribute may be changed between
            updates.

    Example:
        >>> from firstlayer.torch import Embedding
        >>> from firstlayer.torch.optim import RowAdamW
        >>> layer = Embedding(5, 2, sparse=True)
        >>> optimizer = RowAdamW(layer, lr=0.1)
        >>> averaged = AveragedRows(optimizer, decay=0.9)
        >>> layer(torch.tensor([3])).sum().backward()
        >>> optimizer.step()
        >>> averaged.update_parameters()
        >>> averaged.lookup(layer.weight, torch.tensor([[3, 0]])).shape
        torch.Size([1, 2, 2])
        >>> with averaged.swapped():
        ...     y = layer(torch.tensor([3]))
    """

    def __init__(self, optimizer: RowOptimizer, decay: float = 0.999) -> None:
        self.optimizer = optimizer
        with torch_errors():
            self.decay = check_decay(decay)
        #: Number of updates.
        self.n_averaged = 0
        self._averages = {parameter: _Average(parameter) for parameter in self._all()}

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Update the averages with the current weights; call after ``optimizer.step``."""
        with torch_errors():
            decay = check_decay(self.decay) if self.n_averaged else 0.0
            refuse_swapped(average.rows for average in self._averages.values())
        states = [self._state(parameter) for parameter in self._all()]
        with held_interrupts():
            for parameter, state in zip(self._all(), states, strict=True):
                average = self._of(parameter)
                if state is not None:
                    state.update_average(average.rows, decay)
                else:
                    catch_up(parameter)
                    average.tensor.lerp_(parameter.to(average.tensor.dtype), 1 - decay)
            self.n_averaged += 1

    def average(self, parameter: Tensor) -> Tensor:
        """Return a copy of a parameter's average, in the dtype of the parameter.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> from firstlayer.torch.optim import RowSGD
            >>> table = Embedding(5, 2, sparse=True)
            >>> averaged = AveragedRows(RowSGD(table, lr=0.1))
            >>> averaged.update_parameters()
            >>> averaged.average(table.weight).shape
            torch.Size([5, 2])
        """
        state = self._state(parameter)
        if state is not None:
            state.catch_up()
        return self._of(parameter).tensor.to(parameter.dtype, copy=True)

    def lookup(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return rows of a table's average, in the dtype of the table; nothing is written.

        Args:
            table: Parameter that is a table.
            ids: Rows to return.
        """
        check_whole_table(table, "lookup", advice="call the layer inside swapped()")
        average, state = self._of(table), self._state(table)
        if state is None:
            return average.tensor[ids].to(table.dtype)
        flat = np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)
        rows = tensor_of(state.averaged_rows(average.rows, flat))
        return rows.reshape(*ids.shape, -1).to(table.dtype)

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Put the averages into the parameters; leaving the context restores the weights.

        Takes memory for a copy of the parameters. A step inside raises a ValueError.
        """
        with torch_errors():
            refuse_swapped(average.rows for average in self._averages.values())
        saved: dict[Tensor, Tensor] = {}
        try:
            for parameter in self._all():
                average, state = self.average(parameter), self._state(parameter)
                rows = self._of(parameter).rows
                if state is not None:
                    state.attach_average(rows)
                saved[parameter] = parameter.detach().clone()
                rows.is_swapped = True
                with torch.no_grad():
                    parameter.copy_(average)
            yield
        finally:
            for parameter, weight in saved.items():
                with torch.no_grad():
                    parameter.copy_(weight)
                self._of(parameter).rows.is_swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, in the order of the parameters, and their number."""
        averages = []
        for parameter in self._all():
            state = self._state(parameter)
            if state is not None:
                state.catch_up()
            averages.append(self._of(parameter).tensor.clone())
        return {"n_averaged": self.n_averaged, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state. Nothing changes if it does not fit."""
        if state_dict.keys() != {"n_averaged", "averages"}:
            names = sorted(state_dict)
            raise ValueError(f"state_dict must have averages and n_averaged, got {names}")
        with torch_errors():
            count = checked_step("n_averaged", state_dict["n_averaged"])
        parameters, averages = self._all(), state_dict["averages"]
        got = [tuple(average.shape) for average in averages]
        if got != [tuple(parameter.shape) for parameter in parameters]:
            shapes = [tuple(parameter.shape) for parameter in parameters]
            raise ValueError(f"averages must have the shapes {shapes}, got {got}")
        with held_interrupts():
            for parameter, average in zip(parameters, averages, strict=True):
                state = self._state(parameter)
                if state is not None:
                    state.catch_up()
                self._of(parameter).tensor.copy_(average)
            self.n_averaged = count

    def _all(self) -> list[Tensor]:
        """Return the parameters of the optimizer, in order."""
        groups = self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _of(self, parameter: Tensor) -> "_Average":
        """Return the average of a parameter, a new one if its group was added later."""
        if parameter not in self._averages:
            if not any(parameter is other for other in self._all()):
                raise ValueError(
                    "the parameter must be one of the optimizer's, got another"
                )
            self._averages[parameter] = _Average(parameter)
        return self._averages[parameter]

    def _state(self, parameter: Tensor) -> ParameterState | None:
        """Return the optimizer's state of a table, or None for other parameters."""
        state = self.optimizer.table_state_of(parameter)
        if state is not None and not isinstance(state, ParameterState):
            raise TypeError(
                "a table must be contiguous and on the CPU to be averaged by rows, "
                f"got one on {parameter.device}"
            )
        return state


class _Average:
    """Average of one parameter: a tensor, and the rows of a table over its memory."""

    def __init__(self, parameter: Tensor) -> None:
        self.tensor = torch.zeros_like(
            parameter,
            dtype=compute_dtype(parameter.dtype),
            memory_format=torch.contiguous_format,
            requires_grad=False,
        )
        is_table = self.tensor.is_cpu and self.tensor.dim() == 2
        self.rows = RowAverage(array_of(self.tensor) if is_table else np.zeros((0, 0)))
