"""Rules that extend a rotary model to sequences longer than it was trained on.

Each rule lowers rotary frequencies, so that positions beyond the original length give
angles the model has seen. The rules differ in which pairs they change, and in whether they
also multiply every cosine and sine by an ``attention_factor`` to keep attention sharp.

A rule is a frozen dataclass, validated on construction and compared by value. Two rules
depend on the current length, :class:`DynamicNTK` and :class:`LongRoPE`: ``at_length(n)``
returns the rule for that length. Cached keys are valid only for the length they were made
at.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import numpy as np
from jaxtyping import Float64

from .. import _check
from .._check import one_of, positive
from .frequencies import inverse_frequencies

Frequencies = Float64[np.ndarray, " pairs"]

_SMALLEST, _LARGEST = 1e-30, 1e30
#: The largest length that float64 represents, as all smaller ones.
_LONGEST = 2**53


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Base class of the rules. Leaves attention unscaled unless a rule overrides it."""

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        """Return the angle per position of each feature pair under this rule.

        Args:
            rotary_dim: Number of rotated features. Positive and even.
            base: Ratio of the slowest wavelength to the fastest, before the rule.
        """
        raise NotImplementedError

    @property
    def attention_factor(self) -> float:
        """Multiplier of every cosine and sine."""
        return 1.0

    def at_length(self, n: int) -> Self:
        """Return the rule for sequences of ``n`` positions; most rules ignore the length.

        Example:
            >>> from firstlayer.numpy import RotaryPositions
            >>> rule = DynamicNTK(factor=2.0, original_length=4096)
            >>> layer = RotaryPositions(64, scaling=rule.at_length(8192))
            >>> bool(layer.frequencies[-1] < RotaryPositions(64).frequencies[-1])
            True
        """
        positive("n", n)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as plain values, for :func:`scaling_from`.

        Example:
            >>> Linear(factor=4.0).to_dict()
            {'rule': 'Linear', 'factor': 4.0}
        """
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"rule": type(self).__name__, **plain}


@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Position interpolation: divides every frequency by ``factor`` (arXiv 2306.15595).

    Args:
        factor: Ratio of the new length to the original. At least 1.

    Example:
        >>> Linear(factor=4.0).inverse_frequencies(4, base=10_000.0).tolist()
        [0.25, 0.0025]
    """

    factor: float

    def __post_init__(self) -> None:
        _set_number(self, "factor", at_least=1.0)

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        return inverse_frequencies(rotary_dim, base=base) / self.factor


