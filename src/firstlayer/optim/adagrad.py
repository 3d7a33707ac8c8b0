"""Adagrad by rows (Duchi et al. 2011), with a number for each entry or for each row."""

from typing import Any

from .. import kernels
from .._check import not_negative_number
from .row_optimizer import Mode, RowOptimizer
from .rule import Chosen, Options, Rule, State, refuse_decay, sign_of


class Adagrad(Rule):
    """Adagrad (Duchi et al. 2011). A row without a gradient stays as it is.

    Args:
        by_row: Whether a row has one sum, of its gradients' mean squares.
    """

    def __init__(self, *, by_row: bool = False) -> None:
        self.by_row = by_row

    def check(self, options: Options, *, exact: bool) -> None:
        super().check(options, exact=exact)
        name = "initial_accumulator_value"
        not_negative_number(name, options[name])
        if exact:
            refuse_decay(options, "Adagrad", "")

    def arrays(self, options: Options) -> dict[str, float]:
        return {"sum": float(options["initial_accumulator_value"])}

    def width(self, name: str, width: int) -> int:
        return 1 if self.by_row else width

    def update(
        self, chosen: Chosen, state: State, *, values: Any, options: Options, step: int
    ) -> None:
        lr = float(options["lr"]) / (1 + (step - 1) * float(options["lr_decay"]))
        decay, eps = float(options["weight_decay"]), float(options["eps"])
        kernels.adagrad_update(
            chosen.weight,
            chosen.places,
            chosen.rows,
            values=values,
            total=state["sum"],
            numbers=chosen.numbers(sign_of(options), decay, lr, eps),
        )


class RowAdagrad(RowOptimizer):
    """Adagrad by rows. Equals ``torch.optim.Adagrad`` on dense gradients.

    Args:
        layer: Whose parameters are trained.
        lr: Learning rate.
        lr_decay: How fast the learning rate falls with the steps.
        weight_decay: What part of a weight is added to its gradient; not when exact.
        initial_accumulator_value: What sums of squares begin with.
        eps: What is added to the root that a gradient is divided by.
        maximize: Climb instead.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowAdagrad(layer, lr=0.5)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        layer: Any,
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        maximize: bool = False,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        rounding = stochastic_rounding
        super().__init__(
            layer, Adagrad(), options=options, mode=mode, stochastic_rounding=rounding
        )


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one number a row: the sum of the mean squares of its gradients.

    The state of a table of a million rows is 4 MB. Parameters that are no tables get
    Adagrad with a number for each entry.

    Args:
        layer: Whose parameters are trained.
        lr: Learning rate.
        lr_decay: How fast the learning rate falls with the steps.
        weight_decay: What part of a weight is added to its gradient; not when exact.
        initial_accumulator_value: What sums begin with.
        eps: What is added to the root that a gradient is divided by.
        maximize: Climb instead.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowWiseAdagrad(layer, lr=0.5)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        layer: Any,
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        maximize: bool = False,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        rounding = stochastic_rounding
        super().__init__(
            layer,
            Adagrad(by_row=True),
            options=options,
            mode=mode,
            stochastic_rounding=rounding,
        )
