"""Specification of an update rule such as SGD or Adam.

A rule is written once, as pure functions of numbers or arrays, and executed three ways:
compiled into kernels for tables on the CPU (:mod:`firstlayer.kernels.optim.drivers`), with
torch operators on any device, and in JAX under jit. Each rule is one file with

- a subclass of :class:`Step` per variant (with or without momentum, say): a named tuple of
  the numbers of one step, whose :meth:`Step.update` changes a weight that has a gradient;
- a subclass of :class:`MissedCoefficients` per variant: a named tuple of the coefficients
  that catch up a row which had no gradient in some steps;
- a :class:`Rule`, which chooses the variant and computes its numbers from the options;
- a :class:`RowOptions` dataclass with the arguments and their defaults, for all front ends.

A step without a gradient is, by definition, an update with a gradient of zero.

``ops`` is the array namespace: :class:`ArrayOps` of ``numpy``, ``torch`` or ``jax.numpy``,
:mod:`firstlayer.torch.optim.rule_ops`, or the scalar functions of
:mod:`firstlayer.kernels.optim.scalars`. Methods that kernels compile use operators and
``ops.sqrt``, ``sign``, ``absolute``, ``maximum``, ``multiply`` and those of
:class:`ArrayOps` only, and no number literals: a literal would make float32 kernels compute
in float64. ``multiply``, ``multiply_add``, ``lerp``, ``addcmul`` and ``addcdiv`` may
overwrite their first argument, so methods do not read it again.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import Any, ClassVar, Literal

import numpy as np

from .._check import not_negative_number, number

Mode = Literal["exact", "lazy"]
MODES = ("exact", "lazy")
Options = Mapping[str, Any]
State = dict[str, np.ndarray]

# Coefficients below this count as zero: arithmetic on float32 denormals is slow.
TINY = 1e-30


class ArrayOps:
    """Array namespace with functions that combine several operators.

    Args:
        namespace: ``numpy``, ``torch`` or ``jax.numpy``.

    Example:
        >>> float(ArrayOps(np).multiply_add(np.float32(2), 3, 4))
        10.0
    """

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespace, name)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Return ``x`` where a condition or one bool is True, and ``y`` elsewhere."""
        if isinstance(condition, bool):
            return x if condition else y
        return self._namespace.where(condition, x, y)

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """Return ``x * y + z``."""
        return x * y + z

    def lerp(self, x: Any, y: Any, share: Any) -> Any:
        """Return ``x`` moved towards ``y`` by a share of their difference."""
        return (y - x) * share + x

    def addcmul(self, x: Any, y: Any, z: Any, factor: Any) -> Any:
        """Return ``x + factor * y * z``."""
        return x + factor * y * z

    def addcdiv(self, x: Any, y: Any, z: Any, factor: Any) -> Any:
        """Return ``x + factor * y / z``."""
        return x + factor * y / z


class Step:
    """Numbers of one step; base of the named tuples.

    Methods take a weight and its state, in the order of :meth:`Rule.initial_state`, as
    numbers or as arrays that broadcast, and return the new values.
    """

    #: Fields that every named tuple has: the factor of the gradient (−1 to maximize), and
    #: weight decay that is added to the gradient.
    sign: Any
    coupled_decay: Any

    def total_gradient(self, ops: Any, weight: Any, gradient: Any) -> Any:
        """Return the gradient that :meth:`update` takes, with sign and weight decay."""
        total = self.sign * gradient
        # Without decay the weight has no effect, even if it is infinite.
        decayed = total + self.coupled_decay * weight
        return ops.where(self.coupled_decay == 0, total, decayed)

    def accumulate(self, ops: Any, square: Any, total: Any) -> Any:
        """Return the accumulated squares of gradients after one more square.

        In row-wise rules ``square`` is the mean square of the row's total gradient.
        """
        raise NotImplementedError

    def move(self, ops: Any, weight: Any, gradient: Any, total: Any) -> Any:
        """Return the weight after a step, given its accumulated squares."""
        raise NotImplementedError

    def update(self, ops: Any, weight: Any, gradient: Any, *state: Any) -> Any:
        """Return ``(weight, *state)`` after a step with a total gradient."""
        raise NotImplementedError


