"""Base class of the row optimizers for NumPy layers; see :mod:`firstlayer.optim`."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec

import numpy as np

from .. import kernels
from .._check import ids_in_range, integers, not_masked, one_of
from ..embeddings.row_gradient import RowGradient
from .rule import MODES, RowOptions
from .table_state import TableState

# Names in a layer's gradients that are inputs, not parameters.
INPUTS = ("x", "inputs_embeds", "per_sample_weights")

P = ParamSpec("P")
Constructor = Callable[Concatenate[Any, Any, P], None]


def with_options(
    options_class: Callable[P, RowOptions],
) -> Callable[[Callable[..., None]], Constructor[P]]:
    """Make a constructor ``(self, layer, options)`` take the options as its arguments.

    Its signature, for tools and for type checkers, lists the fields of ``options_class``.
    """

    def decorate(constructor: Callable[..., None]) -> Constructor[P]:
        @functools.wraps(constructor)
        def __init__(self: Any, layer: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            constructor(self, layer, options_class(*args, **kwargs))

        signature = options_class.constructor_signature("self", "layer")  # pyright: ignore
        __init__.__signature__ = signature  # pyright: ignore
        return __init__

    return decorate


class RowOptimizer:
    """Base class of the row optimizers for NumPy layers.

    ``mode`` is ``"exact"`` or ``"lazy"``; see :mod:`firstlayer.optim`. With
    ``stochastic_rounding``, updated rows of bfloat16 tables are rounded up or down at
    random, the nearer value with the higher probability, so that updates too small for
    bfloat16 are kept on average. Repeated runs round the same way.

    Args:
        layer: Layer whose parameters are trained.
        options: Arguments of the optimizer. The attribute ``options`` is a dictionary of
            the hyperparameters, which may be changed between steps.
    """

    def __init__(self, layer: Any, options: RowOptions) -> None:
        kernels.require_compiler(type(self).__name__)
        self.mode = one_of("mode", options.mode, MODES)
        self.rule = options.rule_class(lazy=self.mode == "lazy")
        self.options = options.hyperparameters()
        self.rule.check(self.options)
        self._tables, self._parameters = layer.embeddings(), layer.parameters()
        for name, value in self._parameters.items():
            if not value.flags.writeable:
                raise ValueError(f"{name} must be writable to be trained, got it read-only")
        self.stochastic_rounding = options.stochastic_rounding
        if self.stochastic_rounding:
            check_rounding(value.dtype.name for value in self._parameters.values())
        #: State of each parameter, by name.
        self.table_states = {name: self._new_table_state(name) for name in self._parameters}
        self._attach()

    @property
    def lr(self) -> float:
        """Learning rate. Schedules set it."""
        return self.options["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self.options["lr"] = value

    def step(self, grads: Mapping[str, RowGradient | np.ndarray]) -> None:
        """Take a step with the gradients that a layer's ``pull(dy)`` returned.

        Parameters without a gradient do not change, as in torch. Gradients of the layer's
        inputs are ignored. Nothing changes if a gradient is invalid.

        Args:
            grads: For each name, a row gradient or an array of the parameter's shape.
        """
        own = {name: grad for name, grad in grads.items() if name in self.table_states}
        unknown = sorted(grads.keys() - own.keys() - set(INPUTS))
        if unknown:
            raise ValueError(f"grads must be of {sorted(self.table_states)}, got {unknown}")
        for name, grad in own.items():
            self._check_gradient(name, grad)
        for name, grad in own.items():
            state = self.table_states[name]
            if isinstance(grad, RowGradient):
                state.step(grad.ids, grad.values, options=self.options)
            else:
                state.step(None, grad.reshape(state.shape), options=self.options)

    def flush(self) -> None:
        """Bring every row up to date; call before using ``weight`` directly."""
        for state in self.table_states.values():
            state.catch_up()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Bring every row up to date and return copies of the state's arrays.

        Keys are ``"{parameter}.{array}"`` and ``"{parameter}.step"``.
        """
        self.flush()
        arrays = {}
        for name, state in self.table_states.items():
            arrays[f"{name}.step"] = np.array(state.step_count)
            for key, array in state.state.items():
                arrays[f"{name}.{key}"] = array.copy()
        return arrays

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a state. Nothing changes if it does not fit."""
        loaded = {name: self._loaded(name, state) for name in self.table_states}
        self.flush()
        self.table_states |= loaded
        self._attach()

    def _new_table_state(
        self, name: str, state: dict[str, np.ndarray] | None = None, *, step: int = 0
    ) -> TableState:
        is_bfloat16 = self._parameters[name].dtype.name == "bfloat16"
        return TableState(
            self.rule,
            self._table(name),
            options=self.options,
            stochastic_rounding=self.stochastic_rounding and is_bfloat16,
            state=state,
            step=step,
        )

    def _table(self, name: str) -> Callable[[], np.ndarray]:
        if name in self._tables:
            # The layer refers to its TableState; a strong reference back would be a cycle.
            owner = weakref.proxy(self._tables[name])
            return lambda: owner.weight
        # Other parameters are treated as one row, or as one row per entry if the rule has
        # one number per row.
        array, shape = self._parameters[name], (1, -1)
        if self.rule.state_width(2) == 1:
            shape = (-1, 1)
        return lambda: array.reshape(shape)

    def _attach(self) -> None:
        """Put the states on the layers, which catch up with them before they read rows."""
        for name, owner in self._tables.items():
            if owner.table_state is not None:
                owner.table_state.catch_up()
            owner.table_state = None if self.rule.lazy else self.table_states[name]

    def _check_gradient(self, name: str, grad: RowGradient | np.ndarray) -> None:
        state, is_table = self.table_states[name], name in self._tables
        shape = state.shape if is_table else self._parameters[name].shape
        if not isinstance(grad, RowGradient):
            if np.shape(not_masked(grad, name=f"grads[{name!r}]")) != shape:
                raise ValueError(
                    f"grads[{name!r}] must have shape {shape}, got {np.shape(grad)}"
                )
            row = state.first_stale()
        else:
            if not is_table or grad.values.shape[1:] != shape[1:]:
                raise ValueError(
                    f"grads[{name!r}] must be for rows of {shape}, "
                    f"got values of shape {grad.values.shape}"
                )
            _check_ids(name, grad, rows=shape[0])
            row = state.first_stale(grad.ids)
        if row is not None:
            raise ValueError(
                f"row {row} was read before it was brought up to date; "
                'look it up through its layer, call flush(), or use mode="lazy"'
            )

    def _loaded(self, name: str, state: Mapping[str, np.ndarray]) -> TableState:
        current, arrays = self.table_states[name].state, {}
        for key in ("step", *current):
            if f"{name}.{key}" not in state:
                raise ValueError(f"state must have {name}.{key}, got {sorted(state)}")
        for key, array in current.items():
            arrays[key] = np.array(state[f"{name}.{key}"], array.dtype)
            if arrays[key].shape != array.shape:
                raise ValueError(
                    f"{name}.{key} must have shape {array.shape}, got {arrays[key].shape}"
                )
        return self._new_table_state(name, arrays, step=int(state[f"{name}.step"]))


def _check_ids(name: str, grad: RowGradient, *, rows: int) -> None:
    """Raise unless ids are ascending row numbers: kernels write to these rows unchecked."""
    ids = integers(grad.ids, name=f"grads[{name!r}].ids")
    if ids.shape != grad.values.shape[:1]:
        raise ValueError(
            f"grads[{name!r}] must have an id for each of {len(grad.values)} rows, "
            f"got ids of shape {ids.shape}"
        )
    if (ids[1:] <= ids[:-1]).any():
        raise ValueError(f"grads[{name!r}].ids must be ascending, each once")
    ids_in_range(ids, rows, name=f"grads[{name!r}].ids", bound="the number of rows")


def check_rounding(dtypes: Iterable[str]) -> None:
    """Raise ValueError for stochastic rounding of parameters none of which is bfloat16."""
    names = sorted(set(dtypes))
    if "bfloat16" not in names:
        raise ValueError(f"stochastic_rounding needs a table in bfloat16, got {names}")
