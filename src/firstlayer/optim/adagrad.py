"""Adagrad on rows (Duchi et al. 2011), with a sum of squares for each entry or each row."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

from .._check import not_negative_number
from .row_optimizer import RowOptimizer, with_options
from .rule import (
    MissedCoefficients,
    Options,
    RowOptions,
    Rule,
    Step,
    gradient_sign,
)


class AdagradNumbers(NamedTuple):
    """Numbers of a step of Adagrad; ``lr`` with its decay."""

    sign: Any
    coupled_decay: Any
    lr: Any
    eps: Any


class AdagradStep(AdagradNumbers, Step):
    """Step of Adagrad."""

    def accumulate(self, ops: Any, square: Any, total: Any) -> Any:
        return total + square

    def move(self, ops: Any, weight: Any, gradient: Any, total: Any) -> Any:
        return weight - self.lr * gradient / (ops.sqrt(total) + self.eps)

    def update(self, ops: Any, weight: Any, gradient: Any, total: Any) -> Any:
        total = self.accumulate(ops, gradient * gradient, total)
        return self.move(ops, weight, gradient, total), total


class AdagradMissedNumbers(NamedTuple):
    """Coefficient of missed steps of Adagrad, which is 1."""

    weight_factor: Any


class AdagradCoefficients(AdagradMissedNumbers, MissedCoefficients):
    """Missed steps of Adagrad, which change nothing."""

    def advance(self, ops: Any, step: AdagradNumbers) -> Any:
        return self

    def catch_up(self, ops: Any, weight: Any, total: Any) -> Any:
        return self.weight_factor * weight, total


class Adagrad(Rule):
    """Adagrad. A step without a gradient is a no-op."""

    array_names: ClassVar[frozenset[str]] = frozenset(("sum",))
    depends_on_step: ClassVar[bool] = True

    def check(self, options: Options) -> None:
        super().check(options)
        name = "initial_accumulator_value"
        not_negative_number(name, options[name])
        self.refuse_coupled_decay(options, "Adagrad")

    def initial_state(self, options: Options) -> dict[str, float]:
        return {"sum": float(options["initial_accumulator_value"])}

    def step_values(self, ops: Any, options: Options, step: Any) -> AdagradStep:
        return AdagradStep(
            sign=gradient_sign(options),
            coupled_decay=float(options["weight_decay"]),
            lr=options["lr"] / (1 + (step - 1) * float(options["lr_decay"])),
            eps=float(options["eps"]),
        )

    def coefficients_class(self, options: Options) -> type[MissedCoefficients]:
        return AdagradCoefficients

    def caught_up_coefficients(self, ops: Any, options: Options, step: Any) -> Any:
        return AdagradCoefficients(1.0)


class WiseAdagrad(Adagrad):
    """Adagrad with one sum per row, of the mean squares of its gradients."""

    is_row_wise: ClassVar[bool] = True


@dataclass
class AdagradOptions(RowOptions):
    """Arguments of ``RowAdagrad``."""

    rule_class: ClassVar[type[Rule]] = Adagrad
    lr: float = 1e-2
    _: KW_ONLY
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False


@dataclass
class WiseAdagradOptions(AdagradOptions):
    """Arguments of ``RowWiseAdagrad``."""

    rule_class: ClassVar[type[Rule]] = WiseAdagrad


class RowAdagrad(RowOptimizer):
    """Adagrad on rows. Equals ``torch.optim.Adagrad`` on dense gradients.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        lr_decay: Decay of the learning rate.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.
        initial_accumulator_value: Initial value of the sums of squares.
        eps: Term added to the denominator.
        maximize: Maximize instead of minimize.
        mode, stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowAdagrad(layer, lr=0.5)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
    """

    @with_options(AdagradOptions)
    def __init__(self, layer: Any, options: AdagradOptions) -> None:
        super().__init__(layer, options)


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one number per row: the sum of the mean squares of its gradients.

    The state of a table of a million rows takes 4 MB. Parameters that are not tables get
    Adagrad with a sum for each entry.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        lr_decay: Decay of the learning rate.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.
        initial_accumulator_value: Initial value of the sums.
        eps: Term added to the denominator.
        maximize: Maximize instead of minimize.
        mode, stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowWiseAdagrad(layer, lr=0.5)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
    """

    @with_options(WiseAdagradOptions)
    def __init__(self, layer: Any, options: WiseAdagradOptions) -> None:
        super().__init__(layer, options)
