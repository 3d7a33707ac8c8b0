"""Adam and AdamW (Kingma and Ba 2015, Loshchilov and Hutter 2019) by rows."""

import math
from typing import Any, ClassVar

import numpy as np

from .. import kernels
from ..kernels.optim.coefficients import (
    ADAM_KINDS,
    FIRST,
    POINTS,
    POLY,
    SCALE,
    SECOND,
    SHRINK,
)
from .row_optimizer import Mode, RowOptimizer
from .rule import Chosen, Options, Past, Rule, State, check_fractions, refuse_decay, sign_of

# What is left of an average that no longer moves a weight by as much as rounding does.
FADED = 1e-24


class Adam(Rule):
    """Adam, whose decay is added to the gradient, or AdamW, whose decay is not.

    Args:
        decoupled: Whether it is AdamW.
        hat: Whether ε is added before the bias correction of the root, as SparseAdam and
            TensorFlow do, and not after it.
    """

    kinds: ClassVar[int] = ADAM_KINDS

    def __init__(self, *, decoupled: bool, hat: bool = False) -> None:
        self.decoupled, self.hat = decoupled, hat
        self._points, self._basis = interpolation()

    def check(self, options: Options, *, exact: bool) -> None:
        super().check(options, exact=exact)
        check_fractions(options["betas"], "betas[0]", "betas[1]")
        if exact and not self.decoupled:
            refuse_decay(options, "Adam", "RowAdamW or ")

    def arrays(self, options: Options) -> dict[str, float]:
        names = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
        return names | ({"max_exp_avg_sq": 0.0} if options["amsgrad"] else {})

    def fixed(self, options: Options) -> tuple[Any, ...]:
        return float(options["eps"]), bool(options["amsgrad"])

    def rests(self, options: Options) -> bool:
        return False

    def moves(self, options: Options) -> bool:
        return True

    def line(self, options: Options, step: int) -> Any:
        line = np.zeros(ADAM_KINDS)
        line[[SHRINK, FIRST, SECOND]] = 1.0
        line[SCALE] = _scale(options, step)
        return line

    def miss(self, past: Past, options: Options, step: int) -> None:
        beta1, beta2 = map(float, options["betas"])
        size, unbias = float(options["lr"]) / (1 - beta1**step), 1 / (1 - beta2**step)
        shrink, lines = self._shrink(options), past.lines
        lines *= np.array([shrink, beta1, beta2, 1.0] + POINTS * [shrink])[:, None]
        # The averages of rows that were left before have faded.
        lines = lines[:, np.searchsorted(lines[FIRST], FADED) :]
        kept = 1.0 if options["amsgrad"] else lines[SECOND]
        ratio = np.sqrt(kept * unbias) / lines[SCALE]
        # With β₂ = 0 there is no polynomial, and its steps are taken one by one.
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = size * lines[FIRST] / (ratio * (1 - self._points) + self._points)
            # Infinity would look as sure of itself as a number.
            terms[np.isinf(terms)] = np.nan
            lines[POLY:] += self._basis @ terms
        past.add(self.line(options, step), (size, beta1, beta2, unbias))

    def catch_up(
        self, chosen: Chosen, state: State, *, since: Any, seen: Any, past: Past, fixed: Any
    ) -> None:
        kernels.adam_catch_up(
            chosen.weight,
            chosen.places,
            chosen.rows,
            since=since,
            lines=past.all_lines,
            steps=past.all_steps,
            count=past.count,
            seen=seen,
            mean=state["exp_avg"],
            square=state["exp_avg_sq"],
            largest=chosen.array(state, "max_exp_avg_sq"),
            eps=fixed[0],
        )

    def update(
        self, chosen: Chosen, state: State, *, values: Any, options: Options, step: int
    ) -> None:
        beta1, beta2 = map(float, options["betas"])
        unbias, eps = 1 / math.sqrt(1 - beta2**step), float(options["eps"])
        kernels.adam_update(
            chosen.weight,
            chosen.places,
            chosen.rows,
            values=values,
            mean=state["exp_avg"],
            square=state["exp_avg_sq"],
            largest=chosen.array(state, "max_exp_avg_sq"),
            numbers=chosen.numbers(
                sign_of(options),
                0.0 if self.decoupled else float(options["weight_decay"]),
                self._shrink(options),
                1 - beta1,
                beta2,
                1 - beta2,
                float(options["lr"]) / (1 - beta1**step),
                unbias,
                eps * unbias if self.hat else eps,
            ),
        )

    def _shrink(self, options: Options) -> float:
        decay = float(options["weight_decay"]) if self.decoupled else 0.0
        return 1 - float(options["lr"]) * decay


