"""RMSprop on rows (Hinton 2012), with an average of squares for each entry or each row.

Averages of gradients shrink in missed steps by a factor that is the same for every row, and
only momentum moves weights.
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


class RMSpropNumbers(NamedTuple):
    """Numbers of a step of RMSprop; ``share`` is 1 − α."""

    sign: Any
    coupled_decay: Any
    lr: Any
    alpha: Any
    share: Any
    eps: Any
    momentum: Any


class RMSpropStep(RMSpropNumbers, Step):
    """Step without momentum."""

    def accumulate(self, ops: Any, square: Any, total: Any) -> Any:
        return self.alpha * total + self.share * square

    def move(self, ops: Any, weight: Any, gradient: Any, total: Any) -> Any:
        return weight - self.lr * (gradient / (ops.sqrt(total) + self.eps))

    def update(self, ops: Any, weight: Any, gradient: Any, square: Any) -> Any:
        # Not share * gradient², in which gradient² overflows at smaller gradients.
        square = self.alpha * square + self.share * gradient * gradient
        return self.move(ops, weight, gradient, square), square


class MomentumStep(RMSpropNumbers, Step):
    """Step with momentum."""

    def update(self, ops: Any, weight: Any, gradient: Any, square: Any, buffer: Any) -> Any:
        square = self.alpha * square + self.share * gradient * gradient
        buffer = gradient / (ops.sqrt(square) + self.eps) + self.momentum * buffer
        return weight - self.lr * buffer, square, buffer


class CenteredStep(RMSpropNumbers, Step):
    """Step that divides by the standard deviation of gradients."""

    def update(self, ops: Any, weight: Any, gradient: Any, square: Any, mean: Any) -> Any:
        square = self.alpha * square + self.share * gradient * gradient
        mean = mean + self.share * (gradient - mean)
        deviation = ops.sqrt(ops.multiply_add(-mean, mean, square))
        return weight - self.lr * (gradient / (deviation + self.eps)), square, mean


class CenteredMomentumStep(RMSpropNumbers, Step):
    """Step that divides by the standard deviation of gradients, with momentum."""

    def update(
        self, ops: Any, weight: Any, gradient: Any, square: Any, buffer: Any, mean: Any
    ) -> Any:
        square = self.alpha * square + self.share * gradient * gradient
        mean = mean + self.share * (gradient - mean)
        deviation = ops.sqrt(ops.multiply_add(-mean, mean, square))
        buffer = gradient / (deviation + self.eps) + self.momentum * buffer
        return weight - self.lr * buffer, square, buffer, mean


class AverageNumbers(NamedTuple):
    """Coefficients of missed steps; ``average_factor`` is a product of α."""

    weight_factor: Any
    average_factor: Any
    buffer_factor: Any
    weight_from_buffer: Any


class AverageCoefficients(AverageNumbers, MissedCoefficients):
    """Missed steps without momentum, which move no weight."""

    def advance(self, ops: Any, step: RMSpropNumbers) -> Any:
        return type(self)(
            weight_factor=self.weight_factor,
            average_factor=step.alpha * self.average_factor,
            buffer_factor=step.momentum * self.buffer_factor,
            weight_from_buffer=self.weight_from_buffer
            - step.lr * step.momentum * self.buffer_factor,
        )

    def catch_up(self, ops: Any, weight: Any, square: Any) -> Any:
        return self.weight_factor * weight, self.average_factor * square


class MomentumCoefficients(AverageCoefficients):
    """Missed steps with momentum."""

    def catch_up(self, ops: Any, weight: Any, *state: Any) -> Any:
        square, buffer = state
        return (
            self.weight_factor * weight + self.weight_from_buffer * buffer,
            self.average_factor * square,
            self.buffer_factor * buffer,
        )


class CenteredCoefficients(AverageCoefficients):
    """Missed steps of the centered form."""

    def catch_up(self, ops: Any, weight: Any, *state: Any) -> Any:
        square, mean = state
        return (
            self.weight_factor * weight,
            self.average_factor * square,
            self.average_factor * mean,
        )


class CenteredMomentumCoefficients(AverageCoefficients):
    """Missed steps of the centered form with momentum."""

    def catch_up(self, ops: Any, weight: Any, *state: Any) -> Any:
        square, buffer, mean = state
        return (
            self.weight_factor * weight + self.weight_from_buffer * buffer,
            self.average_factor * square,
            self.buffer_factor * buffer,
            self.average_factor * mean,
        )


#: Step and coefficients by whether the rule is centered and has momentum.
VARIANTS = {
    (False, False): (RMSpropStep, AverageCoefficients),
    (False, True): (MomentumStep, MomentumCoefficients),
    (True, False): (CenteredStep, CenteredCoefficients),
    (True, True): (CenteredMomentumStep, CenteredMomentumCoefficients),
}


class RMSprop(Rule):
    """RMSprop, centered or not, with or without momentum."""

    array_names: ClassVar[frozenset[str]] = frozenset((
        "square_avg",
        "momentum_buffer",
        "grad_avg",
    ))

    def check(self, options: Options) -> None:
        super().check(options)
        check_fractions([options["alpha"]], "alpha")
        self.refuse_coupled_decay(options, "RMSprop")

    def initial_state(self, options: Options) -> dict[str, float]:
        names = {"square_avg": 0.0}
        names |= {"momentum_buffer": 0.0} if options["momentum"] else {}
        return names | ({"grad_avg": 0.0} if options["centered"] else {})

    def is_noop_without_gradient(self, options: Options) -> bool:
        return False

    def moves_without_gradient(self, options: Options) -> bool:
        return bool(options["momentum"])

    def step_values(self, ops: Any, options: Options, step: Any) -> Any:
        alpha = float(options["alpha"])
        return self._variant(options)[0](
            sign=gradient_sign(options),
            coupled_decay=float(options["weight_decay"]),
            lr=options["lr"],
            alpha=alpha,
            share=1 - alpha,
            eps=float(options["eps"]),
            momentum=float(options.get("momentum", 0.0)),
        )

    def coefficients_class(self, options: Options) -> type[MissedCoefficients]:
        return self._variant(options)[1]

    def caught_up_coefficients(self, ops: Any, options: Options, step: Any) -> Any:
        return self._variant(options)[1](1.0, 1.0, 1.0, 0.0)

    def _variant(self, options: Options) -> Any:
        return VARIANTS[bool(options["centered"]), bool(options["momentum"])]


class WiseRMSprop(RMSprop):
    """RMSprop with one number per row: the average of its gradients' mean squares."""

    array_names: ClassVar[frozenset[str]] = frozenset(("square_avg",))
    is_row_wise: ClassVar[bool] = True

    def check(self, options: Options) -> None:
        super().check(options)
        # torch's optimizer of the other parameters has these options.
        for name in ("momentum", "centered"):
            if options.get(name):
                raise ValueError(
                    f"{name} must be {type(options[name])()} for RowWiseRMSprop, which has "
                    f"one number per row, got {options[name]}"
                )

    def initial_state(self, options: Options) -> dict[str, float]:
        return {"square_avg": 0.0}

    def moves_without_gradient(self, options: Options) -> bool:
        return False

    def _variant(self, options: Options) -> Any:
        return VARIANTS[False, False]


