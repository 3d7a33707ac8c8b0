"""Optimizer state of a table that is trained on disk.

The arrays of the state, the average and the counters of rows are files of the table's
store, and are journalled with the rows. The remaining numbers, such as the coefficients of
missed steps, are saved with every commit. An optimizer made later for the same store
therefore continues the run, and stale rows are still stale.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from ..stores.journal_format import SavedState
from ..stores.training import TrainingStore
from .missed_steps import MissedSteps
from .row_average import RowAverage, refuse_swapped
from .rule import Options, Rule, State

if TYPE_CHECKING:
    from .stale_table import StaleTable


StateT = TypeVar("StateT")


class StoredState:
    """Connects the optimizer state of a table with the store of the table.

    Args:
        state: Optimizer state. Its arrays become those of the store.
        store: Store of the table.
        given: Arrays to continue from instead of those in the store, at ``step``.
        step: Number of steps taken before ``given`` was saved.
    """

    def __init__(
        self, state: "StaleTable", store: TrainingStore, given: State | None, step: int
    ) -> None:
        self._state, self._store = state, store
        self._average: RowAverage | None = None
        self.lock = state.lock
        saved = store.saved_state
        self._check_rule(saved)
        self._load(saved)
        if given is not None:
            self._copy(given, step)
        store.bind(self)

    def new_array(self, name: str, value: float) -> np.ndarray:
        """Create an array of the state in the store."""
        state = self._state
        return self._store.state_array(name, state.state_shape, state.dtype, fill=value)

    def open_average(self) -> RowAverage:
        """Return the average of the table, a new one if the store has none."""
        if self._average is None:
            shape, dtype = self._state.shape, self._state.dtype
            self._average = RowAverage(self._store.state_array("average", shape, dtype))
        return self._average

    def before_write(self, rows: np.ndarray | None) -> None:
        """Journal rows that are about to change."""
        self._store.before_write(rows)

    def catch_up(self, ids: np.ndarray | None = None) -> None:
        """Apply the missed steps to stale rows."""
        # The array of the store, because the layer may not exist any more.
        self._state.catch_up(ids, table=self._store.array)

    def caught_up_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return rows as they are after their missed steps; nothing is written."""
        return self._state.caught_up_rows(ids, table=self._store.array)

    def save(self) -> SavedState:
        """Return what is not stored per row."""
        state, missed, average = self._state, self._state.missed, self._average
        refuse_swapped(state.averages, "a commit must not be made")
        numbers: dict[str, Any] = {
            "rule": type(state.rule).__name__,
            "lazy": state.rule.lazy,
            "stochastic_rounding": state.stochastic_rounding,
            "arrays": sorted(state.state),
            "step_count": state.step_count,
            "event_count": state.event_count,
            "base_step": state.base_step,
            "missed_moves": state._missed_moves,
            "missed_count": missed.count,
            "options": _to_json(missed.options),
        }
        columns = _columns_of(missed)
        if average is not None:
            numbers["n_averaged"] = average.count
            if average in state.averages:
                columns |= average.columns(missed)
        arrays = {name: column.copy() for name, column in columns.items()}
        return SavedState(numbers, arrays)

    def restore(self) -> None:
        """Continue from the store after it has returned to a commit."""
        saved = self._store.saved_state_at_commit
        self._check_rule(saved)
        self._load(saved)
        # A commit from before the first optimizer has none. Averages need them.
        self._state._add_missing_arrays(self._state.missed.options)
        self._state.on_restored()

    def retire(self) -> None:
        """Refuse to be used from now on; another optimizer continues."""
        state = self._state
        state.base_step = state.event_count
        state.stored = RetiredState(self._store)

    def _check_rule(self, saved: SavedState | None) -> None:
        if saved is None:
            return
        rule = self._state.rule
        known = saved.numbers["rule"], saved.numbers["lazy"]
        if known != (type(rule).__name__, rule.lazy):
            raise ValueError(
                f"the store at {self._store.path} has the state of {_rule_text(*known)}, "
                f"got {_rule_text(type(rule).__name__, rule.lazy)}; continue with the "
                "former, or call its discard_state()"
            )

    def _load(self, saved: SavedState | None) -> None:
        """Use the arrays of the store, and the numbers of a commit or those of no steps."""
        state, store, rows = self._state, self._store, self._state.shape[0]
        state.row_steps = store.state_array("row_steps", (rows,), np.int64)
        state.has_state = store.state_array("has_state", (rows,), np.bool_)
        state.state = {}
        state.step_count = state.event_count = state.base_step = 0
        state._missed_moves = False
        self._average = None
        state.averages.clear()
        if saved is None:
            state.missed = MissedSteps(state.rule, state.missed.options, 0)
            return
        numbers = saved.numbers
        options = {**state.missed.options, **_from_json(numbers["options"])}
        state.missed = missed = MissedSteps(state.rule, options, numbers["base_step"])
        state.state = {name: self.new_array(name, 0.0) for name in numbers["arrays"]}
        state.step_count, state.event_count = numbers["step_count"], numbers["event_count"]
        state.base_step = numbers["base_step"]
        state._missed_moves = numbers["missed_moves"]
        missed.count = numbers["missed_count"]
        for name, columns in _columns_of(missed).items():
            columns[...] = saved.arrays[name]
        if "n_averaged" in numbers:
            self._load_average(saved)

    def _load_average(self, saved: SavedState) -> None:
        average, missed = self.open_average(), self._state.missed
        average.count = saved.numbers["n_averaged"]
        if "average_kept" in saved.arrays:
            self._state.attach_average(average)
            for name, columns in average.columns(missed).items():
                columns[...] = saved.arrays[name]

    def _copy(self, given: State, step: int) -> None:
        """Replace the state by arrays of a state that no row has missed a step of."""
        state = self._state
        self._store.before_write(None)
        state.catch_up()
        for name, array in given.items():
            self.new_array(name, 0.0)[...] = array
        state.state = {name: self.new_array(name, 0.0) for name in given}
        state.has_state[:] = True
        state.row_steps[:] = 0
        state.step_count = state.event_count = state.base_step = step
        state.missed = MissedSteps(state.rule, state.missed.options, step)
        state._start_averages()


