"""SGD on rows, with momentum and weight decay.

Without a gradient, a step replaces a row's momentum buffer and weight by linear
combinations of the two, the same for every column, so missed steps are applied exactly.
Lipton and Elkan 2015 (https://arxiv.org/abs/1505.06449) do so for decay.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

from .._check import number
from .row_optimizer import RowOptimizer, with_options
from .rule import MissedCoefficients, Options, RowOptions, Rule, Step, gradient_sign


class SGDNumbers(NamedTuple):
    """Numbers of a step of SGD.

    The buffer becomes ``momentum · buffer + gain · gradient``, and the weight moves by
    ``lr`` times ``direct · gradient + through · buffer``.
    """

    sign: Any
    coupled_decay: Any
    lr: Any
    momentum: Any
    gain: Any
    direct: Any
    through: Any


class SGDStep(SGDNumbers, Step):
    """Step without momentum."""

    def update(self, ops: Any, weight: Any, gradient: Any) -> Any:
        return (weight - self.lr * gradient,)


class MomentumStep(SGDNumbers, Step):
    """Step with momentum."""

    def update(self, ops: Any, weight: Any, gradient: Any, buffer: Any) -> Any:
        buffer = self.momentum * buffer + self.gain * gradient
        change = self.through * buffer
        # Without Nesterov momentum the gradient has no effect, even if it is infinite.
        change = ops.where(self.direct == 0, change, self.direct * gradient + change)
        return weight - self.lr * change, buffer


class DecayNumbers(NamedTuple):
    """Coefficients of missed steps without momentum."""

    weight_factor: Any


class DecayCoefficients(DecayNumbers, MissedCoefficients):
    """Missed steps without momentum: weight decay."""

    def advance(self, ops: Any, step: SGDNumbers) -> Any:
        return DecayCoefficients(self.weight_factor * (1 - step.lr * step.coupled_decay))

    def catch_up(self, ops: Any, weight: Any) -> Any:
        return (self.weight_factor * weight,)


class MomentumNumbers(NamedTuple):
    """Coefficients of missed steps with momentum: a 2 × 2 matrix."""

    weight_factor: Any
    weight_from_buffer: Any
    buffer_factor: Any
    buffer_from_weight: Any


class MomentumCoefficients(MomentumNumbers, MissedCoefficients):
    """Missed steps with momentum, which weight decay enters."""

    def advance(self, ops: Any, step: SGDNumbers) -> Any:
        decay, gain = step.coupled_decay, step.gain
        weight_factor = 1 - step.lr * (step.direct + step.through * gain) * decay
        weight_from_buffer = -step.lr * step.through * step.momentum
        ww, wb, bb, bw = self
        return MomentumCoefficients(
            weight_factor=weight_from_buffer * bw + weight_factor * ww,
            weight_from_buffer=weight_from_buffer * bb + weight_factor * wb,
            buffer_factor=step.momentum * bb + gain * decay * wb,
            buffer_from_weight=step.momentum * bw + gain * decay * ww,
        )

    def catch_up(self, ops: Any, weight: Any, buffer: Any) -> Any:
        shrunk = self.buffer_factor * buffer
        # Without decay the weight has no effect, even if it is infinite.
        decayed = shrunk + self.buffer_from_weight * weight
        return (
            self.weight_factor * weight + self.weight_from_buffer * buffer,
            ops.where(self.buffer_from_weight == 0, shrunk, decayed),
        )

    def keeps_zero_state(self) -> Any:
        return self.buffer_from_weight == 0


class SGD(Rule):
    """SGD with momentum, Nesterov or not, and weight decay.

    The decay is added to the gradient and enters the momentum.
    """

    array_names: ClassVar[frozenset[str]] = frozenset(("momentum_buffer",))

    def check(self, options: Options) -> None:
        super().check(options)
        number("dampening", options["dampening"])
        if options["nesterov"] and (not options["momentum"] or options["dampening"]):
            raise ValueError(
                "nesterov needs momentum and no dampening, got momentum "
                f"{options['momentum']} and dampening {options['dampening']}"
            )

    def initial_state(self, options: Options) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if options["momentum"] else {}

    def required_arrays(self, options: Options) -> set[str]:
        # torch creates the buffer in the first step that has a gradient.
        return set()

    def is_noop_without_gradient(self, options: Options) -> bool:
        return not options["momentum"] and not options["weight_decay"]

    def moves_without_gradient(self, options: Options) -> bool:
        return not self.is_noop_without_gradient(options)

    def step_values(self, ops: Any, options: Options, step: Any) -> Any:
        momentum = float(options["momentum"])
        direct, through = (1.0, momentum) if options["nesterov"] else (0.0, 1.0)
        return (MomentumStep if momentum else SGDStep)(
            sign=gradient_sign(options),
            coupled_decay=float(options["weight_decay"]),
            lr=options["lr"],
            momentum=momentum,
            # torch initializes the buffer with the gradient itself.
            gain=ops.where(step == 1, 1.0, 1 - float(options["dampening"])),
            direct=direct,
            through=through,
        )

    def coefficients_class(self, options: Options) -> type[MissedCoefficients]:
        return MomentumCoefficients if options["momentum"] else DecayCoefficients

    def caught_up_coefficients(self, ops: Any, options: Options, step: Any) -> Any:
        if options["momentum"]:
            return MomentumCoefficients(1.0, 0.0, 1.0, 0.0)
        return DecayCoefficients(1.0)


@dataclass
class SGDOptions(RowOptions):
    """Arguments of ``RowSGD``."""

    rule_class: ClassVar[type[Rule]] = SGD
    lr: float = 1e-3
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


class RowSGD(RowOptimizer):
    """SGD on rows. Equals ``torch.optim.SGD`` on dense gradients.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening of the momentum.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Use Nesterov momentum.
        maximize: Maximize instead of minimize.
        mode, stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 2, rng=0)
        >>> optimizer = RowSGD(layer, lr=0.5)
        >>> y, pull = layer.vjp([3])
        >>> optimizer.step(pull(y))
    """

    @with_options(SGDOptions)
    def __init__(self, layer: Any, options: SGDOptions) -> None:
        super().__init__(layer, options)
