"""Lion on rows (Chen et al. 2023, https://arxiv.org/abs/2302.06675)."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from .. import kernels
from ..kernels.optim.coefficients import NUM_LION, SIGN_STEP
from ..kernels.optim.row_slice import RowSlice, StaleRows
from .missed_steps import MissedSteps
from .row_optimizer import RowOptimizer, with_options
from .rule import Options, RowOptions, Rule, check_fractions, gradient_sign


class Lion(Rule):
    """Lion: updates weights by the sign of an average of gradients."""

    num_coefficients: ClassVar[int] = NUM_LION
    array_names: ClassVar[frozenset[str]] = frozenset(("exp_avg",))

    def check(self, options: Options) -> None:
        super().check(options)
        check_fractions(options["betas"], "betas[0]", "betas[1]")
        if not self.lazy and not options["betas"][1]:
            raise ValueError(
                'betas[1] must be above 0 in mode="exact" for Lion, whose average would '
                'lose its sign in the first step a row misses, got 0; use mode="lazy"'
            )

    def initial_state(self, options: Options) -> dict[str, float]:
        return {"exp_avg": 0.0}

    def is_noop_without_gradient(self, options: Options) -> bool:
        return False

    def moves_without_gradient(self, options: Options) -> bool:
        return True

    def caught_up_coefficients(self, options: Options, step: int) -> Any:
        return 1.0, 0.0, 1.0

    def record_step(self, missed: MissedSteps, options: Options, step: int) -> None:
        lr, (beta1, beta2) = float(options["lr"]), map(float, options["betas"])
        decay = 1 - lr * float(options["weight_decay"])
        coefficients = missed.coefficients
        coefficients *= [[decay], [decay], [beta2]]
        coefficients[SIGN_STEP] += lr if beta1 else 0.0
        missed.append(self.caught_up_coefficients(options, step))

    def catch_up(self, rows: StaleRows, missed: MissedSteps) -> None:
        kernels.lion_catch_up(rows, missed.all_coefficients)

    def update(
        self, rows: RowSlice, gradient: np.ndarray, *, options: Options, step: int
    ) -> None:
        lr, (beta1, beta2) = float(options["lr"]), map(float, options["betas"])
        decay = 1 - lr * float(options["weight_decay"])
        sign = gradient_sign(options)
        kernels.lion_update(rows, gradient, sign, decay, lr, beta1, beta2)


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
