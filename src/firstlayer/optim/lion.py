"""Lion by rows (Chen et al. 2023, https://arxiv.org/abs/2302.06675)."""

from typing import Any, ClassVar

from .. import kernels
from ..kernels.optim.coefficients import LION_KINDS, WAY
from .row_optimizer import Mode, RowOptimizer
from .rule import Chosen, Options, Past, Rule, State, check_fractions, sign_of


class Lion(Rule):
    """Lion (Chen et al. 2023): only the sign of an average moves weights."""

    kinds: ClassVar[int] = LION_KINDS

    def check(self, options: Options, *, exact: bool) -> None:
        super().check(options, exact=exact)
        check_fractions(options["betas"], "betas[0]", "betas[1]")
        if exact and not options["betas"][1]:
            raise ValueError(
                'betas[1] must be above 0 in mode="exact" for Lion, whose average would '
                'lose its sign in the first step a row misses, got 0; use mode="lazy"'
            )

    def arrays(self, options: Options) -> dict[str, float]:
        return {"exp_avg": 0.0}

    def rests(self, options: Options) -> bool:
        return False

    def moves(self, options: Options) -> bool:
        return True

    def line(self, options: Options, step: int) -> Any:
        return 1.0, 0.0, 1.0

    def miss(self, past: Past, options: Options, step: int) -> None:
        lr, (beta1, beta2) = float(options["lr"]), map(float, options["betas"])
        shrink, way = 1 - lr * float(options["weight_decay"]), lr if beta1 else 0.0
        lines = past.lines
        lines *= [[shrink], [shrink], [beta2]]
        lines[WAY] += way
        past.add(self.line(options, step))

    def catch_up(
        self, chosen: Chosen, state: State, *, since: Any, seen: Any, past: Past, fixed: Any
    ) -> None:
        kernels.lion_catch_up(
            chosen.weight,
            chosen.places,
            chosen.rows,
            since=since,
            lines=past.all_lines,
            seen=seen,
            mean=state["exp_avg"],
        )

    def update(
        self, chosen: Chosen, state: State, *, values: Any, options: Options, step: int
    ) -> None:
        lr, (beta1, beta2) = float(options["lr"]), map(float, options["betas"])
        shrink = 1 - lr * float(options["weight_decay"])
        kernels.lion_update(
            chosen.weight,
            chosen.places,
            chosen.rows,
            values=values,
            mean=state["exp_avg"],
            numbers=chosen.numbers(sign_of(options), shrink, lr, beta1, beta2),
        )


class RowLion(RowOptimizer):
    """Lion by rows: weights move by the sign of an average of gradients.

    Args:
        layer: Whose parameters are trained.
        lr: Learning rate.
        betas: What of the average moves a weight, and what of it is kept.
        weight_decay: What part of a weight, times ``lr``, a step takes away.
        maximize: Climb instead.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowLion(layer, lr=0.5)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        layer: Any,
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        rounding = stochastic_rounding
        super().__init__(
            layer, Lion(), options=options, mode=mode, stochastic_rounding=rounding
        )
