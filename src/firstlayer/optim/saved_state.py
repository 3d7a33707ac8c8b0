"""Checks of saved optimizer states: numbers of steps and names of arrays."""

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .rule import Rule

if TYPE_CHECKING:
    from .table_state import TableState

# Number of steps that a state may have. Steps are int64 and must not overflow.
MAX_STEP = 1 << 62


def checked_step(name: str, value: Any) -> int:
    """Return a saved number of steps as an int, or raise a ValueError.

    Args:
        name: Name of the number in the error message.
        value: Number, or array of one, of any dtype: files have int32, int64 and float32.

    Example:
        >>> import numpy as np
        >>> checked_step("step", np.float32(7))
        7
        >>> checked_step("step", -1)
        Traceback (most recent call last):
        ...
        ValueError: step must be a whole number from 0 to 2**62, got -1
    """
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, bool) and 0 <= number <= MAX_STEP:
            if number == int(number):
                return int(number)
    raise ValueError(f"{name} must be a whole number from 0 to 2**62, got {value}")


def check_stored_step(state: "TableState", value: Any, *, name: str) -> None:
    """Raise ValueError unless a table on disk is at the step of a saved optimizer.

    Args:
        state: State of the table.
        value: Saved number of steps.
        name: Name of the number in the error message.
    """
    if checked_step(name, value) != state.step_count:
        raise ValueError(
            f"{name} must be {state.step_count} as in the store of the table, got {value}; "
            "open the store at the commit of that step first"
        )


def check_names(
    rule: Rule, names: Iterable[str], *, required: set[str], owner: str
) -> None:
    """Raise ValueError unless a state has the required arrays and none of another rule.

    Args:
        rule: Update rule.
        names: Names of the saved arrays.
        required: Names that must be among them.
        owner: Description of the parameter in the error message.
    """
    names = set(names)
    if required - names or names - rule.array_names:
        expected = sorted(required or rule.array_names)
        raise ValueError(
            f"the state of {owner} must have the arrays {expected}, got {sorted(names)}"
        )
