"""Update rules executed with NumPy operators: on every row, and on the rows of a batch."""

from typing import Any

import numpy as np

from firstlayer.optim.missed_steps import host_values
from firstlayer.optim.rule import ArrayOps, Rule, update_rows


class DenseTable:
    """Table of which every row is updated in every step."""

    def __init__(self, rule: Rule, weight: np.ndarray, options: dict[str, Any]) -> None:
        self.rule, self.weight, self.step_count = rule, weight.copy(), 0
        self.state: dict[str, np.ndarray] = {}
        self.add_arrays(options)

    def add_arrays(self, options: dict[str, Any]) -> None:
        rows, width = self.weight.shape
        for name, value in self.rule.initial_state(options).items():
            if name not in self.state:
                shape = rows, self.rule.state_width(width)
                self.state[name] = np.full(shape, value, self.weight.dtype)

    def arrays(self, options: dict[str, Any], rows: Any = slice(None)) -> list[np.ndarray]:
        names = self.rule.initial_state(options)
        return [self.weight[rows], *(self.state[name][rows] for name in names)]

    def store(self, options: dict[str, Any], rows: Any, arrays: Any) -> None:
        names = self.rule.initial_state(options)
        self.weight[rows] = arrays[0]
        for name, array in zip(names, arrays[1:], strict=True):
            self.state[name][rows] = array

    def step(self, ids: np.ndarray, gradient: np.ndarray, options: dict[str, Any]) -> None:
        whole = np.zeros_like(self.weight)
        whole[ids] = gradient
        self.update(slice(None), whole, options)

    def update(self, rows: Any, gradient: np.ndarray, options: dict[str, Any]) -> None:
        self.step_count += 1
        self.add_arrays(options)
        values = host_values(self.rule, options, self.step_count)
        weight, *state = self.arrays(options, rows)
        updated = update_rows(ArrayOps(np), self.rule, values, weight, gradient, state)
        self.store(options, rows, updated)


class OperatorTable(DenseTable):
    """Table of which the rows with a gradient are updated; the others catch up later."""

    def __init__(self, rule: Rule, weight: np.ndarray, options: dict[str, Any]) -> None:
        super().__init__(rule, weight, options)
        self.restart(options)

    def restart(self, options: dict[str, Any]) -> None:
        self.options = dict(options)
        self.kind = self.rule.coefficients_class(options)
        self.frozen = self.rule.frozen_options(options)
        self.from_step = np.zeros(len(self.weight), int)
        caught_up = self.rule.caught_up_coefficients(np, options, self.step_count)
        self.columns = np.array(caught_up, float).reshape(-1, 1)
        self.steps: list[Any] = [None]

    def step(self, ids: np.ndarray, gradient: np.ndarray, options: dict[str, Any]) -> None:
        if self.rule.frozen_options(options) != self.frozen:
            every = np.arange(len(self.weight))
            self.store(self.options, every, self.caught_up(every))
            self.add_arrays(options)
            self.state |= self.rule.adapted_state(np, options, self.state)
            self.restart(options)
        self.store(options, ids, self.caught_up(ids))
        self.update(ids, gradient, options)
        if not self.rule.is_noop_without_gradient(options) or len(self.steps) > 1:
            self.record(options)
        self.from_step[ids] = len(self.steps) - 1

    def record(self, options: dict[str, Any]) -> None:
        values = host_values(self.rule, options, self.step_count)
        kind: Any = self.kind
        with np.errstate(all="ignore"):
            advanced = np.stack(kind(*self.columns).advance(np, values))
        caught_up = self.rule.caught_up_coefficients(np, options, self.step_count)
        self.columns = np.column_stack([advanced, caught_up])
        self.steps.append(values)

    def caught_up(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return weight and state of rows after the steps they missed."""
        arrays, start = self.arrays(self.options, rows), self.from_step[rows]
        if len(self.steps) == 1:
            return arrays
        kind: Any = self.kind
        while kind.replays:
            late = np.flatnonzero(~kind(*self.columns[:, start]).is_accurate(np))
            if not late.size:
                break
            start[late] += 1
            values = [self.steps[k] for k in start[late]]
            step = type(values[0])(*np.array(values).T[..., None])
            weight, *state = (array[late] for array in arrays)
            total = step.total_gradient(ArrayOps(np), weight, np.zeros_like(weight))
            for array, new in zip(
                arrays, step.update(ArrayOps(np), weight, total, *state), strict=True
            ):
                array[late] = new
        columns = self.columns[:, start][..., None].astype(self.weight.dtype)
        return list(kind(*columns).catch_up(ArrayOps(np), *arrays))