class MissedCoefficients:
    """Coefficients of missed steps; base of the named tuples.

    A recorded step ``k`` has one number per field, which catches up a row that was last
    updated at step ``k``. :class:`firstlayer.optim.missed_steps.MissedSteps` stores the
    numbers of all recorded steps as columns of a float64 array.
    """

    #: Whether steps are replayed where :meth:`is_accurate` is False.
    replays: ClassVar[bool] = False
    #: Fields that do not change. The weight of :meth:`catch_up` is linear in the others.
    constants: ClassVar[tuple[str, ...]] = ()
    #: Field that every named tuple has: the factor of the weight. It is all that rows whose
    #: state is zero need if :meth:`keeps_zero_state`.
    weight_factor: Any

    def advance(self, ops: Any, step: Any) -> Any:
        """Return the coefficients after one more missed step; fields are vectors.

        Args:
            ops: Array namespace of float64 arrays.
            step: Numbers of the step, a :class:`Step`.
        """
        raise NotImplementedError

    def catch_up(self, ops: Any, weight: Any, *state: Any) -> Any:
        """Return ``(weight, *state)`` after the missed steps."""
        raise NotImplementedError

    def keeps_zero_state(self) -> Any:
        """Return whether a state of zeros stays zero in the missed steps."""
        return True

    def is_accurate(self, ops: Any) -> Any:
        """Return whether :meth:`catch_up` is accurate.

        Otherwise steps are replayed, as updates with a gradient of zero, up to the next
        recorded step whose coefficients are accurate. Those of the last step always are.
        """
        return True

    @classmethod
    def advance_columns(cls, columns: np.ndarray, step: Any) -> None:
        """Advance all recorded columns by one more missed step, in place."""
        columns[:] = np.stack(cls(*columns).advance(np, step))


