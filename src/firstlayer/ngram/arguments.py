"""Arguments of n-gram schemes: their checks, and setting them in a frozen value."""

from typing import Any

from .._check import integer


def set_argument(scheme: Any, name: str, value: Any) -> None:
    """Set an argument of a scheme that is being constructed to its checked value."""
    object.__setattr__(scheme, name, value)


def integer_tuple(name: str, values: Any, *, at_least: int) -> tuple[int, ...]:
    """Return integers as a tuple, after checking that there is one and each is in range.

    Example:
        >>> integer_tuple("layers", [1, 14], at_least=0)
        (1, 14)
    """
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} must be a list of integers, got {type(values).__name__}")
    checked = tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(values))
    if not checked:
        raise ValueError(f"{name} must have at least one entry, got none")
    for i, value in enumerate(checked):
        if value < at_least:
            raise ValueError(f"{name}[{i}] must be at least {at_least}, got {value}")
    return checked


def distinct(name: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``values`` if they are all different."""
    if len(set(values)) < len(values):
        raise ValueError(f"{name} must be different numbers, got {values}")
    return values


def below(name: str, value: int, bound: int, *, of: str) -> int:
    """Return ``value`` as an int if it is an id: at least 0 and below ``bound``."""
    if not 0 <= integer(name, value) < bound:
        raise ValueError(f"{name} must be in [0, {bound}) for {of} {bound}, got {value}")
    return int(value)


def at_least(name: str, value: int, minimum: int) -> int:
    """Return ``value`` as an int if it is an integer of at least ``minimum``."""
    if integer(name, value) < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)
