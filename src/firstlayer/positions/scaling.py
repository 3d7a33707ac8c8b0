"""Rules that let a rotary model read further than it was trained, as small frozen values.

Each rule slows pairs down, so that positions beyond the original length make angles the
model has met. They differ in which pairs, and in whether turns are also enlarged to keep
attention sharp (``attention_factor``, which multiplies every cosine and sine).

A rule is a value: built from numbers, checked once, compared by them, blind to what it is
used on. Two rules depend on the current length, :class:`DynamicNTK` and :class:`LongRoPE`:
``at_length(n)`` returns the rule for that length, and keys in a cache are good only for the
length they were made at.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from .._check import one_of, positive
from ._scaling import Frequencies, Scaling, count, number
from .frequencies import inverse_frequencies
from .longrope import LongRoPE
from .yarn import YaRN


@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Position interpolation: every pair slower by ``factor`` (arXiv 2306.15595).

    Args:
        factor: How many times longer sequences may be. At least 1.

    Example:
        >>> Linear(factor=4.0).inverse_frequencies(4, base=10_000.0).tolist()
        [0.25, 0.0025]
    """

    factor: float

    def __post_init__(self) -> None:
        number(self, "factor", least=1.0)

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        return inverse_frequencies(rotary_dim, base=base) / self.factor


@dataclass(frozen=True, kw_only=True)
class NTK(Scaling):
    """A larger base: the slowest pair slower by ``factor``, the fastest as it was.

    Args:
        factor: How many times longer sequences may be. At least 1.

    Example:
        >>> NTK(factor=4.0).inverse_frequencies(4, base=10_000.0).tolist()
        [1.0, 0.0025]
    """

    factor: float

    def __post_init__(self) -> None:
        number(self, "factor", least=1.0)

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        return _stretched(rotary_dim, base, self.factor)


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    """A base that grows with the current length beyond the original one.

    Args:
        factor: How steeply it grows. At least 1.
        original_length: Up to this length nothing is scaled. In transformers this is
            ``max_position_embeddings``.
        length: The current length; None, and all up to the original, is unscaled.

    Example:
        >>> rule = DynamicNTK(factor=2.0, original_length=100)
        >>> rule.at_length(100).inverse_frequencies(4, base=10_000.0).tolist()
        [1.0, 0.01]
        >>> rule.at_length(250).inverse_frequencies(4, base=10_000.0).tolist()
        [1.0, 0.0025]
    """

    factor: float
    original_length: int
    length: int | None = None

    def __post_init__(self) -> None:
        number(self, "factor", least=1.0)
        count(self, "original_length")
        count(self, "length", optional=True)

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        length = max(self.length or 0, self.original_length)
        ratio = self.factor * length / self.original_length - (self.factor - 1.0)
        return _stretched(rotary_dim, base, ratio)

    def at_length(self, n: int) -> Self:
        return replace(self, length=positive("n", n))


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Long waves slower by ``factor``, short ones as they were (Llama 3.1 to 3.3).

    A wave shorter than ``original_length / high_factor`` is left alone, one longer than
    ``original_length / low_factor`` is interpolated, and between the two the change is
    gradual.

    Args:
        factor: How many times longer sequences may be. At least 1.
        original_length: The length trained on, before scaling.
        low_factor: Waves within the original length up to which a pair is interpolated.
        high_factor: Waves from which it is left alone. Greater than ``low_factor``.

    Example:
        >>> rule = Llama3(factor=8.0, original_length=8192)
        >>> w = rule.inverse_frequencies(128, base=500_000.0)
        >>> (w / inverse_frequencies(128, base=500_000.0))[[0, 32, -1]].round(3).tolist()
        [1.0, 0.371, 0.125]
    """

    factor: float
    original_length: int
    low_factor: float = 1.0
    high_factor: float = 4.0

    def __post_init__(self) -> None:
        number(self, "factor", least=1.0)
        count(self, "original_length")
        number(self, "low_factor", above=0.0)
        number(self, "high_factor", above=self.low_factor, bound="low_factor ")

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        plain = inverse_frequencies(rotary_dim, base=base)
        waves = self.original_length * plain / (2.0 * math.pi)
        kept = (waves - self.low_factor) / (self.high_factor - self.low_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return plain * kept + plain / self.factor * (1.0 - kept)


@dataclass(frozen=True, kw_only=True)
class Proportional(Scaling):
    """Turns only the fastest pairs, at the speeds of a whole head (Gemma 4).

    Unlike ``rotary_dim``, which gives few features all speeds, this gives few pairs the
    fastest ones; the rest stand still. Leave ``rotary_dim`` at the whole head.

    Args:
        fraction: The part of the pairs that turns, in [0, 1].
        factor: What the pairs that turn are slower by. At least 1.

    Example:
        >>> Proportional(fraction=0.5).inverse_frequencies(8, base=10_000.0).tolist()
        [1.0, 0.1, 0.0, 0.0]
    """

    fraction: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        number(self, "fraction", least=0.0)
        if self.fraction > 1.0:
            raise ValueError(f"fraction must be at most 1, got {self.fraction}")
        number(self, "factor", least=1.0)

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        plain = inverse_frequencies(rotary_dim, base=base)
        plain[int(self.fraction * rotary_dim // 2) :] = 0.0
        return plain / self.factor


RULES = (Linear, NTK, DynamicNTK, YaRN, LongRoPE, Llama3, Proportional)


def scaling_from(value: Scaling | dict[str, Any] | None) -> Scaling | None:
    """Return a rule from what :meth:`Scaling.to_dict` made; rules and None as they are.

    Example:
        >>> scaling_from({"rule": "Linear", "factor": 2.0})
        Linear(factor=2.0)
    """
    if value is None or isinstance(value, Scaling):
        return value
    if not isinstance(value, dict):
        raise TypeError(
            f"scaling must be a rule, a dict or None, got {type(value).__name__}"
        )
    rules = {rule.__name__: rule for rule in RULES}
    rule = rules[one_of("rule", str(value.get("rule")), tuple(rules))]
    known = {field.name for field in fields(rule)}
    unknown = sorted(value.keys() - known - {"rule"})
    if unknown:
        raise ValueError(f"{rule.__name__} must have only {sorted(known)}, got {unknown}")
    return rule(**{name: value[name] for name in known & value.keys()})


def _stretched(rotary_dim: int, base: float, ratio: float) -> Frequencies:
    # base * ratio ** (dim / (dim - 2)) as the new base, in a form that is right at dim 2.
    pairs = np.arange(0, rotary_dim, 2)
    return inverse_frequencies(rotary_dim, base=base) * ratio ** (
        -pairs / max(rotary_dim - 2, 1)
    )
