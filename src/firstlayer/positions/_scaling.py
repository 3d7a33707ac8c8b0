"""What every rotary scaling rule is: a frozen value, checked as it is built.

The rules themselves are in :mod:`firstlayer.positions.scaling`.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from jaxtyping import Float64

from .. import _check
from .._check import positive

Frequencies = Float64[np.ndarray, " pairs"]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What every rule has. Rules that say nothing else change no attention."""

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        """Return the angle per position of each feature pair under this rule.

        Args:
            rotary_dim: How many features are rotated. Positive and even.
            base: Ratio of the slowest wavelength to the fastest, before the rule.
        """
        raise NotImplementedError

    @property
    def attention_factor(self) -> float:
        """What every cosine and sine is multiplied by."""
        return 1.0

    def at_length(self, n: int) -> Self:
        """Return the rule for sequences of ``n`` positions; most rules are the same."""
        positive("n", n)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as plain values, for :func:`scaling_from`."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"rule": type(self).__name__, **plain}


def number(
    rule: Scaling,
    name: str,
    *,
    least: float | None = None,
    above: float | None = None,
    bound: str = "",
    optional: bool = False,
) -> None:
    """Make a field a float, if it is a finite number within its bound.

    Args:
        rule: The rule that is being built.
        name: The field.
        least: The smallest value allowed, or
        above: the largest value not allowed.
        bound: What the bound is called, if it is not just a number.
        optional: Whether None is allowed.
    """
    value = getattr(rule, name)
    if optional and value is None:
        return
    found = _check.number(name, value)
    if least is not None:
        inside, words = found >= least, f"at least {bound}{least:g}"
    else:
        inside, words = found > (above or 0.0), f"above {bound}{above or 0.0:g}"
    if not inside or not math.isfinite(found):
        raise ValueError(f"{name} must be finite and {words}, got {value}")
    object.__setattr__(rule, name, found)


def count(rule: Scaling, name: str, *, least: int = 1, optional: bool = False) -> None:
    """Make a field an int, if it is a whole number of at least ``least``."""
    value = getattr(rule, name)
    if optional and value is None:
        return
    if positive(name, value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    object.__setattr__(rule, name, int(value))


def divisors(rule: Scaling, name: str) -> None:
    """Make a field a tuple of floats, if they are finite and above 0."""
    given = enumerate(getattr(rule, name))
    values = tuple(_check.number(f"{name}[{at}]", value) for at, value in given)
    for place, value in enumerate(values):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}[{place}] must be finite and above 0, got {value}")
    object.__setattr__(rule, name, values)
