"""Gradient descent by rows, with momentum and weight decay."""

from typing import Any, ClassVar

from .. import kernels
from ..kernels.optim.coefficients import LINEAR_KINDS
from .row_optimizer import Mode, RowOptimizer
from .rule import Chosen, Options, Past, Rule, State, mix, sign_of


class SGD(Rule):
    """Gradient descent with momentum, Nesterov's or not, and weight decay.

    The decay is added to the gradient, so that the momentum has a part of it; both together
    are linear, and can be missed.
    """

    kinds: ClassVar[int] = LINEAR_KINDS

    def check(self, options: Options, *, exact: bool) -> None:
        super().check(options, exact=exact)
        if options["nesterov"] and (not options["momentum"] or options["dampening"]):
            raise ValueError(
                "nesterov needs momentum and no dampening, got momentum "
                f"{options['momentum']} and dampening {options['dampening']}"
            )

    def arrays(self, options: Options) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if options["momentum"] else {}

    def rests(self, options: Options) -> bool:
        return not options["momentum"] and not options["weight_decay"]

    def moves(self, options: Options) -> bool:
        return not self.rests(options)

    def line(self, options: Options, step: int) -> Any:
        return 1.0, 0.0, 0.0, 1.0, 1.0

    def miss(self, past: Past, options: Options, step: int) -> None:
        decay, lr, momentum, gain, direct, through = self._numbers(options, step)
        moved = lr * (direct + through * gain) * decay
        did = [momentum, gain * decay, -lr * through * momentum, 1 - moved, 1.0]
        if not momentum:
            did = [1.0, 0.0, 0.0, 1 - lr * decay, 1.0]
        mix(past.lines, did)
        past.add(self.line(options, step))

    def catch_up(
        self, chosen: Chosen, state: State, *, since: Any, seen: Any, past: Past, fixed: Any
    ) -> None:
        nothing = chosen.array({}, "")
        kernels.linear_catch_up(
            chosen.weight,
            chosen.places,
            chosen.rows,
            since=since,
            lines=past.all_lines,
            seen=seen,
            buffer=chosen.array(state, "momentum_buffer"),
            averages=(nothing, nothing),
        )

    def update(
        self, chosen: Chosen, state: State, *, values: Any, options: Options, step: int
    ) -> None:
        kernels.sgd_update(
            chosen.weight,
            chosen.places,
            chosen.rows,
            values=values,
            buffer=chosen.array(state if options["momentum"] else {}, "momentum_buffer"),
            numbers=chosen.numbers(sign_of(options), *self._numbers(options, step)),
        )

    def _numbers(self, options: Options, step: int) -> tuple[float, ...]:
        """Return decay, learning rate, momentum, and what passes through the buffer."""
        momentum = float(options["momentum"])
        # torch begins its buffer with the gradient itself.
        gain = 1.0 if step == 1 else 1 - float(options["dampening"])
        direct, through = (1.0, momentum) if options["nesterov"] else (0.0, 1.0)
        return (
            float(options["weight_decay"]),
            float(options["lr"]),
            momentum,
            gain,
            direct,
            through,
        )


class RowSGD(RowOptimizer):
    """Gradient descent by rows. Equals ``torch.optim.SGD`` on dense gradients.

    Args:
        layer: Whose parameters are trained.
        lr: Learning rate.
        momentum: What is kept of the last move.
        dampening: What part of a gradient does not enter the momentum.
        weight_decay: What part of a weight is added to its gradient.
        nesterov: Look ahead along the momentum.
        maximize: Climb instead.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowSGD(layer, lr=0.5)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        layer: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        rounding = stochastic_rounding
        super().__init__(
            layer, SGD(), options=options, mode=mode, stochastic_rounding=rounding
        )
