"""RMSprop by rows (Hinton 2012), centred or not, with or without momentum."""

from typing import Any, ClassVar

from .. import kernels
from ..kernels.optim.coefficients import LINEAR_KINDS
from .row_optimizer import Mode, RowOptimizer
from .rule import (
    Chosen,
    Options,
    Past,
    Rule,
    State,
    check_fractions,
    mix,
    refuse_decay,
    sign_of,
)


class RMSprop(Rule):
    """RMSprop (Hinton 2012), centred or not, with or without momentum."""

    kinds: ClassVar[int] = LINEAR_KINDS

    def check(self, options: Options, *, exact: bool) -> None:
        super().check(options, exact=exact)
        check_fractions([options["alpha"]], "alpha")
        if exact:
            refuse_decay(options, "RMSprop", "")

    def arrays(self, options: Options) -> dict[str, float]:
        names = {"square_avg": 0.0}
        names |= {"momentum_buffer": 0.0} if options["momentum"] else {}
        return names | ({"grad_avg": 0.0} if options["centered"] else {})

    def rests(self, options: Options) -> bool:
        return False

    def moves(self, options: Options) -> bool:
        return bool(options["momentum"])

    def line(self, options: Options, step: int) -> Any:
        return 1.0, 0.0, 0.0, 1.0, 1.0

    def miss(self, past: Past, options: Options, step: int) -> None:
        momentum, lr = float(options["momentum"]), float(options["lr"])
        kept = momentum or 1.0
        did = [kept, 0.0, -lr * momentum, 1.0, float(options["alpha"])]
        mix(past.lines, did)
        past.add(self.line(options, step))

    def catch_up(
        self, chosen: Chosen, state: State, *, since: Any, seen: Any, past: Past, fixed: Any
    ) -> None:
        kernels.linear_catch_up(
            chosen.weight,
            chosen.places,
            chosen.rows,
            since=since,
            lines=past.all_lines,
            seen=seen,
            buffer=chosen.array(state, "momentum_buffer"),
            averages=(state["square_avg"], chosen.array(state, "grad_avg")),
        )

    def update(
        self, chosen: Chosen, state: State, *, values: Any, options: Options, step: int
    ) -> None:
        kernels.rmsprop_update(
            chosen.weight,
            chosen.places,
            chosen.rows,
            values=values,
            square=state["square_avg"],
            mean=chosen.array(state if options["centered"] else {}, "grad_avg"),
            buffer=chosen.array(state if options["momentum"] else {}, "momentum_buffer"),
            numbers=chosen.numbers(
                sign_of(options),
                float(options["weight_decay"]),
                float(options["lr"]),
                float(options["alpha"]),
                float(options["eps"]),
                float(options["momentum"]),
            ),
        )


class RowRMSprop(RowOptimizer):
    """RMSprop by rows. Equals ``torch.optim.RMSprop`` on dense gradients.

    Args:
        layer: Whose parameters are trained.
        lr: Learning rate.
        alpha: What is kept of the averages.
        eps: What is added to the root that a gradient is divided by.
        weight_decay: What part of a weight is added to its gradient; not when exact.
        momentum: What is kept of the last move.
        centered: Divide by the standard deviation of gradients.
        maximize: Climb instead.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowRMSprop(layer, lr=0.05)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        layer: Any,
        lr: float = 1e-2,
        *,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        maximize: bool = False,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "maximize": maximize,
        }
        rounding = stochastic_rounding
        super().__init__(
            layer, RMSprop(), options=options, mode=mode, stochastic_rounding=rounding
        )
