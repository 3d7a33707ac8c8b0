"""SGD on rows, with momentum and weight decay."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from .. import kernels
from .._check import number
from ..kernels.optim.coefficients import NUM_LINEAR
from ..kernels.optim.row_slice import RowSlice, StaleRows
from .missed_steps import MissedSteps, advance_linear
from .row_optimizer import RowOptimizer, with_options
from .rule import Options, RowOptions, Rule, gradient_sign


class SGD(Rule):
    """SGD with momentum, Nesterov or not, and weight decay.

    The decay is added to the gradient and enters the momentum. Both are linear in weight
    and buffer, so missed steps are applied exactly.
    """

    num_coefficients: ClassVar[int] = NUM_LINEAR
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

    def caught_up_coefficients(self, options: Options, step: int) -> Any:
        return 1.0, 0.0, 0.0, 1.0, 1.0

    def record_step(self, missed: MissedSteps, options: Options, step: int) -> None:
        decay, lr, momentum, gain, direct, through = self._hyperparameters(options, step)
        moved = lr * (direct + through * gain) * decay
        effect = [momentum, gain * decay, -lr * through * momentum, 1 - moved, 1.0]
        if not momentum:
            effect = [1.0, 0.0, 0.0, 1 - lr * decay, 1.0]
        advance_linear(missed.coefficients, effect)
        missed.append(self.caught_up_coefficients(options, step))

    def catch_up(self, rows: StaleRows, missed: MissedSteps) -> None:
        kernels.linear_catch_up(rows, missed.all_coefficients)

    def update(
        self, rows: RowSlice, gradient: np.ndarray, *, options: Options, step: int
    ) -> None:
        values = gradient_sign(options), *self._hyperparameters(options, step)
        kernels.sgd_update(rows, gradient, *values, has_momentum=bool(options["momentum"]))

    def _hyperparameters(self, options: Options, step: int) -> tuple[float, ...]:
        momentum = float(options["momentum"])
        # torch initializes the buffer with the gradient itself.
        gain = 1.0 if step == 1 else 1 - float(options["dampening"])
        direct, through = (1.0, momentum) if options["nesterov"] else (0.0, 1.0)
        decay, lr = float(options["weight_decay"]), float(options["lr"])
        return decay, lr, momentum, gain, direct, through


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