@dataclass
class RMSpropOptions(RowOptions):
    """Arguments of ``RowRMSprop``."""

    rule_class: ClassVar[type[Rule]] = RMSprop
    lr: float = 1e-2
    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False


@dataclass
class WiseRMSpropOptions(RowOptions):
    """Arguments of ``RowWiseRMSprop``."""

    rule_class: ClassVar[type[Rule]] = WiseRMSprop
    lr: float = 1e-2
    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False


class RowRMSprop(RowOptimizer):
    """RMSprop on rows. Equals ``torch.optim.RMSprop`` on dense gradients.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        alpha: Decay rate of the averages.
        eps: Term added to the denominator.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.
        momentum: Momentum factor.
        centered: Divide by the standard deviation of gradients.
        maximize: Maximize instead of minimize.
        mode, stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowRMSprop(layer, lr=0.05)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
    """

    @with_options(RMSpropOptions)
    def __init__(self, layer: Any, options: RMSpropOptions) -> None:
        super().__init__(layer, options)


class RowWiseRMSprop(RowOptimizer):
    """RMSprop with one number per row: the average of its gradients' mean squares.

    The state of a table of a million rows takes 4 MB. Parameters that are not tables get
    RMSprop with an average for each entry.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        alpha: Decay rate of the averages.
        eps: Term added to the denominator.
        weight_decay: Weight decay, added to the gradient; must be 0 in exact mode.
        maximize: Maximize instead of minimize.
        mode, stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowWiseRMSprop(layer, lr=0.05)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
    """

    @with_options(WiseRMSpropOptions)
    def __init__(self, layer: Any, options: WiseRMSpropOptions) -> None:
        super().__init__(layer, options)