class Rule:
    """Update rule of an optimizer. Stateless.

    ``options`` are the hyperparameters of the current step, under torch's names.

    Args:
        lazy: Whether rows without a gradient stay unchanged.
        lazy_option: What a user writes for lazy updates, for error messages.
    """

    #: Names of the arrays that the state may have, under any options.
    array_names: ClassVar[frozenset[str]] = frozenset()
    #: Whether an update depends on the number of steps taken before.
    depends_on_step: ClassVar[bool] = False
    #: Whether the state has one number per row, changed by :meth:`Step.accumulate`.
    is_row_wise: ClassVar[bool] = False

    def __init__(self, *, lazy: bool = False, lazy_option: str = 'mode="lazy"') -> None:
        self.lazy, self.lazy_option = lazy, lazy_option

    def check(self, options: Options) -> None:
        """Raise ValueError for options that are invalid or, unless lazy, not exact."""
        for name in ("lr", "eps", "weight_decay", "momentum", "lr_decay"):
            if name in options:
                not_negative_number(name, options[name])

    def refuse_coupled_decay(self, options: Options, name: str, other: str = "") -> None:
        """Raise ValueError for weight decay that gives every row a gradient, unless lazy.

        Args:
            options: Options of the rule.
            name: Name of the rule.
            other: Optimizer to use instead.
        """
        if options["weight_decay"] and not self.lazy:
            raise ValueError(
                f"weight_decay must be 0 in exact updates by {name}, which adds it to the "
                f"gradient of every row, got {options['weight_decay']}; use "
                f"{f'{other} or ' if other else ''}{self.lazy_option}"
            )

    def initial_state(self, options: Options) -> dict[str, float]:
        """Return the name and initial value of each array of the state, in order."""
        raise NotImplementedError

    def required_arrays(self, options: Options) -> set[str]:
        """Return the names of the arrays that a saved state must have."""
        return set(self.initial_state(options))

    def state_width(self, width: int) -> int:
        """Return the width of the state's arrays for rows of ``width``."""
        return 1 if self.is_row_wise else width

    def frozen_options(self, options: Options) -> tuple[Any, ...]:
        """Return the options that must not change while rows are stale.

        Among them are the names of the arrays, which determine the variant of the rule.
        """
        return tuple(self.initial_state(options))

    def adapted_state(
        self, ops: Any, options: Options, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arrays to replace when frozen options may be new.

        No row is stale. ``state`` may hold some of the rows.
        """
        return {}

    def is_noop_without_gradient(self, options: Options) -> bool:
        """Return whether a step without a gradient changes neither weight nor state."""
        return True

    def moves_without_gradient(self, options: Options) -> bool:
        """Return whether a step without a gradient changes weights."""
        return False

    def step_values(self, ops: Any, options: Options, step: Any) -> Any:
        """Return the numbers of a step, a :class:`Step`.

        Args:
            ops: Array namespace.
            options: Options of this step. Under JAX ``lr`` may be traced; options that
                choose a variant, ``betas`` and ``eps`` are Python numbers.
            step: Number of the step, from 1; under JAX it may be traced.
        """
        raise NotImplementedError

    def coefficients_class(self, options: Options) -> type[MissedCoefficients]:
        """Return the named tuple of the coefficients of missed steps."""
        raise NotImplementedError

    def caught_up_coefficients(self, ops: Any, options: Options, step: Any) -> Any:
        """Return the coefficients of a row that is up to date after ``step``."""
        raise NotImplementedError


def update_rows(
    ops: Any, rule: Rule, values: Any, weight: Any, gradient: Any, state: Sequence[Any]
) -> tuple[Any, ...]:
    """Return ``(weight, *state)`` of rows after a step with a gradient.

    Args:
        ops: Array namespace, which may overwrite ``weight`` and ``state``.
        rule: Update rule.
        values: Numbers of the step, of :meth:`Rule.step_values`.
        weight: Rows, ``(n, width)``.
        gradient: Gradient of each row, without sign and weight decay.
        state: Rows of each array of the state.

    Example:
        >>> from firstlayer.optim.adagrad import AdagradOptions, WiseAdagrad
        >>> rule = WiseAdagrad()
        >>> values = rule.step_values(np, AdagradOptions(lr=0.5).hyperparameters(), 1)
        >>> weight, gradient, total = np.ones((1, 2)), np.array([[3.0, 4.0]]), [[0.0]]
        >>> ops, state = ArrayOps(np), [np.array(total)]
        >>> update_rows(ops, rule, values, weight, gradient, state)[1]
        array([[12.5]])
    """
    total = gradient
    # Numbers of compiled steps may be arrays.
    is_plain = isinstance(values.sign, float) and isinstance(values.coupled_decay, float)
    if not is_plain or values.sign != 1 or values.coupled_decay:
        total = values.total_gradient(ops, weight, gradient)
    if not rule.is_row_wise:
        return values.update(ops, weight, total, *state)
    square = ops.mean(total * total, -1)[:, None]
    sums = values.accumulate(ops, square, state[0])
    return values.move(ops, weight, total, sums), sums


@dataclass(kw_only=True)
class RowOptions:
    """Arguments of a row optimizer besides the parameters it trains, with defaults.

    Subclasses name a rule and add its hyperparameters, under torch's names.
    """

    rule_class: ClassVar[type[Rule]]

    mode: Mode = "exact"
    stochastic_rounding: bool = False

    def hyperparameters(self) -> dict[str, Any]:
        """Return the options of the rule, by name."""
        general = {field.name for field in fields(RowOptions)}
        return {name: value for name, value in vars(self).items() if name not in general}

    @classmethod
    def constructor_signature(cls, *first: str, others: str = "") -> inspect.Signature:
        """Return the signature of a constructor that takes these options.

        Args:
            first: Names of the arguments before the options.
            others: Name that collects further keyword arguments, if any.
        """
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in first]
        parameters += inspect.signature(cls).parameters.values()
        if others:
            parameters.append(Parameter(others, Parameter.VAR_KEYWORD))
        return inspect.Signature(parameters)


def check_fractions(values: Sequence[Any], *names: str) -> None:
    """Raise ValueError unless there is a value in [0, 1) for each name."""
    if not hasattr(values, "__len__") or len(values) != len(names):
        group = names[0].partition("[")[0]
        raise ValueError(f"{group} must be {len(names)} numbers, got {values}")
    for name, value in zip(names, values, strict=True):
        if not 0 <= number(name, value) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")


def gradient_sign(options: Options) -> float:
    """Return the factor of the gradient: −1 to maximize."""
    return -1.0 if options["maximize"] else 1.0
