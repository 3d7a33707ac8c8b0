"""Adagrad on rows (Duchi et al. 2011), with a sum of squares for each entry or each row."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from .. import kernels
from .._check import not_negative_number
from ..kernels.optim.row_slice import RowSlice
from .row_optimizer import RowOptimizer, with_options
from .rule import Options, RowOptions, Rule, gradient_sign, refuse_coupled_decay


class Adagrad(Rule):
    """Adagrad. A step without a gradient is a no-op."""

    array_names: ClassVar[frozenset[str]] = frozenset(("sum",))
    depends_on_step: ClassVar[bool] = True

    def check(self, options: Options) -> None:
        super().check(options)
        name = "initial_accumulator_value"
        not_negative_number(name, options[name])
        if not self.lazy:
            refuse_coupled_decay(options, "Adagrad")

    def initial_state(self, options: Options) -> dict[str, float]:
        return {"sum": float(options["initial_accumulator_value"])}

    def update(
        self, rows: RowSlice, gradient: np.ndarray, *, options: Options, step: int
    ) -> None:
        lr = float(options["lr"]) / (1 + (step - 1) * float(options["lr_decay"]))
        decay, eps = float(options["weight_decay"]), float(options["eps"])
        kernels.adagrad_update(rows, gradient, gradient_sign(options), decay, lr, eps)


class WiseAdagrad(Adagrad):
    """Adagrad with one sum per row, of the mean squares of its gradients."""

    def state_width(self, width: int) -> int:
        return 1


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
        weight_decay: Weight decay, added to the gradient; 0 in exact mode.
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
        weight_decay: Weight decay, added to the gradient; 0 in exact mode.
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