@dataclass(frozen=True, kw_only=True)
class NTK(Scaling):
    """Larger base: divides the lowest frequency by ``factor``, keeps the highest.

    Args:
        factor: Ratio of the new length to the original. At least 1.

    Example:
        >>> NTK(factor=4.0).inverse_frequencies(4, base=10_000.0).tolist()
        [1.0, 0.0025]
    """

    factor: float

    def __post_init__(self) -> None:
        _set_number(self, "factor", at_least=1.0)

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        return _with_larger_base(rotary_dim, base, self.factor)


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    """NTK with a factor that grows with the current length.

    Args:
        factor: Growth rate. At least 1.
        original_length: Length up to which nothing is scaled:
            ``max_position_embeddings`` in transformers.
        length: Current length. Unscaled if None or at most ``original_length``.

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
        _set_number(self, "factor", at_least=1.0)
        _set_integer(self, "original_length")
        _set_integer(self, "length", optional=True)

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        length = max(self.length or 0, self.original_length)
        return _with_larger_base(rotary_dim, base, self.growth(length))

    def growth(self, length: Any) -> Any:
        """Return the factor of NTK at a length of at least the original one.

        Args:
            length: A number, or an array of any library.
        """
        # factor * length / original_length - (factor - 1) would be 0 for large factors.
        more = (length - self.original_length) / self.original_length
        return 1.0 + self.factor * more

    def exponents(self, frequencies: Float64[np.ndarray, "*axes pairs"]) -> Frequencies:
        """Return the powers of :meth:`growth` that the frequencies are multiplied by."""
        return _exponents(2 * frequencies.shape[-1])

    def at_length(self, n: int) -> Self:
        return replace(self, length=positive("n", n))


@dataclass(frozen=True, kw_only=True)
class YaRN(Scaling):
    """Interpolates slow pairs and keeps fast ones (arXiv 2309.00071).

    A pair that completes more than ``beta_fast`` rotations within the original length is
    unchanged, one that completes fewer than ``beta_slow`` is divided by ``factor``, and in
    between the two are blended. Cosines and sines are multiplied by
    ``0.1 * log(factor) + 1``.

    Args:
        factor: Ratio of the new length to the original. At least 1.
        original_length: Length the model was trained on.
        beta_fast: Rotations above which a pair is unchanged.
        beta_slow: Rotations below which a pair is fully interpolated. At most
            ``beta_fast``.
        truncate: Round both ends of the blended range outwards to whole pairs. False for
            gpt-oss.
        mscale: DeepSeek's attention factor is ``0.1 * mscale * log(factor) + 1`` divided by
            the same expression with ``mscale_all_dim``. Give both or neither.
        mscale_all_dim: See ``mscale``. DeepSeek also multiplies its softmax scale by the
            square of this expression; the attention has to do that.
        attention: Explicit ``attention_factor``, used instead of the formulas.

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
        _set_number(self, "factor", at_least=1.0)
        _set_integer(self, "original_length")
        _set_number(self, "beta_slow", above=0.0)
        _set_number(self, "beta_fast", at_least=self.beta_slow, bound="beta_slow ")
        for name in ("mscale", "mscale_all_dim"):
            _set_number(self, name, at_least=0.0, optional=True)
        _set_number(self, "attention", above=0.0, optional=True)
        truncate = _check.boolean("truncate", self.truncate)
        object.__setattr__(self, "truncate", truncate)
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
            return self._attention_scale(1.0)
        return self._attention_scale(self.mscale) / self._attention_scale(
            self.mscale_all_dim
        )

    def _attention_scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        plain = inverse_frequencies(rotary_dim, base=base)
        low = self._pair_with(self.beta_fast, rotary_dim, base)
        high = self._pair_with(self.beta_slow, rotary_dim, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # Bounded by features, not pairs, like the paper's code and every checkpoint.
        low, high = max(low, 0), min(high, rotary_dim - 1)
        high = max(high, low + 0.001)
        interpolated = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
        return plain * (1.0 - interpolated) + plain / self.factor * interpolated

    def _pair_with(self, rotations: float, rotary_dim: int, base: float) -> float:
        """Return the (fractional) pair with that many rotations in the original length."""
        inverse_frequency = self.original_length / (rotations * 2.0 * math.pi)
        return rotary_dim * math.log(inverse_frequency) / (2.0 * math.log(base))


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Scaling):
    """Divides each frequency by a searched factor; beyond the original length, by another.

    Cosines and sines are multiplied by ``sqrt(1 + log(factor) / log(original_length))`` at
    any length (arXiv 2402.13753; Phi-3 and Phi-4-mini).

    Args:
        short_factors: Divisor of each pair up to and including the original length.
        long_factors: Divisor of each pair beyond it.
        original_length: Length the model was trained on. At least 2.
        factor: Ratio of the maximum length to the original: ``max_position_embeddings /
            original_max_position_embeddings`` in transformers. At least 1.
        attention: Explicit ``attention_factor``, used instead of the formula.
        length: Current length. None uses ``short_factors``.

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
            _set_divisors(self, name)
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"long_factors must have {len(self.short_factors)} entries as "
                f"short_factors, got {len(self.long_factors)}"
            )
        _set_integer(self, "original_length", at_least=2)
        _set_number(self, "factor", at_least=1.0)
        _set_number(self, "attention", above=0.0, optional=True)
        _set_integer(self, "length", optional=True)

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


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Divides low frequencies by ``factor`` and keeps high ones (Llama 3.1 to 3.3).

    A wavelength shorter than ``original_length / high_factor`` is unchanged, one longer
    than ``original_length / low_factor`` is interpolated, and in between the two are
    blended.

    Args:
        factor: Ratio of the new length to the original. At least 1.
        original_length: Length the model was trained on.
        low_factor: Rotations within the original length below which a pair is fully
            interpolated.
        high_factor: Rotations above which a pair is unchanged. At least ``low_factor``;
            with the same number nothing is blended, as in Llama 4 Scout.

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
        _set_number(self, "factor", at_least=1.0)
        _set_integer(self, "original_length")
        _set_number(self, "low_factor", above=0.0)
        _set_number(self, "high_factor", at_least=self.low_factor, bound="low_factor ")

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        plain = inverse_frequencies(rotary_dim, base=base)
        rotations = self.original_length * plain / (2.0 * math.pi)
        if self.high_factor == self.low_factor:
            return np.where(rotations < self.low_factor, plain / self.factor, plain)
        kept = (rotations - self.low_factor) / (self.high_factor - self.low_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return plain * kept + plain / self.factor * (1.0 - kept)


@dataclass(frozen=True, kw_only=True)
class Proportional(Scaling):
    """Rotates only the fastest pairs, at the frequencies of a whole head (Gemma 4).

    ``rotary_dim`` spreads all frequencies over fewer features; this rule keeps the highest
    frequencies and sets the others to 0. Leave ``rotary_dim`` at the whole head.

    Args:
        fraction: Fraction of the pairs that rotate, in [0, 1].
        factor: Divisor of their frequencies. At least 1.

    Example:
        >>> Proportional(fraction=0.5).inverse_frequencies(8, base=10_000.0).tolist()
        [1.0, 0.1, 0.0, 0.0]
    """

    fraction: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        _set_number(self, "fraction", at_least=0.0)
        if self.fraction > 1.0:
            raise ValueError(f"fraction must be at most 1, got {self.fraction}")
        _set_number(self, "factor", at_least=1.0)

    def inverse_frequencies(self, rotary_dim: int, *, base: float) -> Frequencies:
        plain = inverse_frequencies(rotary_dim, base=base)
        plain[int(self.fraction * rotary_dim // 2) :] = 0.0
        return plain / self.factor


RULES = (Linear, NTK, DynamicNTK, YaRN, LongRoPE, Llama3, Proportional)


def scaling_from(value: Scaling | dict[str, Any] | None) -> Scaling | None:
    """Return the rule of a dict from :meth:`Scaling.to_dict`; pass rules and None through.

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
    if "rule" not in value:
        raise ValueError(
            f"scaling must have the key 'rule', got {sorted(map(str, value))}: "
            "RotaryPositions.from_hf reads the rope_parameters of a config"
        )
    rule = rules[one_of("rule", str(value["rule"]), tuple(rules))]
    known = {field.name for field in fields(rule)}
    unknown = sorted(value.keys() - known - {"rule"})
    if unknown:
        raise ValueError(f"{rule.__name__} must have only {sorted(known)}, got {unknown}")
    return rule(**{name: value[name] for name in known & value.keys()})


