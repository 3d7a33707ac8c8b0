"""YaRN: interpolate the slow pairs only, and keep attention sharp (arXiv 2309.00071)."""

import math
from dataclasses import dataclass

import numpy as np

from ._scaling import Frequencies, Scaling, count, number
from .frequencies import inverse_frequencies


@dataclass(frozen=True, kw_only=True)
class YaRN(Scaling):
    """Slow pairs slower by ``factor``, fast ones as they were (arXiv 2309.00071).

    A pair that makes more than ``beta_fast`` turns within the original length is left
    alone, one that makes fewer than ``beta_slow`` is interpolated, and between the two the
    change is gradual. Turns are enlarged by ``0.1 * log(factor) + 1``.

    Args:
        factor: How many times longer sequences may be. At least 1.
        original_length: The length trained on, before scaling.
        beta_fast: Turns from which a pair is left alone.
        beta_slow: Turns up to which a pair is interpolated. At most ``beta_fast``.
        truncate: Round the two ends of the gradual part outwards to whole pairs; gpt-oss
            does not.
        mscale: DeepSeek's: turns are enlarged by ``0.1 * mscale * log(factor) + 1`` over
            the same with ``mscale_all_dim``. Both or neither.
        mscale_all_dim: See ``mscale``. DeepSeek multiplies its softmax scale by the square
            of what it gives; that is left to the attention.
        attention: The ``attention_factor`` itself, in place of any formula.

    Example:
        >>> rule = YaRN(factor=4.0, original_length=4096)
        >>> round(rule.attention_factor, 4)
        1.1386
        >>> w = rule.inverse_frequencies(64, base=10_000.0)
        >>> (w / inverse_frequencies(64))[[0, 20, -1]].tolist()
        [1.0, 0.4230769230769231, 0.25]
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention: float | None = None

    def __post_init__(self) -> None:
        number(self, "factor", least=1.0)
        count(self, "original_length")
        number(self, "beta_slow", above=0.0)
        number(self, "beta_fast", least=self.beta_slow, bound="beta_slow ")
        for name in ("mscale", "mscale_all_dim"):
            number(self, name, least=0.0, optional=True)
        number(self, "attention", above=0.0, optional=True)
        if not isinstance(self.truncate, bool | np.bool_):
            raise TypeError(f"truncate must be a bool, got {type(self.truncate).__name__}")
        object.__setattr__(self, "truncate", bool(self.truncate))
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                "mscale and mscale_all_dim must be given together, "
                f"got {self.mscale} and {self.mscale_all_dim}"
            )

    @property
    def attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        if self.mscale is None or self.mscale_all_dim is None:
            return self._enlarged(1.0)
        return self._enlarged(self.mscale) / self._enlarged(self.mscale_all_dim)

    def _enlarged(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        plain = inverse_frequencies(rotary_dim, base=base)
        low = self._pair_with(self.beta_fast, rotary_dim, base)
        high = self._pair_with(self.beta_slow, rotary_dim, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The last feature, not the last pair: so do the paper's code and every checkpoint.
        low, high = max(low, 0), min(high, rotary_dim - 1)
        high = max(high, low + 0.001)
        slowed = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
        return plain * (1.0 - slowed) + plain / self.factor * slowed

    def _pair_with(self, phases: float, rotary_dim: int, base: float) -> float:
        wavelengths = self.original_length / (phases * 2.0 * math.pi)
        return rotary_dim * math.log(wavelengths) / (2.0 * math.log(base))
