"""Lion on rows (Chen et al. 2023, https://arxiv.org/abs/2302.06675).

Without a gradient the average of gradients only shrinks. Its sign, which determines the
update, does not change, so many missed steps have the effect of one.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

from .row_optimizer import RowOptimizer, with_options
from .rule import (
    MissedCoefficients,
    Options,
    RowOptions,
    Rule,
    Step,
    check_fractions,
    gradient_sign,
)

# Lower bound of a shrinking average: at zero it would lose its sign.
SMALLEST = 1e-29


class LionNumbers(NamedTuple):
    """Numbers of a step of Lion: β and 1 − β of the update and of the stored average."""

    sign: Any
    coupled_decay: Any
    weight_factor: Any
    lr: Any
    beta1: Any
    share1: Any
    beta2: Any
    share2: Any


class LionStep(LionNumbers, Step):
    """Step of Lion."""

    def total_gradient(self, ops: Any, weight: Any, gradient: Any) -> Any:
        return self.sign * gradient

    def update(self, ops: Any, weight: Any, gradient: Any, mean: Any) -> Any:
        direction = ops.sign(self.beta1 * mean + self.share1 * gradient)
        weight = self.weight_factor * weight - self.lr * direction
        return weight, self.beta2 * mean + self.share2 * gradient


class LionMissedNumbers(NamedTuple):
    """Coefficients of missed steps of Lion.

    ``sign_step`` is the sum of the learning rates, each times the weight decay of the steps
    after it.
    """

    weight_factor: Any
    sign_step: Any
    mean_factor: Any
    smallest: Any


class LionCoefficients(LionMissedNumbers, MissedCoefficients):
    """Missed steps of Lion."""

    constants: ClassVar[tuple[str, ...]] = ("smallest",)

    def advance(self, ops: Any, step: LionNumbers) -> Any:
        moved = ops.where(step.beta1 > 0, step.lr, 0.0)
        return LionCoefficients(
            weight_factor=step.weight_factor * self.weight_factor,
            sign_step=step.weight_factor * self.sign_step + moved,
            mean_factor=step.beta2 * self.mean_factor,
            smallest=self.smallest,
        )

    def catch_up(self, ops: Any, weight: Any, mean: Any) -> Any:
        direction = ops.sign(mean)
        size = ops.maximum(ops.absolute(mean) * self.mean_factor, self.smallest)
        return (
            self.weight_factor * weight - self.sign_step * direction,
            direction * size,
        )


class Lion(Rule):
    """Lion: updates weights by the sign of an average of gradients."""

    array_names: ClassVar[frozenset[str]] = frozenset(("exp_avg",))

    def check(self, options: Options) -> None:
        super().check(options)
        check_fractions(options["betas"], "betas[0]", "betas[1]")
        if not self.lazy and not options["betas"][1]:
            raise ValueError(
                "betas[1] must be above 0 in exact updates by Lion, whose average would "
                "lose its sign in the first step a row misses, got 0; use "
                f"{self.lazy_option}"
            )

    def initial_state(self, options: Options) -> dict[str, float]:
        return {"exp_avg": 0.0}

    def is_noop_without_gradient(self, options: Options) -> bool:
        return False

    def moves_without_gradient(self, options: Options) -> bool:
        return True

    def step_values(self, ops: Any, options: Options, step: Any) -> LionStep:
        lr, (beta1, beta2) = options["lr"], map(float, options["betas"])
        return LionStep(
            sign=gradient_sign(options),
            coupled_decay=0.0,
            weight_factor=1 - lr * float(options["weight_decay"]),
            lr=lr,
            beta1=beta1,
            share1=1 - beta1,
            beta2=beta2,
            share2=1 - beta2,
        )

    def coefficients_class(self, options: Options) -> type[MissedCoefficients]:
        return LionCoefficients

    def caught_up_coefficients(self, ops: Any, options: Options, step: Any) -> Any:
        return LionCoefficients(1.0, 0.0, 1.0, SMALLEST)


@dataclass
class LionOptions(RowOptions):
    """Arguments of ``RowLion``."""

    rule_class: ClassVar[type[Rule]] = Lion
    lr: float = 1e-4
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False


class RowLion(RowOptimizer):
    """Lion on rows: updates weights by the sign of an average of gradients.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        betas: Decay rates of the average: in the update, and in the stored state.
        weight_decay: Decoupled weight decay.
        maximize: Maximize instead of minimize.
        mode, stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowLion(layer, lr=0.5)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
    """

    @with_options(LionOptions)
    def __init__(self, layer: Any, options: LionOptions) -> None:
        super().__init__(layer, options)
