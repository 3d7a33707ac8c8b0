"""Exponential moving averages of the parameters that a row optimizer trains."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._interrupts import held_interrupts
from ...optim.averaged_rows import CHANGED, check_decay, check_optimizer, on_disk
from ...optim.row_average import refuse_swapped
from ...optim.saved_state import checked_step
from .._tensors.errors import check_ids, torch_errors
from .._tensors.memory import array_of, tensor_of
from .._tensors.shard_tensor import check_whole_table
from .new_state import State
from .operator_state import OperatorState
from .row_optimizer import RowOptimizer
from .stored import store_of
from .table_state import catch_up
from .tensor_average import TensorAverage


class AveragedRows:
    """Exponential moving average (EMA) of weights, at the cost of the rows of a batch.

    Equals ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``,
    which updates every row of a table in every step. Rows without a gradient are averaged
    with the weights that the optimizer gives them, and apply missed updates when they are
    next read or written. The first update copies the weights. Averages take the memory of
    the parameters, in float32 for half precision, on the device of each parameter.

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
        with torch_errors():
            check_optimizer(optimizer, RowOptimizer)
            self.optimizer = optimizer
            self.decay = check_decay(decay)
        #: Number of updates.
        self.n_averaged = 0
        self._averages: dict[Tensor, TensorAverage] = {}
        for parameter in self._all():
            self._of(parameter)

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Update the averages with the current weights; call after ``optimizer.step``."""
        with torch_errors():
            decay = check_decay(self.decay) if self.n_averaged else 0.0
            refuse_swapped(self._averages.values(), CHANGED)
        averages = [self._of(parameter) for parameter in self._all()]
        with held_interrupts():
            for parameter, average in zip(self._all(), averages, strict=True):
                state = self._state(parameter)
                if state is not None:
                    state.update_average(average, decay)
                else:
                    catch_up(parameter)
                    average.move_to(parameter.device)
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
        if isinstance(state, OperatorState):
            check_ids(ids, state.shape[0])
            rows = state.averaged_rows(average, ids)
        else:
            flat = np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)
            rows = tensor_of(state.averaged_rows(average, flat))
        return rows.reshape(*ids.shape, -1).to(table.dtype)

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Put the averages into the parameters; leaving the context restores the weights.

        Takes memory for a copy of the parameters. A step inside raises a ValueError.
        """
        with torch_errors():
            refuse_swapped(self._averages.values(), CHANGED)
        saved: dict[Tensor, Tensor] = {}
        try:
            for parameter in self._all():
                values, state = self.average(parameter), self._state(parameter)
                average = self._of(parameter)
                if state is not None:
                    state.attach_average(average)
                saved[parameter] = parameter.detach().clone()
                average.is_swapped = True
                with torch.no_grad():
                    parameter.copy_(values)
            yield
        finally:
            for parameter, weight in saved.items():
                with torch.no_grad():
                    parameter.copy_(weight)
                self._of(parameter).is_swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, in the order of the parameters, and their number.

        Example:
            >>> from firstlayer.torch import Embedding
            >>> from firstlayer.torch.optim import RowSGD
            >>> averaged = AveragedRows(RowSGD(Embedding(5, 2, sparse=True), lr=0.1))
            >>> averaged.update_parameters()
            >>> averaged.load_state_dict(averaged.state_dict())
            >>> averaged.n_averaged
            1
        """
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

    def _of(self, parameter: Tensor) -> TensorAverage:
        """Return the average of a parameter, a new one if its group was added later."""
        if parameter not in self._averages:
            if not any(parameter is other for other in self._all()):
                raise ValueError(
                    "the parameter must be one of the optimizer's, got another"
                )
            store = store_of(parameter)
            if store is not None:
                raise on_disk(f"the table of {store}")
            self._averages[parameter] = TensorAverage(parameter)
        return self._averages[parameter]

    def _state(self, parameter: Tensor) -> State | None:
        """Return the optimizer's state of a table, or None for other parameters."""
        return self.optimizer.table_state_of(parameter)
