"""Adam and AdamW on rows (Kingma and Ba 2015, Loshchilov and Hutter 2019)."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from .. import kernels
from ..kernels.optim.coefficients import (
    FIRST_DECAY,
    NUM_ADAM,
    NUM_POINTS,
    POLYNOMIAL,
    ROOT_SCALE,
    SECOND_DECAY,
    WEIGHT_DECAY,
)
from ..kernels.optim.row_slice import RowSlice, StaleRows
from .missed_steps import MissedSteps
from .row_optimizer import RowOptimizer, with_options
from .rule import (
    Options,
    RowOptions,
    Rule,
    check_fractions,
    gradient_sign,
    refuse_coupled_decay,
)

# A first moment that has decayed this far moves weights by less than rounding does.
NEGLIGIBLE = 1e-24


class Adam(Rule):
    """Adam or AdamW; see :mod:`firstlayer.kernels.optim.adam` for the method.

    Args:
        decoupled: Use AdamW's decoupled weight decay instead of adding it to the gradient.
        eps_before_correction: Add ε to the root before its bias correction, as
            ``SparseAdam`` and TensorFlow do, not after it.
    """

    num_coefficients: ClassVar[int] = NUM_ADAM

    def __init__(self, *, decoupled: bool, eps_before_correction: bool = False) -> None:
        self.decoupled, self.eps_before_correction = decoupled, eps_before_correction
        self._points, self._basis = interpolation()

    def check(self, options: Options, *, exact: bool) -> None:
        super().check(options, exact=exact)
        check_fractions(options["betas"], "betas[0]", "betas[1]")
        if exact and not self.decoupled:
            refuse_coupled_decay(options, "Adam", "RowAdamW or ")

    def initial_state(self, options: Options) -> dict[str, float]:
        names = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
        return names | ({"max_exp_avg_sq": 0.0} if options["amsgrad"] else {})

    def frozen_options(self, options: Options) -> tuple[Any, ...]:
        return float(options["eps"]), bool(options["amsgrad"])

    def is_noop_without_gradient(self, options: Options) -> bool:
        return False

    def moves_without_gradient(self, options: Options) -> bool:
        return True

    def caught_up_coefficients(self, options: Options, step: int) -> Any:
        coefficients = np.zeros(NUM_ADAM)
        coefficients[[WEIGHT_DECAY, FIRST_DECAY, SECOND_DECAY]] = 1.0
        coefficients[ROOT_SCALE] = _root_scale(options, step)
        return coefficients

    def record_step(self, missed: MissedSteps, options: Options, step: int) -> None:
        beta1, beta2 = map(float, options["betas"])
        size, unbias = float(options["lr"]) / (1 - beta1**step), 1 / (1 - beta2**step)
        decay, coefficients = self._weight_decay(options), missed.coefficients
        factors = [decay, beta1, beta2, 1.0] + NUM_POINTS * [decay]
        coefficients *= np.array(factors)[:, None]
        # The first moments of rows last updated before these steps are negligible.
        first = np.searchsorted(coefficients[FIRST_DECAY], NEGLIGIBLE)
        coefficients = coefficients[:, first:]
        second_decay = 1.0 if options["amsgrad"] else coefficients[SECOND_DECAY]
        ratio = np.sqrt(second_decay * unbias) / coefficients[ROOT_SCALE]
        # β₂ = 0 has no polynomial; the kernel replays such steps one by one.
        with np.errstate(divide="ignore", invalid="ignore"):
            denominator = ratio * (1 - self._points) + self._points
            terms = size * coefficients[FIRST_DECAY] / denominator
            # The kernel's test of accuracy rejects NaN, but would accept infinity.
            terms[np.isinf(terms)] = np.nan
            coefficients[POLYNOMIAL:] += self._basis @ terms
        step_values = size, beta1, beta2, unbias
        missed.append(self.caught_up_coefficients(options, step), step_values)

    def catch_up(self, rows: StaleRows, missed: MissedSteps) -> None:
        kernels.adam_catch_up(
            rows,
            missed.all_coefficients,
            steps=missed.all_steps,
            count=missed.count,
            eps=missed.frozen_options[0],
        )

    def update(
        self, rows: RowSlice, gradient: np.ndarray, *, options: Options, step: int
    ) -> None:
        beta1, beta2 = map(float, options["betas"])
        unbias, eps = 1 / math.sqrt(1 - beta2**step), float(options["eps"])
        kernels.adam_update(
            rows,
            gradient,
            gradient_sign(options),
            0.0 if self.decoupled else float(options["weight_decay"]),
            self._weight_decay(options),
            1 - beta1,
            beta2,
            1 - beta2,
            float(options["lr"]) / (1 - beta1**step),
            unbias,
            eps * unbias if self.eps_before_correction else eps,
        )

    def _weight_decay(self, options: Options) -> float:
        """Return the factor that decoupled weight decay multiplies weights by."""
        decay = float(options["weight_decay"]) if self.decoupled else 0.0
        return 1 - float(options["lr"]) * decay


@dataclass
class AdamOptions(RowOptions):
    """Arguments of ``RowAdam``."""

    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False

    @staticmethod
    def rule(*, lazy: bool) -> Rule:
        return Adam(decoupled=False, eps_before_correction=lazy)


@dataclass(kw_only=True)
class AdamWOptions(AdamOptions):
    """Arguments of ``RowAdamW``."""

    weight_decay: float = 1e-2

    @staticmethod
    def rule(*, lazy: bool) -> Rule:
        return Adam(decoupled=True, eps_before_correction=lazy)


class RowAdam(RowOptimizer):
    """Adam on rows. Equals ``torch.optim.Adam`` on dense gradients.

    In ``mode="lazy"`` it equals ``torch.optim.SparseAdam``, which adds ``eps`` before the
    bias correction.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        betas: Decay rates of the first and second moment.
        eps: Term added to the denominator.
        weight_decay: Weight decay, added to the gradient; 0 in exact mode.
        amsgrad: Divide by the largest second moment so far.
        maximize: Maximize instead of minimize.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowAdam(layer, lr=0.5)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.5, 1.0]
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
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowAdamW(layer, lr=0.5, weight_decay=0.1)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.45, 0.95]
    """

    @with_options(AdamWOptions)
    def __init__(self, layer: Any, options: AdamWOptions) -> None:
        super().__init__(layer, options)


def interpolation() -> tuple[np.ndarray, np.ndarray]:
    """Return Chebyshev points on [0, 1] and the Lagrange polynomial of each.

    The points are a column and include both ends. Column ``k`` of the second array has the
    coefficients, in powers of ``2 u − 1``, of the polynomial that is 1 at point ``k`` and 0
    at the others.
    """
    z = -np.cos(np.pi * np.arange(NUM_POINTS) / (NUM_POINTS - 1))
    return (1 + z[:, None]) / 2, np.linalg.inv(np.vander(z, increasing=True))


def _root_scale(options: Options, step: int) -> float:
    """Return a typical factor of √v in the missed steps that matter most.

    It determines where the polynomial is most accurate, so an estimate is enough.
    """
    beta1, beta2 = map(float, options["betas"])
    second_decay = 1.0 if options["amsgrad"] else beta2
    # Each missed step's term is this much smaller than the one before.
    ratio = beta1 / math.sqrt(second_decay) if second_decay else 1.0
    ahead = min(1 / (1 - ratio), 1000.0) if ratio < 1 else 50.0
    return max(math.sqrt(second_decay**ahead / (1 - beta2 ** (step + ahead))), 1e-6)
