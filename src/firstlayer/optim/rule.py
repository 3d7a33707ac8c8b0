"""Interface between a row optimizer and an update rule such as SGD or Adam.

A rule updates rows that have a gradient (:meth:`Rule.update`), records what a step does to
rows without one (:meth:`Rule.record_step`), and applies the recorded steps to stale rows
(:meth:`Rule.catch_up`). A :class:`RowOptions` dataclass per optimizer holds its arguments
and their defaults, for NumPy and for torch.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import Any, ClassVar, Literal

import numpy as np

from .._check import not_negative_number, number
from ..kernels.optim.row_slice import RowSlice, StaleRows
from .missed_steps import MissedSteps

Mode = Literal["exact", "lazy"]
MODES = ("exact", "lazy")
Options = Mapping[str, Any]
State = dict[str, np.ndarray]


class Rule:
    """Update rule of an optimizer. Stateless.

    ``options`` are the hyperparameters of the current step, under torch's names.

    Args:
        lazy: Whether rows without a gradient stay unchanged.
    """

    #: Number of coefficients stored for a missed step.
    num_coefficients: ClassVar[int] = 0
    #: Names of the arrays that the state may have, under any options.
    array_names: ClassVar[frozenset[str]] = frozenset()
    #: Whether an update depends on the number of steps taken before.
    depends_on_step: ClassVar[bool] = False

    def __init__(self, *, lazy: bool = False) -> None:
        self.lazy = lazy

    def check(self, options: Options) -> None:
        """Raise ValueError for options that are invalid or, unless lazy, not exact."""
        for name in ("lr", "eps", "weight_decay", "momentum", "lr_decay"):
            if name in options:
                not_negative_number(name, options[name])

    def initial_state(self, options: Options) -> dict[str, float]:
        """Return the name and initial value of each array of the state."""
        raise NotImplementedError

    def required_arrays(self, options: Options) -> set[str]:
        """Return the names of the arrays that a saved state must have."""
        return set(self.initial_state(options))

    def state_width(self, width: int) -> int:
        """Return the width of the state's arrays for rows of ``width``."""
        return width

    def frozen_options(self, options: Options) -> tuple[Any, ...]:
        """Return the options that must not change while rows are stale."""
        return ()

    def adapt_state(self, state: State, options: Options) -> None:
        """Adjust a state in place to frozen options that may be new; no row is stale."""

    def is_noop_without_gradient(self, options: Options) -> bool:
        """Return whether a step without a gradient changes neither weight nor state."""
        return True

    def moves_without_gradient(self, options: Options) -> bool:
        """Return whether a step without a gradient changes weights."""
        return False

    def caught_up_coefficients(self, options: Options, step: int) -> Any:
        """Return the coefficients of a row that is up to date after ``step``."""
        return ()

    def record_step(self, missed: MissedSteps, options: Options, step: int) -> None:
        """Advance ``missed`` by one step. Steps count from 1."""

    def catch_up(self, rows: StaleRows, missed: MissedSteps) -> None:
        """Apply the missed steps to stale rows, in place."""

    def update(
        self, rows: RowSlice, gradient: np.ndarray, *, options: Options, step: int
    ) -> None:
        """Update rows that are up to date and have a gradient, in place."""
        raise NotImplementedError


@dataclass(kw_only=True)
class RowOptions:
    """Arguments of a row optimizer besides the parameters it trains, with defaults.

    Subclasses name a rule and add its hyperparameters, under torch's names.
    """

    rule_class: ClassVar[type[Rule]]

    mode: Mode = "exact"
    stochastic_rounding: bool = False

    def hyperparameters(self) -> dict[str, Any]:
        """Return the options of the rule, by name."""
        general = {field.name for field in fields(RowOptions)}
        return {name: value for name, value in vars(self).items() if name not in general}

    @classmethod
    def constructor_signature(cls, *first: str, others: str = "") -> inspect.Signature:
        """Return the signature of a constructor that takes these options.

        Args:
            first: Names of the arguments before the options.
            others: Name that collects further keyword arguments, if any.
        """
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in first]
        parameters += inspect.signature(cls).parameters.values()
        if others:
            parameters.append(Parameter(others, Parameter.VAR_KEYWORD))
        return inspect.Signature(parameters)


def check_fractions(values: Sequence[Any], *names: str) -> None:
    """Raise ValueError unless there is a value in [0, 1) for each name."""
    if not hasattr(values, "__len__") or len(values) != len(names):
        group = names[0].partition("[")[0]
        raise ValueError(f"{group} must be {len(names)} numbers, got {values}")
    for name, value in zip(names, values, strict=True):
        if not 0 <= number(name, value) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")


def refuse_coupled_decay(options: Options, rule: str, alternative: str = "") -> None:
    """Raise ValueError for weight decay that gives every row a gradient."""
    if options["weight_decay"]:
        raise ValueError(
            f'weight_decay must be 0 in mode="exact" for {rule}, which adds it to the '
            f"gradient of every row, got {options['weight_decay']}; "
            f'use {alternative}mode="lazy"'
        )


def gradient_sign(options: Options) -> float:
    """Return the factor of the gradient: −1 to maximize."""
    return -1.0 if options["maximize"] else 1.0
