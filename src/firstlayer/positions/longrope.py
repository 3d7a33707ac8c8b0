"""LongRoPE: a searched divisor for each pair, and others beyond the original length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from .._check import positive
from ._scaling import Frequencies, Scaling, count, divisors, number
from .frequencies import inverse_frequencies


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Scaling):
    """A divisor for each pair, from a search; another set beyond the original length.

    Turns are enlarged by ``sqrt(1 + log(factor) / log(original_length))`` at any length
    (arXiv 2402.13753; Phi-3 and Phi-4-mini).

    Args:
        short_factors: The divisors up to and including the original length, one a pair.
        long_factors: The divisors beyond it.
        original_length: The length trained on, before scaling. At least 2.
        factor: How many times longer the longest sequence is: in transformers
            ``max_position_embeddings / original_max_position_embeddings``. At least 1.
        attention: The ``attention_factor`` itself, in place of the formula.
        length: The current length; None is short.

    Example:
        >>> factors = {"short_factors": [1.0, 2.0], "long_factors": [1.0, 8.0]}
        >>> rule = LongRoPE(**factors, original_length=64, factor=4.0)
        >>> rule.at_length(64).inverse_frequencies(4, base=10_000.0).tolist()
        [1.0, 0.005]
        >>> rule.at_length(65).inverse_frequencies(4, base=10_000.0).tolist()
        [1.0, 0.00125]
    """

    short_factors: Sequence[float]
    long_factors: Sequence[float]
    original_length: int
    factor: float
    attention: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):
            divisors(self, name)
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"long_factors must have {len(self.short_factors)} entries as "
                f"short_factors, got {len(self.long_factors)}"
            )
        count(self, "original_length", least=2)
        number(self, "factor", least=1.0)
        number(self, "attention", above=0.0, optional=True)
        count(self, "length", optional=True)

    @property
    def attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        plain = inverse_frequencies(rotary_dim, base=base)
        is_long = self.length is not None and self.length > self.original_length
        factors = self.long_factors if is_long else self.short_factors
        if len(factors) != len(plain):
            raise ValueError(
                f"short_factors and long_factors must have {len(plain)} entries for "
                f"rotary_dim {rotary_dim}, got {len(factors)}"
            )
        return plain / np.array(factors)

    def at_length(self, n: int) -> Self:
        return replace(self, length=positive("n", n))