class RowAdam(RowOptimizer):
    """Adam by rows. Equals ``torch.optim.Adam`` on dense gradients.

    In ``mode="lazy"`` it is ``torch.optim.SparseAdam``, which adds ``eps`` before the bias
    correction.

    Args:
        layer: Whose parameters are trained.
        lr: Learning rate.
        betas: What is kept of the averages of gradients and of their squares.
        eps: What is added to the root that a gradient is divided by.
        weight_decay: What part of a weight is added to its gradient; not when exact.
        amsgrad: Divide by the largest average of squares so far.
        maximize: Climb instead.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowAdam(layer, lr=0.5)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        layer: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        rounding = stochastic_rounding
        super().__init__(
            layer,
            Adam(decoupled=False, hat=mode == "lazy"),
            options=options,
            mode=mode,
            stochastic_rounding=rounding,
        )


class RowAdamW(RowOptimizer):
    """AdamW by rows. Equals ``torch.optim.AdamW`` on dense gradients.

    In ``mode="lazy"`` without decay it is ``torch.optim.SparseAdam``, which adds ``eps``
    before the bias correction.

    Args:
        layer: Whose parameters are trained.
        lr: Learning rate.
        betas: What is kept of the averages of gradients and of their squares.
        eps: What is added to the root that a gradient is divided by.
        weight_decay: What part of a weight, times ``lr``, a step takes away.
        amsgrad: Divide by the largest average of squares so far.
        maximize: Climb instead.
        mode: ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`.
        stochastic_rounding: See :class:`RowOptimizer`.

    Example:
        >>> import numpy as np
        >>> from firstlayer.numpy import Embedding
        >>> layer = Embedding(5, 1, weight=np.ones((5, 1)))
        >>> optimizer = RowAdamW(layer, lr=0.5, weight_decay=0.1)
        >>> optimizer.step(layer.vjp([3])[1](np.ones((1, 1))))
        >>> layer([3, 4]).ravel().round(3).tolist()
        [0.45, 0.95]
    """

    def __init__(
        self,
        layer: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        mode: Mode = "exact",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        rounding = stochastic_rounding
        super().__init__(
            layer,
            Adam(decoupled=True, hat=mode == "lazy"),
            options=options,
            mode=mode,
            stochastic_rounding=rounding,
        )


def interpolation() -> tuple[np.ndarray, np.ndarray]:
    """Return points on [0, 1], and for each the polynomial that is 1 there alone.

    The points are Chebyshev's, both ends among them, one under the other. A polynomial is a
    column of coefficients of the powers of ``2 u − 1``.
    """
    z = -np.cos(np.pi * np.arange(POINTS) / (POINTS - 1))
    return (1 + z[:, None]) / 2, np.linalg.inv(np.vander(z, increasing=True))


def _scale(options: Options, step: int) -> float:
    """Return about what √v is multiplied by in the missed steps that count most.

    It need not be right, for it only says where the polynomial looks closely.
    """
    beta1, beta2 = map(float, options["betas"])
    kept = 1.0 if options["amsgrad"] else beta2
    # Terms shrink by this from one missed step to the next.
    ratio = beta1 / math.sqrt(kept) if kept else 1.0
    ahead = min(1 / (1 - ratio), 1000.0) if ratio < 1 else 50.0
    return max(math.sqrt(kept**ahead / (1 - beta2 ** (step + ahead))), 1e-6)
