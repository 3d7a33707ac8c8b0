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
    State,
    check_fractions,
    gradient_sign,
    refuse_coupled_decay,
)

# A first moment that has decayed this far moves weights by less than rounding does.
NEGLIGIBLE = 1e-24


class Adam(Rule):
    """Adam; see :mod:`firstlayer.kernels.optim.adam` for how missed steps add up.

    In lazy mode ε is added to the root before its bias correction, not after it, as in
    ``SparseAdam`` and TensorFlow.
    """

    num_coefficients: ClassVar[int] = NUM_ADAM
    array_names: ClassVar[frozenset[str]] = frozenset((
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    ))
    depends_on_step: ClassVar[bool] = True
    #: Whether weight decay is decoupled, not added to the gradient.
    decoupled: ClassVar[bool] = False

    def __init__(self, *, lazy: bool = False) -> None:
        super().__init__(lazy=lazy)
        self._points, self._basis = interpolation()

    def check(self, options: Options) -> None:
        super().check(options)
        check_fractions(options["betas"], "betas[0]", "betas[1]")
        if not self.lazy and not self.decoupled:
            refuse_coupled_decay(options, "Adam", "RowAdamW or ")

    def initial_state(self, options: Options) -> dict[str, float]:
        names = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
        return names | ({"max_exp_avg_sq": 0.0} if options["amsgrad"] else {})

    def frozen_options(self, options: Options) -> tuple[Any, ...]:
        return float(options["eps"]), bool(options["amsgrad"])

    def adapt_state(self, state: State, options: Options) -> None:
        # The next step would take this maximum for every row.
        if options["amsgrad"]:
            largest, beta2 = state["max_exp_avg_sq"], float(options["betas"][1])
            np.maximum(largest, beta2 * state["exp_avg_sq"], out=largest)

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
            amsgrad=missed.frozen_options[1],
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
            eps * unbias if self.lazy else eps,
            amsgrad=bool(options["amsgrad"]),
        )

    def _weight_decay(self, options: Options) -> float:
        """Return the factor that decoupled weight decay multiplies weights by."""
        decay = float(options["weight_decay"]) if self.decoupled else 0.0
        return 1 - float(options["lr"]) * decay


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    decoupled: ClassVar[bool] = True


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
        weight_decay: Weight decay, added to the gradient; 0 in exact mode.
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
