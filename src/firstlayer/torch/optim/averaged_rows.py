"""Exponential moving averages of the parameters that a row optimizer trains."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._interrupts import held_interrupts
from ...optim.averaged_rows import CHANGED, check_decay, check_optimizer, check_stored_count
from ...optim.row_average import RowAverage, refuse_swapped
from ...optim.saved_state import checked_step
from .._tensors.errors import check_ids, check_integers, torch_errors
from .._tensors.memory import array_of, tensor_of
from .._tensors.row_parameter import without_catch_up
from .._tensors.shard_tensor import check_whole_table
from .new_state import State
from .operator_state import OperatorState
from .row_optimizer import RowOptimizer
from .stored import store_of
from .table_state import catch_up
from .tensor_average import TensorAverage


class AveragedRows:
    """Exponential moving average (EMA) of weights; an update costs as much as a batch.

    Equals ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``,
    which updates every row of a table in every step. Rows without a gradient are averaged
    with the weights that the optimizer gives them, and apply missed updates when they are
    next read or written. The first update copies the weights. Averages take the memory of
    the parameters, in float32 for half precision, on the device of each parameter. The
    average of a table that is trained on disk is a file of its store, and returns to the
    last commit with the table. A table on disk has one average, which continues when the
    store is opened again. The averages of a resized table follow with
    ``optimizer.resize_rows``; those of new rows start from their weights.

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
        self._in_memory: dict[Tensor, TensorAverage] = {}
        for parameter in self._all():
            self._of(parameter)
        optimizer.averages.add(self)

    @property
    def n_averaged(self) -> int:
        """Number of updates."""
        return max((self._of(parameter).count for parameter in self._all()), default=0)

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Update the averages with the current weights; call after ``optimizer.step``.

        An error changes no average. Ctrl-C is raised when all averages are updated.
        """
        averages = [self._of(parameter) for parameter in self._all()]
        with torch_errors():
            later_decay = check_decay(self.decay)
            refuse_swapped(averages, CHANGED)
        for parameter in self._all():
            self._make_room(parameter)
        with held_interrupts():
            for parameter, average in zip(self._all(), averages, strict=True):
                state, decay = self._state(parameter), later_decay if average.count else 0.0
                if state is not None:
                    state.update_average(average, decay)  # pyright: ignore
                else:
                    average = self._in_memory[parameter]
                    average.tensor.lerp_(parameter.to(average.tensor.dtype), 1 - decay)
                    average.count += 1

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
        return self._tensor(parameter).to(parameter.dtype, copy=True)

    def lookup(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return rows of a table's average, in the dtype of the table; nothing is written.

        Args:
            table: Parameter that is a table.
            ids: Rows to return.
        """
        check_whole_table(table, "lookup", advice="call the layer inside swapped()")
        average, state = self._of(table), self._state(table)
        check_integers(ids, name="ids")
        check_ids(ids, table.shape[0])
        if state is None:
            return self._tensor(table)[ids.long()].to(table.dtype)
        if isinstance(state, OperatorState):
            rows = state.averaged_rows(self._in_memory[table], ids)
        else:
            flat = np.ascontiguousarray(array_of(ids).reshape(-1), np.int64)
            rows = tensor_of(state.averaged_rows(average, flat))
        return rows.reshape(*ids.shape, table.shape[1]).to(table.dtype)

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Put the averages into the parameters; leaving the context restores the weights.

        Takes memory for a copy of the parameters, and journals every row of a table on
        disk. A step or a commit inside raises a ValueError.
        """
        with torch_errors():
            refuse_swapped(map(self._of, self._all()), CHANGED)
        saved: list[tuple[Tensor, RowAverage, Tensor]] = []
        try:
            with held_interrupts(), torch.no_grad():
                for parameter in self._all():
                    values, state = self.average(parameter), self._state(parameter)
                    average, store = self._of(parameter), store_of(parameter)
                    if store is not None:
                        store.before_write(None)
                    if state is not None:
                        state.attach_average(average)
                    saved.append((parameter, average, parameter.detach().clone()))
                    average.is_swapped = True
                    parameter.copy_(values)
            yield
        finally:
            with held_interrupts(), torch.no_grad():
                for parameter, average, weight in saved:
                    parameter.copy_(weight)
                    average.is_swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, in the order of the parameters, and their number.

        Averages of tables on disk are in their stores, and None here.

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
            if self._is_on_disk(parameter):
                averages.append(None)
                continue
            if state is not None:
                state.catch_up()
            averages.append(self._tensor(parameter).clone())
        return {"n_averaged": self.n_averaged, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state. Nothing changes if it does not fit.

        Tables on disk must be at the same number of updates.
        """
        if state_dict.keys() != {"n_averaged", "averages"}:
            names = sorted(state_dict)
            raise ValueError(f"state_dict must have averages and n_averaged, got {names}")
        with torch_errors():
            count = checked_step("n_averaged", state_dict["n_averaged"])
        parameters, averages = self._all(), state_dict["averages"]
        got = [None if average is None else tuple(average.shape) for average in averages]
        shapes = [None if self._is_on_disk(p) else tuple(p.shape) for p in parameters]
        if got != shapes:
            raise ValueError(f"averages must have the shapes {shapes}, got {got}")
        for number, parameter in enumerate(parameters):
            if self._is_on_disk(parameter):
                with torch_errors():
                    name = f"parameter {number}"
                    check_stored_count(self._of(parameter), count, name=name)
        with held_interrupts():
            for parameter, values in zip(parameters, averages, strict=True):
                if values is None:
                    continue
                state, average = self._state(parameter), self._in_memory[parameter]
                if state is not None:
                    state.catch_up()
                average.tensor.copy_(values)
                average.count = count
                if state is not None:
                    self._attach(state)

    def _attach(self, state: State) -> None:
        """Make the average of a table follow the rows that a new state of it resets."""
        average = self._in_memory.get(state.parameter)
        if average is not None and average.count:
            average.move_to(state.parameter.device)
            state.attach_average(average)

    def _resize_rows(self, parameter: Tensor, kept: Tensor) -> None:
        """Follow a table whose rows have changed; ``optimizer.resize_rows`` calls this.

        Args:
            parameter: Table.
            kept: For each of the first rows of the table, its number before. Averages of
                the rows after these start from their weights.
        """
        average = self._in_memory.get(parameter)
        if average is not None:
            with torch.no_grad(), without_catch_up():
                average.resize_rows(kept, parameter.detach())

    def _all(self) -> list[Tensor]:
        """Return the parameters of the optimizer, in order."""
        groups = self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _of(self, parameter: Tensor) -> RowAverage:
        """Return the average of a parameter, a new one if its group was added later.

        That of a table on disk is replaced when its store returns to a commit.
        """
        if parameter not in self._in_memory:
            if not any(parameter is other for other in self._all()):
                raise ValueError(
                    "the parameter must be one of the optimizer's, got another"
                )
            if self._is_on_disk(parameter):
                state: Any = self._state(parameter)
                return state.stored.open_average()
            self._in_memory[parameter] = TensorAverage(parameter)
        return self._in_memory[parameter]

    def _make_room(self, parameter: Tensor) -> None:
        """Prepare an update of a parameter's average, or raise if it cannot follow."""
        state = self._state(parameter)
        if state is not None:
            state.make_room()
            return
        catch_up(parameter)
        average = self._in_memory[parameter]
        average.move_to(parameter.device)
        if average.tensor.shape != parameter.shape:
            raise ValueError(
                f"a parameter must keep the shape {tuple(average.tensor.shape)} of its "
                f"average, got {tuple(parameter.shape)}"
            )

    def _tensor(self, parameter: Tensor) -> Tensor:
        """Return the average of a parameter, as of the event that each row is at."""
        average = self._of(parameter)
        if isinstance(average, TensorAverage):
            return average.tensor
        return tensor_of(average.values)

    def _is_on_disk(self, parameter: Tensor) -> bool:
        return store_of(parameter) is not None

    def _state(self, parameter: Tensor) -> State | None:
        """Return the optimizer's state of a table, or None for other parameters."""
        return self.optimizer.table_state_of(parameter)
