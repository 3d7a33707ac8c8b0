"""Exponential moving averages of the parameters that a row optimizer trains."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from .._check import integers, number
from .._interrupts import held_interrupts
from .row_average import RowAverage, refuse_swapped
from .row_optimizer import RowOptimizer
from .saved_state import checked_step
from .table_state import TableState

#: Beginning of the error for updates inside of ``swapped()``.
CHANGED = "averages must not be changed"


class AveragedRows:
    """Exponential moving average (EMA) of weights, at the cost of the rows of a batch.

    After every :meth:`update_parameters` the averages are
    ``decay · average + (1 − decay) · weight``, of every row: rows without a gradient are
    averaged with the weights that the optimizer gives them, and apply missed updates when
    they are next read or written. The first update copies the weights, as in
    ``torch.optim.swa_utils.AveragedModel``. Averages take the memory of the parameters, in
    float32 for half precision.

    Args:
        optimizer: Optimizer whose parameters are averaged.
        decay: Decay of the averages, from 0 to 1. The attribute may be changed between
            updates.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> from firstlayer.optim import RowAdamW
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowAdamW(layer, lr=0.1)
        >>> averaged = AveragedRows(optimizer, decay=0.9)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
        >>> averaged.update_parameters()
        >>> averaged.lookup("weight", [[3, 0]]).shape
        (1, 2, 2)
        >>> with averaged.swapped():
        ...     y = layer([3])
    """

    def __init__(self, optimizer: RowOptimizer, decay: float = 0.999) -> None:
        check_optimizer(optimizer, RowOptimizer)
        self.optimizer, self.decay = optimizer, check_decay(decay)
        #: Number of updates.
        self.n_averaged = 0
        self._averages: dict[str, RowAverage] = {}
        for name, state in optimizer.table_states.items():
            if state.stored is not None:
                raise on_disk(name)
            self._averages[name] = RowAverage(np.zeros(state.shape, state.dtype))

    def update_parameters(self) -> None:
        """Update the averages with the current weights; call after ``optimizer.step``."""
        decay = check_decay(self.decay) if self.n_averaged else 0.0
        refuse_swapped(self._averages.values(), CHANGED)
        with held_interrupts():
            for name, average in self._averages.items():
                self._state(name).update_average(average, decay)
            self.n_averaged += 1

    def average(self, name: str) -> Float[np.ndarray, "..."]:
        """Return a copy of a parameter's average.

        Args:
            name: Name of the parameter, as in ``layer.parameters()``.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowSGD
            >>> averaged = AveragedRows(RowSGD(Embedding(5, 2, rng=0), lr=0.1))
            >>> averaged.update_parameters()
            >>> averaged.average("weight").shape
            (5, 2)
        """
        self._state(name).catch_up()
        shape = self.optimizer.parameter_shape(name)
        return self._averages[name].values.reshape(shape).copy()

    def lookup(
        self, name: str, ids: Int[np.ndarray, "*batch"]
    ) -> Float[np.ndarray, "*batch width"]:
        """Return rows of a table's average; nothing is written.

        Args:
            name: Name of the table, as in ``layer.parameters()``.
            ids: Rows to return.
        """
        ids = integers(ids, name="ids")
        flat = np.ascontiguousarray(ids.reshape(-1), np.int64)
        rows = self._state(name).averaged_rows(self._averages[name], flat)
        return rows.reshape(*ids.shape, rows.shape[-1])

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Put the averages into the parameters; leaving the context restores the weights.

        Takes memory for a copy of the parameters. A step inside raises a ValueError.
        """
        refuse_swapped(self._averages.values(), CHANGED)
        saved: dict[str, np.ndarray] = {}
        try:
            for name, average in self._averages.items():
                state = self._state(name)
                state.catch_up()
                table = state.table()
                saved[name] = table.copy()
                state.attach_average(average)
                average.is_swapped = True
                table[...] = average.values
            yield
        finally:
            for name, weight in saved.items():
                self._state(name).table()[...] = weight
                self._averages[name].is_swapped = False

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the averages by the names of their parameters, and ``"n_averaged"``.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowSGD
            >>> averaged = AveragedRows(RowSGD(Embedding(5, 2, rng=0), lr=0.1))
            >>> state = averaged.state_dict()
            >>> sorted(state)
            ['n_averaged', 'weight']
            >>> averaged.load_state_dict(state)
        """
        averages = {name: self.average(name) for name in self._averages}
        return averages | {"n_averaged": np.array(self.n_averaged)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a state. Nothing changes if it does not fit."""
        if state.keys() != {*self._averages, "n_averaged"}:
            expected = sorted((*self._averages, "n_averaged"))
            raise ValueError(f"state must have {expected}, got {sorted(state)}")
        count = checked_step("n_averaged", state["n_averaged"])
        for name in self._averages:
            shape = self.optimizer.parameter_shape(name)
            if np.shape(state[name]) != shape:
                raise ValueError(
                    f"{name} must have shape {shape}, got {np.shape(state[name])}"
                )
        with held_interrupts():
            for name, average in self._averages.items():
                self._state(name).catch_up()
                average.values[...] = np.reshape(state[name], average.values.shape)
            self.n_averaged = count

    def _state(self, name: str) -> TableState:
        states: dict[str, Any] = self.optimizer.table_states
        if name not in states:
            raise ValueError(f"name must be one of {sorted(states)}, got {name!r}")
        return states[name]


def on_disk(name: str) -> TypeError:
    """Return the error for averaging a table that is trained on disk."""
    return TypeError(f"AveragedRows needs tables in memory, but {name} is on disk")


def check_optimizer(optimizer: Any, row_optimizer: type) -> None:
    """Raise TypeError unless ``optimizer`` is a row optimizer of this front end."""
    if not isinstance(optimizer, row_optimizer):
        name = type(optimizer).__name__
        raise TypeError(f"optimizer must be a row optimizer, got {name}")


def check_decay(decay: Any) -> float:
    """Return a decay as a float, or raise unless it is from 0 to 1."""
    if not 0 <= number("decay", decay) <= 1:
        raise ValueError(f"decay must be from 0 to 1, got {decay}")
    return float(decay)
