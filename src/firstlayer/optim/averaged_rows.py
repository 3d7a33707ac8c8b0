"""Exponential moving averages of the parameters that a row optimizer trains."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64

from .._check import check_real, integers, number
from .._interrupts import held_interrupts
from .row_average import RowAverage, refuse_swapped
from .row_optimizer import RowOptimizer
from .saved_state import checked_step
from .table_state import TableState

#: Beginning of the error for updates inside of ``swapped()``.
CHANGED = "averages must not be changed"


class AveragedRows:
    """Exponential moving average (EMA) of weights; an update costs as much as a batch.

    After every :meth:`update_parameters` the averages are
    ``decay · average + (1 − decay) · weight``, of every row: rows without a gradient are
    averaged with the weights that the optimizer gives them, and apply missed updates when
    they are next read or written. The first update copies the weights, as in
    ``torch.optim.swa_utils.AveragedModel``. Averages take the memory of the parameters, in
    float32 for half precision. The average of a table that is trained on disk is a file of
    its store, and returns to the last commit with the table. A table on disk has one
    average, which continues when the store is opened again. The averages of a resized table
    follow with ``optimizer.resize_rows``; those of new rows start from their weights.

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
        self._in_memory: dict[str, RowAverage] = {}
        for name, state in optimizer.table_states.items():
            if state.stored is None:
                self._in_memory[name] = RowAverage(np.zeros(state.shape, state.dtype))
            else:
                state.stored.open_average()
        optimizer.averages.add(self)

    @property
    def n_averaged(self) -> int:
        """Number of updates."""
        return max((average.count for average in self._averages().values()), default=0)

    def update_parameters(self) -> None:
        """Update the averages with the current weights; call after ``optimizer.step``.

        An error changes no average. Ctrl-C is raised when all averages are updated.
        """
        decay, averages = check_decay(self.decay), self._averages()
        refuse_swapped(averages.values(), CHANGED)
        for name in averages:
            self._state(name).make_room()
        with held_interrupts():
            for name, average in averages.items():
                self._state(name).update_average(average, decay if average.count else 0.0)

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
        return self._averages()[name].values.reshape(shape).copy()

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
        rows = self._state(name).averaged_rows(self._averages()[name], flat)
        return rows.reshape(*ids.shape, rows.shape[-1])

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Put the averages into the parameters; leaving the context restores the weights.

        Takes memory for a copy of the parameters, and journals every row of a table on
        disk. A step or a commit inside raises a ValueError.
        """
        averages = self._averages()
        refuse_swapped(averages.values(), CHANGED)
        saved: dict[str, np.ndarray] = {}
        try:
            # An interrupt within the loop could lose the weights of a table.
            with held_interrupts():
                for name, average in averages.items():
                    saved[name] = self._state(name).swap_average(average)
            yield
        finally:
            with held_interrupts():
                for name, weight in saved.items():
                    self._state(name).table()[...] = weight
                    averages[name].is_swapped = False

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the averages by the names of their parameters, and ``"n_averaged"``.

        Averages of tables on disk are in their stores, and left out.

        Example:
            >>> from firstlayer.numpy import Embedding
            >>> from firstlayer.optim import RowSGD
            >>> averaged = AveragedRows(RowSGD(Embedding(5, 2, rng=0), lr=0.1))
            >>> state = averaged.state_dict()
            >>> sorted(state)
            ['n_averaged', 'weight']
            >>> averaged.load_state_dict(state)
        """
        averages = {name: self.average(name) for name in self._in_memory}
        return averages | {"n_averaged": np.array(self.n_averaged)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a state. Nothing changes if it does not fit.

        Tables on disk must be at the same number of updates.
        """
        if state.keys() != {*self._in_memory, "n_averaged"}:
            expected = sorted((*self._in_memory, "n_averaged"))
            raise ValueError(f"state must have {expected}, got {sorted(state)}")
        count = checked_step("n_averaged", state["n_averaged"])
        for name, average in self._averages().items():
            if name not in self._in_memory:
                check_stored_count(average, count, name=name)
                continue
            shape = self.optimizer.parameter_shape(name)
            if np.shape(state[name]) != shape:
                raise ValueError(
                    f"{name} must have shape {shape}, got {np.shape(state[name])}"
                )
            check_real(state[name], name=name)
        with held_interrupts():
            for name, average in self._in_memory.items():
                self._state(name).catch_up()
                average.values[...] = np.reshape(state[name], average.values.shape)
                average.count = count
                # Its rows may be reset before the next update.
                self._state(name).attach_average(average)

    def _resize_rows(self, name: str, kept: Int64[np.ndarray, " kept"]) -> None:
        """Follow a table whose rows have changed; ``optimizer.resize_rows`` calls this.

        Args:
            name: Name of the table.
            kept: For each of the first rows of the table, its number before. Averages of
                the rows after these start from their weights.
        """
        self._in_memory[name].resize_rows(kept, self._state(name).table())

    def _averages(self) -> dict[str, RowAverage]:
        """Return the average of each parameter.

        Those of tables on disk are replaced when a store returns to a commit.
        """
        return {
            name: self._in_memory[name]
            if state.stored is None
            else state.stored.open_average()
            for name, state in self.optimizer.table_states.items()
        }

    def _state(self, name: str) -> TableState:
        states: dict[str, Any] = self.optimizer.table_states
        if name not in states:
            raise ValueError(f"name must be one of {sorted(states)}, got {name!r}")
        return states[name]


def check_stored_count(average: RowAverage, count: int, *, name: str) -> None:
    """Raise ValueError unless a store's average is at a number of updates."""
    if average.count != count:
        raise ValueError(
            f"n_averaged must be {average.count} as in the store of {name}, got {count}"
        )


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
