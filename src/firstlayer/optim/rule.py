"""What a row optimizer has to know of a rule, and what is kept of the steps rows missed.

Dense optimizers move every row in every step, also those without a gradient: weight decay
shrinks them, momentum carries them on. For most rules many such steps have the effect of
one, of a few numbers that are the same for every column and depend only on where the row
was left and where it shall be. :class:`Past` keeps these numbers for each step that a row
may have been left at, and takes all of them along from step to step, so that schedules of
learning rate, momentum and decay are followed exactly. Lipton and Elkan 2015
(https://arxiv.org/abs/1505.06449) do this for SGD with decay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float64, Int64

from .._check import not_negative_number, number
from ..kernels.optim.coefficients import AVERAGE, BB, BW, STEP_KINDS, WB, WW

Options = Mapping[str, Any]
State = dict[str, np.ndarray]

# After so many steps all rows are brought up to date. The lines of as many steps take
# microseconds to take along, and what the rows cost is spread over the steps.
LIMIT = 8192


@dataclass(frozen=True, eq=False)
class Chosen:
    """Rows to be moved.

    Args:
        weight: An array with those rows in float32 or float64.
        places: Where in ``weight`` they are.
        rows: Where in the state they are.
    """

    weight: Float[np.ndarray, "any width"]
    places: Int64[np.ndarray, " rows"]
    rows: Int64[np.ndarray, " rows"]

    def numbers(self, *values: float) -> tuple[np.floating, ...]:
        """Return numbers in the dtype of the work, as kernels take them."""
        kind = self.weight.dtype.type
        return tuple(kind(value) for value in values)

    def array(self, state: State, name: str) -> np.ndarray:
        """Return an array of the state, without rows if it is not there."""
        found = state.get(name)
        return np.empty((0, 0), self.weight.dtype) if found is None else found


class Past:
    """What became of rows since a step at which all were up to date.

    Args:
        kinds: How many numbers a line has.
    """

    def __init__(self, kinds: int) -> None:
        #: Room for as many lines as can be kept, and for what each step did.
        self.all_lines = np.empty((kinds, LIMIT + 1))
        self.all_steps = np.empty((STEP_KINDS, LIMIT + 1))
        #: How many steps there were.
        self.count = 0

    @property
    def lines(self) -> Float64[np.ndarray, "kinds steps"]:
        """For each step that a row may be at the numbers that take it from there to now."""
        return self.all_lines[:, : self.count + 1]

    @property
    def is_full(self) -> bool:
        """Whether no further step can be kept."""
        return self.count == LIMIT

    def begin(self, line: Any) -> None:
        """Forget all; ``line`` is that of a row which is up to date."""
        self.count = 0
        self.all_lines[:, 0] = line

    def add(self, line: Any, step: Any = 0.0) -> None:
        """Keep one more step, at the end of which the rows that moved have ``line``."""
        if self.count % 256 == 255:
            # What has all but vanished would be slow to compute with.
            lines = self.lines
            lines[np.abs(lines) < 1e-200] = 0.0
        self.count += 1
        self.all_lines[:, self.count] = line
        self.all_steps[:, self.count] = step


def mix(lines: Any, step: Sequence[float]) -> None:
    """Take lines of SGD or RMSprop one step on, given that step's own line."""
    bb, bw, wb, ww, average = step
    buffer, weight = lines[[BB, BW]], lines[[WB, WW]]
    lines[[BB, BW]] = bb * buffer + bw * weight
    lines[[WB, WW]] = wb * buffer + ww * weight
    lines[AVERAGE] *= average


class Rule:
    """How an optimizer moves the rows of a table. Has no state of its own.

    ``options`` are torch's, under torch's names, as they are in the step at hand.
    """

    #: How many numbers are kept for a missed step.
    kinds: ClassVar[int] = 0

    def check(self, options: Options, *, exact: bool) -> None:
        """Refuse options that mean nothing, or that no row can be left alone with."""
        for name in ("lr", "eps", "weight_decay", "momentum", "lr_decay"):
            if name in options:
                not_negative_number(name, options[name])

    def arrays(self, options: Options) -> dict[str, float]:
        """Return the names of the state's arrays, and what each begins with."""
        raise NotImplementedError

    def width(self, name: str, width: int) -> int:
        """Return how many numbers an array of the state has for a row of that width."""
        return width

    def fixed(self, options: Options) -> tuple[Any, ...]:
        """Return what must not change while rows are behind."""
        return ()

    def rests(self, options: Options) -> bool:
        """Tell whether a step without a gradient changes nothing, state included."""
        return True

    def moves(self, options: Options) -> bool:
        """Tell whether a step without a gradient changes weights."""
        return False

    def line(self, options: Options, step: int) -> Any:
        """Return the line of a row that is up to date after that step."""
        return ()

    def miss(self, past: Past, options: Options, step: int) -> None:
        """Take ``past`` along by that step, counted from 1."""

    def catch_up(
        self, chosen: Chosen, state: State, *, since: Any, seen: Any, past: Past, fixed: Any
    ) -> None:
        """Bring rows up to date.

        Args:
            chosen: Which rows.
            state: The state's arrays.
            since: For each row its line of ``past``.
            seen: For each row of the table whether its state may be other than zero.
            past: What they have missed.
            fixed: What :meth:`fixed` gave in those steps.
        """

    def update(
        self, chosen: Chosen, state: State, *, values: Any, options: Options, step: int
    ) -> None:
        """Take a step with the gradients ``values``, as mode ``"exact"`` does."""
        raise NotImplementedError


def check_fractions(values: Sequence[Any], *names: str) -> None:
    """Refuse what is not in [0, 1)."""
    for name, value in zip(names, values, strict=True):
        if not 0 <= number(name, value) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")


def refuse_decay(options: Options, rule: str, instead: str) -> None:
    """Refuse weight decay that is added to the gradient, where rows would need it all."""
    if options["weight_decay"]:
        raise ValueError(
            f'weight_decay must be 0 in mode="exact" for {rule}, which adds it to the '
            f"gradient, so that no row is without one, got {options['weight_decay']}; "
            f'use {instead}mode="lazy"'
        )


def sign_of(options: Options) -> float:
    """Return what a gradient is multiplied by: −1 to climb."""
    return -1.0 if options["maximize"] else 1.0
