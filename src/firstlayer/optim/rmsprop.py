"""RMSprop on rows (Hinton 2012), centered or not, with or without momentum."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from .. import kernels
from ..kernels.optim.coefficients import NUM_LINEAR
from ..kernels.optim.row_slice import RowSlice, StaleRows
from .missed_steps import MissedSteps, advance_linear
from .row_optimizer import RowOptimizer, with_options
from .rule import (
    Options,
    RowOptions,
    Rule,
    check_fractions,
    gradient_sign,
    refuse_coupled_decay,
)


class RMSprop(Rule):
    """RMSprop, centered or not, with or without momentum."""

    num_coefficients: ClassVar[int] = NUM_LINEAR
    array_names: ClassVar[frozenset[str]] = frozenset((
        "square_avg",
        "momentum_buffer",
        "grad_avg",
    ))

    def check(self, options: Options) -> None:
        super().check(options)
        check_fractions([options["alpha"]], "alpha")
        if not self.lazy:
            refuse_coupled_decay(options, "RMSprop")

    def initial_state(self, options: Options) -> dict[str, float]:
        names = {"square_avg": 0.0}
        names |= {"momentum_buffer": 0.0} if options["momentum"] else {}
        return names | ({"grad_avg": 0.0} if options["centered"] else {})

    def is_noop_without_gradient(self, options: Options) -> bool:
        return False

    def moves_without_gradient(self, options: Options) -> bool:
        return bool(options["momentum"])

    def caught_up_coefficients(self, options: Options, step: int) -> Any:
        return 1.0, 0.0, 0.0, 1.0, 1.0

    def record_step(self, missed: MissedSteps, options: Options, step: int) -> None:
        momentum, lr = float(options["momentum"]), float(options["lr"])
        effect = [momentum or 1.0, 0.0, -lr * momentum, 1.0, float(options["alpha"])]
        advance_linear(missed.coefficients, effect)
        missed.append(self.caught_up_coefficients(options, step))

    def catch_up(self, rows: StaleRows, missed: MissedSteps) -> None:
        kernels.linear_catch_up(rows, missed.all_coefficients)

    def update(
        self, rows: RowSlice, gradient: np.ndarray, *, options: Options, step: int
    ) -> None:
        names = "weight_decay", "lr", "alpha", "eps", "momentum"
        values = [float(options[name]) for name in names]
        kernels.rmsprop_update(
            rows,
            gradient,
            gradient_sign(options),
            *values,
            is_centered=bool(options["centered"]),
            has_momentum=bool(options["momentum"]),
        )


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


class RowRMSprop(RowOptimizer):
    """RMSprop on rows. Equals ``torch.optim.RMSprop`` on dense gradients.

    Args:
        layer: Layer whose parameters are trained.
        lr: Learning rate.
        alpha: Decay rate of the averages.
        eps: Term added to the denominator.
        weight_decay: Weight decay, added to the gradient; 0 in exact mode.
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