def _with_larger_base(rotary_dim: int, base: float, ratio: float) -> Frequencies:
    plain = inverse_frequencies(rotary_dim, base=base)
    return plain * ratio ** _exponents(rotary_dim)


def _exponents(rotary_dim: int) -> Frequencies:
    # The new base is base * ratio ** (dim / (dim - 2)). This form is also valid at dim 2.
    return -np.arange(0, rotary_dim, 2) / max(rotary_dim - 2, 1)


def _set_number(
    rule: Scaling,
    name: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    bound: str = "",
    optional: bool = False,
) -> None:
    """Convert a field to float, or raise if it is not a finite number within its bound.

    Args:
        rule: Rule under construction.
        name: Name of the field.
        at_least: Inclusive lower bound, or
        above: exclusive lower bound.
        bound: Name of the bound in the error, if it is another field.
        optional: Accept None.
    """
    value = getattr(rule, name)
    if optional and value is None:
        return
    number = _check.number(name, value)
    if at_least is not None:
        valid, words = number >= at_least, f"at least {bound}{at_least:g}"
    else:
        valid, words = number > (above or 0.0), f"above {bound}{above or 0.0:g}"
    if not valid or not math.isfinite(number):
        raise ValueError(f"{name} must be finite and {words}, got {value}")
    _check_size(name, number)
    object.__setattr__(rule, name, number)


def _set_integer(
    rule: Scaling, name: str, *, at_least: int = 1, optional: bool = False
) -> None:
    """Convert a field to int, or raise if it is not an integer of at least ``at_least``."""
    value = getattr(rule, name)
    if optional and value is None:
        return
    if positive(name, value) < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    if value > _LONGEST:
        raise ValueError(f"{name} must be at most {_LONGEST}, got {value}")
    object.__setattr__(rule, name, int(value))


def _set_divisors(rule: Scaling, name: str) -> None:
    """Convert a field to a tuple of floats, or raise if one is not finite and above 0."""
    given, values = getattr(rule, name), []
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | np.ndarray):
        raise TypeError(f"{name} must be a list of numbers, got {type(given).__name__}")
    for i, item in enumerate(given):
        value = _check.number(f"{name}[{i}]", item)
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}[{i}] must be finite and above 0, got {value}")
        _check_size(f"{name}[{i}]", value)
        values.append(value)
    object.__setattr__(rule, name, tuple(values))


def _check_size(name: str, value: float) -> None:
    # Within this range, all cosines and sines are finite in float32.
    if value and not _SMALLEST <= value <= _LARGEST:
        raise ValueError(
            f"{name} must be between {_SMALLEST:g} and {_LARGEST:g}, got {value}"
        )
