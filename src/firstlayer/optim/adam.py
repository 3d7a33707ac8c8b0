"""Adam and AdamW on rows (Kingma and Ba 2015, Loshchilov and Hutter 2019).

After missed steps, a weight is

    w · Π decayᵢ  −  m · Σᵢ aᵢ / (bᵢ √v + ε)

with ``aᵢ`` and ``bᵢ`` the same for every column. The sum has no closed form, but as a
function of ``u = ε / (ε + scale · √v)`` it is ``u / ε`` times a function that is smooth on
[0, 1]. A polynomial of degree 11 through Chebyshev points approximates that function to
1e-8, usually to rounding. Polynomials add up, so the coefficients of each step contain one,
and catching up a row is one pass over it. Where the polynomial's highest terms show that it
is not accurate enough (β₁² > β₂, or the first steps with a large β₁), the missed steps are
replayed one by one.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .row_optimizer import RowOptimizer, with_options
from .rule import (
    TINY,
    MissedCoefficients,
    Options,
    RowOptions,
    Rule,
    Step,
    check_fractions,
    gradient_sign,
)

# A first moment that has decayed this far moves weights by less than rounding does.
NEGLIGIBLE = 1e-24
# Largest accurate size of a polynomial's highest terms, relative to its constant term.
ACCURATE = 1e-5
# Number of points through which the polynomial is interpolated.
NUM_POINTS = 12
# A number without a dtype would make float32 kernels compute in float64.
ONE = np.float32(1)


def interpolation() -> tuple[np.ndarray, np.ndarray]:
    """Return Chebyshev points on [0, 1] and the Lagrange polynomial of each.

    The points are a column and include both ends. Column ``k`` of the second array has the
    coefficients, in powers of ``2 u − 1``, of the polynomial that is 1 at point ``k`` and 0
    at the others.
    """
    z = -np.cos(np.pi * np.arange(NUM_POINTS) / (NUM_POINTS - 1))
    return (1 + z[:, None]) / 2, np.linalg.inv(np.vander(z, increasing=True))


POINTS, BASIS = interpolation()
FROM_END = 1 - POINTS


class AdamNumbers(NamedTuple):
    """Numbers of step t of Adam.

    ``weight_factor`` is that of decoupled weight decay, ``share`` is 1 − β, ``size`` is
    lr / (1 − β₁ᵗ) and ``unbias`` is 1 / √(1 − β₂ᵗ).
    """

    sign: Any
    coupled_decay: Any
    weight_factor: Any
    beta1: Any
    share1: Any
    beta2: Any
    share2: Any
    size: Any
    unbias: Any
    eps: Any


class AdamStep(AdamNumbers, Step):
    """Step of Adam."""

    def update(self, ops: Any, weight: Any, gradient: Any, mean: Any, square: Any) -> Any:
        mean = ops.lerp(mean, gradient, self.share1)
        square = ops.multiply(square, self.beta2)
        square = ops.addcmul(square, gradient, gradient, self.share2)
        # Augmented assignments change new arrays in place, which is faster.
        root = ops.sqrt(square)
        root *= self.unbias
        root += self.eps
        weight = ops.multiply(weight, self.weight_factor)
        weight = ops.addcdiv(weight, mean, root, -self.size)
        return weight, mean, square


class AmsgradStep(AdamNumbers, Step):
    """Step that divides by the largest second moment so far."""

    def update(
        self, ops: Any, weight: Any, gradient: Any, mean: Any, square: Any, largest: Any
    ) -> Any:
        mean = ops.lerp(mean, gradient, self.share1)
        square = ops.multiply(square, self.beta2)
        square = ops.addcmul(square, gradient, gradient, self.share2)
        largest = ops.maximum(largest, square)
        # Augmented assignments change new arrays in place, which is faster.
        root = ops.sqrt(largest)
        root *= self.unbias
        root += self.eps
        weight = ops.multiply(weight, self.weight_factor)
        weight = ops.addcdiv(weight, mean, root, -self.size)
        return weight, mean, square, largest


class AdamMissedNumbers(NamedTuple):
    """Coefficients of missed steps of Adam.

    ``mean_factor`` is a product of β₁, ``square_factor`` of β₂, and ``root_scale`` the
    scale of √v in ``u``. ``p0`` to ``p11`` are the polynomial in ``2 u − 1``.
    """

    weight_factor: Any
    mean_factor: Any
    square_factor: Any
    root_scale: Any
    eps: Any
    p0: Any
    p1: Any
    p2: Any
    p3: Any
    p4: Any
    p5: Any
    p6: Any
    p7: Any
    p8: Any
    p9: Any
    p10: Any
    p11: Any


# Row of the first moment's factor in the columns of coefficients.
MEAN_FACTOR = AdamMissedNumbers._fields.index("mean_factor")


class AdamCoefficients(AdamMissedNumbers, MissedCoefficients):
    """Missed steps of Adam."""

    replays: ClassVar[bool] = True
    constants: ClassVar[tuple[str, ...]] = ("root_scale", "eps")

    def advance(self, ops: Any, step: AdamNumbers) -> Any:
        factors = self.factors(step)
        decayed = type(self)(*(a * b for a, b in zip(factors, self, strict=True)))
        polynomial = ops.stack(decayed[5:]) + decayed.moved(ops, step)
        return type(self)(*decayed[:5], *polynomial)

    @staticmethod
    def factors(step: AdamNumbers) -> tuple[Any, ...]:
        """Return the factor of each coefficient in one more step."""
        decay = step.weight_factor
        return decay, step.beta1, step.beta2, 1.0, 1.0, *NUM_POINTS * (decay,)

    def moved(self, ops: Any, step: AdamNumbers) -> Any:
        """Return the polynomial of the last missed step."""
        ratio = ops.sqrt(self.kept_square()) * step.unbias / self.root_scale
        # β₂ = 0 has no polynomial: it gets NaN, which is not accurate.
        ratio = ops.where(ratio == 0.0, np.nan, ratio)
        is_negligible = self.mean_factor < NEGLIGIBLE
        ratio = ops.where(is_negligible, 1.0, ratio)
        size = ops.where(is_negligible, 0.0, step.size * self.mean_factor)
        return ops.matmul(BASIS, size / (ratio * FROM_END + POINTS))

    def kept_square(self) -> Any:
        """Return the factor of the second moment that weights are divided by."""
        return self.square_factor

    @classmethod
    def advance_columns(cls, columns: np.ndarray, step: Any) -> None:
        columns *= np.array(cls.factors(step))[:, None]
        # The first moments of rows last updated before these steps are negligible.
        first = columns[MEAN_FACTOR].searchsorted(NEGLIGIBLE)
        active = columns[:, first:]
        active[5:] += cls(*active).moved(np, step)

    def is_accurate(self, ops: Any) -> Any:
        # False for NaN too.
        error = ops.absolute(self.p11) / 1024 + ops.absolute(self.p10) / 512
        return error <= ACCURATE * ops.absolute(self.p0)

    def move_missed(self, ops: Any, weight: Any, mean: Any, square: Any) -> Any:
        """Return the weight after the missed steps."""
        total = ops.multiply_add(ops.sqrt(square), self.root_scale, self.eps)
        # 2 u − 1. Not (ε − root) / total: the square of a large gradient is infinite.
        z = (self.eps + self.eps) / total
        z -= ONE
        y = self.p11 * z
        y += self.p10
        y = ops.multiply_add(y, z, self.p9)
        y = ops.multiply_add(y, z, self.p8)
        y = ops.multiply_add(y, z, self.p7)
        y = ops.multiply_add(y, z, self.p6)
        y = ops.multiply_add(y, z, self.p5)
        y = ops.multiply_add(y, z, self.p4)
        y = ops.multiply_add(y, z, self.p3)
        y = ops.multiply_add(y, z, self.p2)
        y = ops.multiply_add(y, z, self.p1)
        y = ops.multiply_add(y, z, self.p0)
        y *= mean
        y /= total
        weight = ops.multiply(weight, self.weight_factor)
        weight -= y
        return weight

    def catch_up(self, ops: Any, weight: Any, *state: Any) -> Any:
        mean, square = state
        weight = self.move_missed(ops, weight, mean, square)
        mean = ops.multiply(mean, self.mean_factor)
        return weight, mean, ops.multiply(square, self.square_factor)


class AmsgradCoefficients(AdamCoefficients):
    """Missed steps that divide by the largest second moment, which does not change."""

    def kept_square(self) -> Any:
        return 0.0 * self.square_factor + 1.0

    def catch_up(self, ops: Any, weight: Any, *state: Any) -> Any:
        mean, square, largest = state
        weight = self.move_missed(ops, weight, mean, largest)
        mean = ops.multiply(mean, self.mean_factor)
        return weight, mean, ops.multiply(square, self.square_factor), largest


class Adam(Rule):
    """Adam.

    In lazy mode ε is added to the root before its bias correction, not after it, as in
    ``SparseAdam`` and TensorFlow.
    """

    array_names: ClassVar[frozenset[str]] = frozenset((
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    ))
    depends_on_step: ClassVar[bool] = True
    #: Whether weight decay is decoupled, not added to the gradient.
    decoupled: ClassVar[bool] = False

    def check(self, options: Options) -> None:
        super().check(options)
        check_fractions(options["betas"], "betas[0]", "betas[1]")
        if not self.decoupled:
            self.refuse_coupled_decay(options, "Adam", "RowAdamW")

    def initial_state(self, options: Options) -> dict[str, float]:
        names = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
        return names | ({"max_exp_avg_sq": 0.0} if options["amsgrad"] else {})

    def frozen_options(self, options: Options) -> tuple[Any, ...]:
        return *super().frozen_options(options), float(options["eps"])

    def adapted_state(
        self, ops: Any, options: Options, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        if not options["amsgrad"]:
            return {}
        # The next step would take this maximum for every row.
        least = float(options["betas"][1]) * state["exp_avg_sq"]
        return {"max_exp_avg_sq": ops.maximum(state["max_exp_avg_sq"], least)}

    def is_noop_without_gradient(self, options: Options) -> bool:
        return False

    def moves_without_gradient(self, options: Options) -> bool:
        return True

    def step_values(self, ops: Any, options: Options, step: Any) -> Any:
        lr, (beta1, beta2) = options["lr"], map(float, options["betas"])
        decay, eps = float(options["weight_decay"]), float(options["eps"])
        unbias = 1 / ops.sqrt(1 - beta2**step)
        return (AmsgradStep if options["amsgrad"] else AdamStep)(
            sign=gradient_sign(options),
            coupled_decay=0.0 if self.decoupled else decay,
            weight_factor=1 - lr * (decay if self.decoupled else 0.0),
            beta1=beta1,
            share1=1 - beta1,
            beta2=beta2,
            share2=1 - beta2,
            size=lr / (1 - beta1**step),
            unbias=unbias,
            eps=eps * unbias if self.lazy else eps,
        )

    def coefficients_class(self, options: Options) -> type[MissedCoefficients]:
        return AmsgradCoefficients if options["amsgrad"] else AdamCoefficients

    def caught_up_coefficients(self, ops: Any, options: Options, step: Any) -> Any:
        eps = float(options["eps"])
        return (AmsgradCoefficients if options["amsgrad"] else AdamCoefficients)(
            1.0,
            1.0,
            1.0,
            _root_scale(ops, options, step),
            # Smaller coefficients count as zero.
            max(eps, TINY) if eps else 0.0,
            *NUM_POINTS * (0.0,),
        )


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    decoupled: ClassVar[bool] = True


def _root_scale(ops: Any, options: Options, step: Any) -> Any:
    """Return a typical factor of √v in the missed steps that matter most.

    It determines where the polynomial is most accurate, so an estimate is enough.
    """
    beta1, beta2 = map(float, options["betas"])
    second_decay = 1.0 if options["amsgrad"] else beta2
    # Each missed step's term is this much smaller than the one before.
    ratio = beta1 / math.sqrt(second_decay) if second_decay else 1.0
    ahead = min(1 / (1 - ratio), 1000.0) if ratio < 1 else 50.0
    return ops.maximum(ops.sqrt(second_decay**ahead / (1 - beta2 ** (step + ahead))), 1e-6)


@dataclass
class AdamOptions(RowOptions):
    """Arguments of ``RowAdam``."""

    rule_class: ClassVar[type[Rule]] = Adam
    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False


@dataclass(kw_only=True)
class AdamWOptions(AdamOptions):
    """Arguments of ``RowAdamW``."""

    rule_class: ClassVar[type[Rule]] = AdamW
    weight_decay: float = 1e-2


class RowAdam(RowOptimizer):
    """Adam on rows. Equals ``torch.optim.Adam`` on dense gradients.

    In ``mode="lazy"`` it equals ``torch.optim.SparseAdam``, which adds ``eps`` before the
    bias correction.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        betas: Decay rates of the first and second moment.
        eps: Term added to the denominator.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.
        amsgrad: Divide by the largest second moment so far.
        maximize: Maximize instead of minimize.
        mode, stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowAdam(layer, lr=0.5)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
    """

    @with_options(AdamOptions)
    def __init__(self, layer: Any, options: AdamOptions) -> None:
        super().__init__(layer, options)


class RowAdamW(RowOptimizer):
    """AdamW on rows. Equals ``torch.optim.AdamW`` on dense gradients.

    In ``mode="lazy"`` without decay it equals ``torch.optim.SparseAdam``, which adds
    ``eps`` before the bias correction.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        betas: Decay rates of the first and second moment.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the largest second moment so far.
        maximize: Maximize instead of minimize.
        mode, stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowAdamW(layer, lr=0.5, weight_decay=0.1)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
    """

    @with_options(AdamWOptions)
    def __init__(self, layer: Any, options: AdamWOptions) -> None:
        super().__init__(layer, options)