def resumed_state(store: TrainingStore, make: Callable[..., StateT]) -> StateT | None:
    """Return the state that a store was trained with, or None if none of its rows is stale.

    It brings rows up to date until an optimizer takes over.

    Args:
        store: The store.
        make: Makes a state from a rule and arguments of
            :class:`firstlayer.optim.stale_table.StaleTable`.
    """
    saved = store.saved_state
    if saved is None or not saved.has_stale_rows:
        return None
    numbers, classes = saved.numbers, {cls.__name__: cls for cls in _subclasses(Rule)}
    if numbers["rule"] not in classes:
        raise ValueError(
            f"the store at {store.path} was trained with {numbers['rule']}, which is not "
            "a rule of firstlayer.optim"
        )
    return make(
        classes[numbers["rule"]](lazy=numbers["lazy"]),
        options=_from_json(numbers["options"]),
        stochastic_rounding=numbers["stochastic_rounding"],
        store=store,
    )


class RetiredState:
    """Takes the place of a :class:`StoredState` whose store is closed or used by another.

    Args:
        store: Store of the table.
    """

    def __init__(self, store: TrainingStore) -> None:
        self._message = (
            f"the store at {store.path} is closed, or another optimizer trains it"
        )

    def before_write(self, rows: np.ndarray | None) -> NoReturn:
        """Raise an error."""
        raise RuntimeError(self._message)

    def new_array(self, name: str, value: float) -> Any:
        """Raise an error."""
        raise RuntimeError(self._message)

    def open_average(self) -> Any:
        """Raise an error."""
        raise RuntimeError(self._message)


def _subclasses(cls: type[Rule]) -> Iterator[type[Rule]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _columns_of(missed: MissedSteps) -> dict[str, np.ndarray]:
    """Return views of the coefficients and hyperparameters of the recorded steps."""
    return {
        "coefficients": missed.coefficients,
        "steps": missed.all_steps[:, : missed.count + 1],
        "step_numbers": missed.step_numbers[: missed.count + 1],
    }


def _to_json(options: Options) -> dict[str, Any]:
    """Return the hyperparameters among options, as values that JSON represents."""
    values = {}
    for name, value in options.items():
        if name == "lr":
            values[name] = float(value)
        elif isinstance(value, (bool, int, float)):
            values[name] = value
        elif isinstance(value, (tuple, list)):
            values[name] = [float(part) for part in value]
    return values


def _from_json(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
    }


def _rule_text(rule: str, lazy: bool) -> str:
    return f'{rule} in mode="{"lazy" if lazy else "exact"}"'
